"""Where random numbers come from: one independent stream per purpose and step, or the operating system's entropy."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PARTS, FEW = 4, 2**15  # more than FEW normal numbers are drawn in so many parts


def stream(key: str, purpose: str, step: int = 0) -> np.random.Generator:
    """The random stream of one purpose at one step of what `key` names, the same whenever it is asked for.

    Streams of different arguments are independent (Philox, 128-bit keys from BLAKE2b). A killed run that does a step
    again draws the same sample and the same noise, so nothing is spent twice. Two releases that share noise cancel it,
    so the key must name all that decides a release: settings, private data, program and device (`run.noise_key`).
    """
    text = f"{key}\0{purpose}\0{step}".encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())))


def normal(source: "np.random.Generator | SystemEntropy", n: int, device: torch.device) -> Tensor:
    """Standard normal numbers, float64 [n]: on a GPU by a generator that the stream `source` seeds; on a CPU in
    PARTS, by threads, each from `source` jumped ahead once more (2^128 numbers), whatever the number of threads."""
    if isinstance(source, SystemEntropy):
        return torch.from_numpy(source.standard_normal(n)).to(device)
    if device.type == "cuda":
        generator = torch.Generator(device).manual_seed(int(source.integers(2**63)))
        return torch.randn(n, generator=generator, dtype=torch.float64, device=device)
    drawn = np.empty(n)
    if n <= FEW:
        source.standard_normal(out=drawn)
        return torch.from_numpy(drawn)
    philox = source.bit_generator
    assert isinstance(philox, np.random.Philox)  # see stream
    *ahead, after = (philox.jumped(i) for i in range(PARTS + 1))
    streams, parts = map(np.random.Generator, ahead), np.array_split(drawn, PARTS)
    list(_threads(torch.get_num_threads()).map(lambda s, part: s.standard_normal(out=part), streams, parts))
    philox.state = after.state  # what is asked for next has not been drawn
    return torch.from_numpy(drawn)


@cache
def _threads(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n)


class SystemEntropy:
    """Uniform and normal numbers from os.urandom, with the two methods of numpy's Generator that training needs.

    Normals are the sum of four over two, which hides the gaps that floating point leaves in a single one (Holohan and
    Braghin 2021, arXiv:2107.10138).
    """

    def random(self, n: int) -> NDArray[np.float64]:
        """Uniform in [0, 1) on a grid of 2^-53, [n]."""
        bits = np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def standard_normal(self, n: int) -> NDArray[np.float64]:
        """Standard normal, [n], by Box and Muller's transform."""
        u, v = 1 - self.random(4 * n), self.random(4 * n)
        four: NDArray[np.float64] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        return four.reshape(4, n).sum(0) / 2
