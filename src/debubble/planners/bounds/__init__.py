"""Lower bounds that every plan of a problem obeys, and what they argue with.

`proven.py` takes the best of the others: `whole_units.py` assigns units to devices, and `ramps.py` counts what memory
and links let start before the first backward and end after the last forward.  `host_steps.py` says how long CPU
optimizer steps take at least after it.  `quick_plans.py` bounds the plans by which degrees are ranked.
"""
