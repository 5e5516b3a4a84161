"""Online scheduling: a search next to the training finds better orders for the costs that the run itself measures.

`OnlineScheduler` in `controller` is the whole surface: it decides, on rank 0 and without torch, by what `measurement`
has of the run.  `scheduler` searches, in a process that `search_process` starts; `memory_variants` offers it plans that
keep more or less, `partition` those with other units in their stages; `journal` writes down what was done.
"""
