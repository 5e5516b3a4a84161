"""A rank of `debubble train`; rank 1 is killed when it begins its sixth step."""

import os
import signal
from itertools import count

from debubble.runtime.launcher import run_rank
from debubble.runtime.pipeline import Pipeline
from debubble.training import rank


def main(argument: str) -> None:
    if os.environ["RANK"] == "1":
        steps, step = count(1), Pipeline.step

        def die_in_the_sixth(pipeline: Pipeline, batch: object) -> object:
            if next(steps) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(pipeline, batch)  # type: ignore[arg-type]

        Pipeline.step = die_in_the_sixth  # type: ignore[assignment]
    rank.main(argument)


if __name__ == "__main__":
    run_rank(main)
