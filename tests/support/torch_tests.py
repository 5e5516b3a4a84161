"""Setup of test folders that need torch: they are skipped without it, and compute on one thread."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]

if not collect_ignore_glob:
    import torch

    torch.set_num_threads(1)
