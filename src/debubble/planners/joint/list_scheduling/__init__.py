"""A compiled list scheduler: a whole step in a fraction of a millisecond, as lowering and simulation would time it.

`stage_table.py` is what it reads, `state.py` what it knows, `rules.py` what starts next, `transfers.py` who has the
links, and `scheduler.py` the loop over decisions.
"""
