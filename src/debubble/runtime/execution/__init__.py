"""Execution of a device's instructions of a Program: lanes, events, operations, and their interpreter."""
