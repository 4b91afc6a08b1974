"""Tensors that are mapped from files, of which memory holds little.

The system keeps what was read of a mapped file until memory is short. That looks as if a process took as much memory as
its images, so what was read is given back here before.
"""

import mmap
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# A private map may be written to, so the system would promise memory for all of it, and refuse more than it has.
UNPROMISED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
AT_ONCE = 2**27  # bytes of a mapped tensor that a pass over all of it holds in memory


def file_map(file: IO[bytes], start: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array that is mapped from a file, from byte `start` on. It may be larger than memory. What is changed
    in it does not reach the file. OSError or ValueError if the file is too short."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    rest = start % mmap.ALLOCATIONGRANULARITY
    flags, access = mmap.MAP_PRIVATE | UNPROMISED, mmap.PROT_READ | mmap.PROT_WRITE
    whole = mmap.mmap(file.fileno(), rest + size, flags=flags, prot=access, offset=start - rest)
    return np.ndarray(shape, dtype, whole, rest)


def npy_map(path: Path) -> NDArray[Any]:
    """Return the array of a npy file, mapped as `file_map` does. OSError, ValueError or EOFError if it is damaged."""
    shown = np.load(path, mmap_mode="r")  # reads its header
    if not shown.flags.c_contiguous:
        raise ValueError("its rows are not in a row")
    with path.open("rb") as file:
        return file_map(file, shown.offset, shown.shape, shown.dtype)


def mapped(array: NDArray[Any]) -> Tensor:
    """Return an array of `file_map` as a tensor that the functions below know."""
    x = torch.from_numpy(array)
    if isinstance(array.base, mmap.mmap):
        _MAPS[x] = array.base
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
