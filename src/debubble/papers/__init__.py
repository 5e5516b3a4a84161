"""The four papers that debubble started from: a folder per paper, which holds its method and its figures.

Every folder has the same parts:

* `planner.py`: its planners, registered by `@planner`;
* `schedule.py`: its schedules, registered by `@schedule`, if it has schedules of its own;
* `paper.py`: its figures, tables and sections in the paper's order, which `debubble reproduce` computes;
* `paper.toml`: what it prints, and the sentences of its claims and tables, read by `printed.py`;
* `figures/`: the modules that compute them;
* other modules and folders, named after the method's own parts.

The modules of this package itself are what the reproductions share: the registry of papers, claims, drawings and pages.
No other package imports this one, but for `debubble reproduce`: the registries of planners and schedules load the
folders' modules by name (see `debubble.registry`).
"""
