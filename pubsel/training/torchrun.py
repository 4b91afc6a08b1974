"""The rank of this process and the number of all, from torchrun's environment. This file imports no torch."""

import os


def place() -> tuple[int, int]:
    """Return (rank, number of processes); (0, 1) for a process that torchrun has not started, or alone."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    several = size.isdigit() and rank.isdigit() and int(size) > 1
    return (int(rank), int(size)) if several else (0, 1)


def on_this_machine() -> int:
    """Return the number of this process among those of its machine; it takes the GPU of that number."""
    return int(os.environ.get("LOCAL_RANK", place()[0]))
