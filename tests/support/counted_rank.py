"""A rank without torch that writes its number and thread count to the folder of its argument."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    (Path(sys.argv[1]) / f"rank-{os.environ['RANK']}-{os.environ['OMP_NUM_THREADS']}").touch()
