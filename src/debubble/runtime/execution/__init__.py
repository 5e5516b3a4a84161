"""How a device runs its part of a Program: lanes, events, stages."""
