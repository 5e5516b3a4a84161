"""Online scheduling: a search beside the training finds better orders for the costs that the run itself measures.

`Online` is the whole surface.  `controller` decides, on rank 0 and without torch; `search` and `searching` are the two
sides of the process that searches; `costs`, `effect` and `sums` are what the decisions rest on.
"""
