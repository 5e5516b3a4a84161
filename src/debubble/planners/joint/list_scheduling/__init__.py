"""A compiled list scheduler: a full step in a fraction of a millisecond, timed as by lowering and simulation.

`stage_table.py` is the input, `state.py` the state, `rules.py` decides what starts next, `transfers.py` arbitrates the
links, and `scheduler.py` is the main loop.
"""
