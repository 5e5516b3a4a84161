"""`python -m debubble` is `debubble`."""

import sys

from debubble.interrupts import INTERRUPTED, SENTENCE, exit_process, raise_after_imports


def main() -> None:
    """Entry point of `debubble`, where a Ctrl-C may also come before its imports are done."""
    raise_after_imports()
    try:
        from debubble.cli import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write(SENTENCE)
        exit_process(SystemExit(INTERRUPTED))
    except SystemExit as end:
        exit_process(end)


if __name__ == "__main__":
    main()
