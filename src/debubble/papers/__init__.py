"""The four papers that debubble started from: a folder per paper, which holds its method and its figures.

Every folder has the same layout:

* `planner.py`: its planners, registered by `@planner`;
* `schedule.py`: its schedules, registered by `@schedule`, if the paper defines any;
* `paper.py`: its figures, tables and sections in the paper's order, which `debubble reproduce` computes;
* `paper.toml`: the printed numbers, and the sentences of claims and tables, read by `printed.py`;
* `figures/`: the modules that compute the figures and tables;
* other modules and folders, named after parts of the method.

The modules of this package itself are shared by all papers: their registry, claims, drawings and result pages.
Only `debubble reproduce` imports this package: the registries of planners and schedules load the folders' modules by
name (see `debubble.registry`).
"""
