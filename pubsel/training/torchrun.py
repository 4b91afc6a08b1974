"""Which process of how many this is, as torchrun says in the environment. This file imports no torch."""

import os


def place() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) for a process that torchrun has not started, or alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return (int(rank), int(size)) if size.isdigit() and rank.isdigit() and int(size) > 1 else (0, 1)


def on_this_machine() -> int:
    """The number of this process among those of its machine; it takes the GPU of that number."""
    return int(os.environ.get("LOCAL_RANK", place()[0]))
