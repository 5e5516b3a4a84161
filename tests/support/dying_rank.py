"""A rank of `debubble train` that waits for its checkpoints; rank 1 is killed when it begins its sixth step."""

import os
import signal
from itertools import count
from typing import Any

from debubble.runtime.launch.launcher import run_rank
from debubble.runtime.pipeline import Pipeline
from debubble.training import rank
from debubble.training.checkpoint.saver import Saver


def main(argument: str) -> None:
    save = Saver.save

    def save_whole(saver: Saver, *arguments: Any) -> None:
        save(saver, *arguments)
        saver.wait()

    Saver.save = save_whole  # type: ignore[assignment, method-assign]
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
