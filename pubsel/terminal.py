"""What the person at the terminal is told on the way, and where it is kept; results go to stdout, this to stderr."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_logs: list[Path] = []  # where `say` writes too; the last one counts


def say(text: str) -> None:
    """A line, at once."""
    print(text, file=sys.stderr, flush=True)
    log(text)


def log(text: str) -> None:
    """A line for the log alone, with the time. A log that cannot be written ends no run."""
    if _logs:
        with contextlib.suppress(OSError), _logs[-1].open("a", encoding="utf-8") as file:
            file.writelines(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n" for line in text.splitlines())


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """What is said inside also comes to lie in the file `path`, behind what is there."""
    _logs.append(path)
    try:
        yield
    finally:
        _logs.pop()
