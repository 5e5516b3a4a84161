"""Execution of a device's part of a Program: lanes, events, operations, and what interprets them."""
