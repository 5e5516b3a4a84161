"""`python -m debubble` is `debubble`."""

from debubble.cli import main

if __name__ == "__main__":
    main()
