"""Where random numbers come from: one independent stream per purpose and step, or the operating system's entropy."""

import builtins
import hashlib
import os
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def stream(key: str, purpose: str, step: int = 0) -> np.random.Generator:
    """The random stream of one purpose at one step of what `key` names, the same whenever it is asked for.

    Streams of different arguments are independent (SFC64, 128-bit seeds from BLAKE2b). A killed run that does a step
    again draws the same sample and the same noise, so nothing is spent twice. Two releases that share noise cancel it,
    so the key must name all that decides a release: settings, private data, program and device (`run.noise_key`).
    """
    text = f"{key}\0{purpose}\0{step}".encode()
    return np.random.Generator(np.random.SFC64(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())))


def normal(source: "np.random.Generator | SystemEntropy", n: int, device: torch.device) -> Tensor:
    """Standard normal numbers, float64 [n]; on a GPU drawn there, from a generator seeded by `source`."""
    if device.type == "cuda" and isinstance(source, np.random.Generator):
        generator = torch.Generator(device).manual_seed(int(source.integers(2**63)))
        return torch.randn(n, generator=generator, dtype=torch.float64, device=device)
    return torch.from_numpy(source.standard_normal(n)).to(device)


class SystemEntropy:
    """Uniform and normal numbers and bytes from os.urandom, with the methods of numpy's Generator that are needed.

    Normals are the sum of four over two, which hides the gaps that floating point leaves in a single one (Holohan and
    Braghin 2021, arXiv:2107.10138).
    """

    def bytes(self, n: int) -> builtins.bytes:
        """n random bytes."""
        return os.urandom(n)

    def random(self, n: int) -> NDArray[np.float64]:
        """Uniform in [0, 1) on a grid of 2^-53, [n]."""
        bits = np.frombuffer(os.urandom(8 * n), dtype=np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def standard_normal(self, n: int) -> NDArray[np.float64]:
        """Standard normal, [n], by Box and Muller's transform."""
        u, v = 1 - self.random(4 * n), self.random(4 * n)
        four: NDArray[np.float64] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        return four.reshape(4, n).sum(0) / 2


Source = np.random.Generator | SystemEntropy
Sources = Callable[[str, int], Source]  # of a purpose and a step


def below(n: int, source: Source) -> int:
    """Uniform in 0, ..., n - 1, exactly, for n of any size."""
    bits = (n - 1).bit_length()
    while True:
        drawn = int.from_bytes(source.bytes((bits + 7) // 8)) >> (-bits % 8)
        if drawn < n:
            return drawn


def content(*tensors: Tensor) -> str:
    """A fingerprint of what tensors hold, to name streams by."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
