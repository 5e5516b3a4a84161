"""`python -m debubble` is `debubble`."""

import sys


def main() -> None:
    """Entry point of `debubble`, where a Ctrl-C may also come before its imports are done."""
    try:
        from debubble.cli import main
    except KeyboardInterrupt:
        sys.stderr.write("debubble: interrupted.\n")
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
