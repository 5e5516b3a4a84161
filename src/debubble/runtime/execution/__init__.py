"""Execution of a device's part of a Program: lanes, events, stages."""
