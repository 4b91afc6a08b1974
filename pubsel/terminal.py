"""What the person at the terminal is told on the way; results go to stdout, this to stderr."""

import sys


def say(text: str) -> None:
    """A line, at once."""
    print(text, file=sys.stderr, flush=True)
