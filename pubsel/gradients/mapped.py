"""Tensors that are mapped from files, of which memory holds little.

The system keeps what was read of a mapped file until memory is short. That looks as if a process took as much memory as
its images, so what was read is given back here before.
"""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

AT_ONCE = 2**27  # bytes of a mapped tensor that a pass over all of it holds in memory


def mapped(array: NDArray[Any]) -> Tensor:
    """Return an array that is mapped from a file (np.memmap, mode c) as a tensor that the functions below know."""
    x = torch.from_numpy(array)
    if isinstance(array, np.memmap):
        _MAPS[x] = array._mmap  # type: ignore[attr-defined]
    return x


_MAPS = WeakTensorKeyDictionary()  # the map of a tensor, while it is there


def is_mapped(x: Tensor) -> bool:
    """Return whether a tensor is one that `mapped` returned."""
    return x in _MAPS


def give_back(x: Tensor) -> None:
    """Give back the memory that holds what was read of a mapped tensor; it is read from the file again if it is used.
    What was changed in the tensor is lost."""
    if x in _MAPS:
        _MAPS[x].madvise(mmap.MADV_DONTNEED)


def in_parts(x: Tensor, rows: int) -> Iterator[Tensor]:
    """Yield x [n, ...] in parts of some rows, as x.split does, with at most about AT_ONCE of a mapped one in memory."""
    size = 0
    for part in x.split(rows):
        yield part
        size += part.nbytes
        if size >= AT_ONCE:
            give_back(x)
            size = 0
    give_back(x)
