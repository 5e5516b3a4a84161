"""Lower bounds on the step of every plan of a problem.

`proven.py` takes the largest of these: `whole_units.py` assigns undivided units to devices; `ramps.py` limits the work
before the first backward and after the last forward by memory and links; `host_steps.py` bounds the CPU optimizer
steps after it.  `quick_plans.py` bounds the plans by which degrees are ranked.
"""
