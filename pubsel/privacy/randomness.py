"""Sources of random numbers: one independent stream per purpose and step, seeded or keyed by the operating system.

`stream` is for public draws. Secret ones (samples, noise, coins, labels of private examples) come from a `Secret`,
which only `secret` makes.
"""

import builtins
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from pubsel.files import digest, in_parts, sent
from pubsel.messages import UserError

HASHED = 2**20  # bytes of a tensor at a time
KEY, COUNTER = 32, 16  # bytes that the operating system gives for each stream
BLOCK = 2**14  # normal numbers at a time
DRAWERS, AHEAD = 8, 2**31  # threads that draw noise ahead, and bytes of it, at most


def stream(key: str, purpose: str, step: int = 0) -> np.random.Generator:
    """Return the random stream of one purpose at one step under `key`, the same on every call.

    Streams of different arguments are independent (SFC64, 128-bit seeds from BLAKE2b).
    """
    # parts apart by a zero byte, so that no two triples give one text
    text = f"{key}\0{purpose}\0{step}".encode()
    return np.random.Generator(np.random.SFC64(int(digest([text]), 16)))


class Normals(Protocol):
    """A source of normal numbers."""

    def standard_normal(self, n: int, /) -> NDArray[np.float64]: ...


def normal(source: Normals, n: int, device: torch.device) -> Tensor:
    """Return standard normal numbers, float64 [n], the same on every device: they are drawn on the host."""
    return sent(torch.from_numpy(source.standard_normal(n)), device)


class SystemEntropy:
    """Uniform and normal numbers and bytes that nobody can repeat, with the methods of numpy's Generator that are
    needed: the key stream of AES-256 in counter mode (NIST SP 800-38A), whose key and first counter os.urandom gives.

    Each source has a new key, which is gone with it: of the noise of one step nothing follows for that of another. A
    process that is forked draws a new key, and so does a copy, or both would continue with the same numbers.
    """

    of_system = True

    def __init__(self) -> None:
        self._process = -1

    def __reduce__(self) -> tuple[type["SystemEntropy"], tuple[()]]:
        return SystemEntropy, ()

    def bytes(self, n: int) -> builtins.bytes:
        """Return n random bytes."""
        if self._process != os.getpid():
            key, counter = algorithms.AES(os.urandom(KEY)), modes.CTR(os.urandom(COUNTER))
            self._process, self._stream = os.getpid(), Cipher(key, counter).encryptor()
        return self._stream.update(builtins.bytes(n))

    def random(self, n: int) -> NDArray[np.float64]:
        """Return uniform numbers in [0, 1) on a grid of 2^-53, [n]."""
        # 53 bits: as many as a float64 in [0, 1) holds
        bits = np.frombuffer(self.bytes(8 * n), dtype=np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def standard_normal(self, n: int) -> NDArray[np.float64]:
        """Return standard normal numbers, [n], by Box and Muller's transform. A release rounds them to a lattice
        (`lattice.noised`), or takes them `without_gaps`."""
        normals = np.empty(n)
        for first in range(0, n, BLOCK):  # what is computed stays in the cache
            part = normals[first : first + BLOCK]
            half = (len(part) + 1) // 2
            radius, angle = np.sqrt(-2 * np.log(1 - self.random(half))), 2 * np.pi * self.random(half)
            part[:half] = radius * np.cos(angle)
            part[half:] = (radius * np.sin(angle))[: len(part) - half]
        return normals


Source = np.random.Generator | SystemEntropy
Sources = Callable[[str, int], Source]  # of a purpose and a step


class Ahead:
    """The noise of the steps of a training, the same numbers as from `secret`. Threads of the host draw those of the
    next steps, a step each, while a GPU computes this one, so that the GPU need not wait: as many as the process has
    cores, at most DRAWERS, and as hold AHEAD bytes."""

    def __init__(self, secret: Sources, steps: int):
        self._secret, self._steps = secret, steps
        self.of_system = isinstance(secret, Secret) and secret.secure
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._most = min(DRAWERS, cores or 1)
        self._threads = ThreadPoolExecutor(self._most)
        self._waiting: dict[tuple[int, int], Future[NDArray[np.float64]]] = {}  # by step and number of draws

    def __call__(self, purpose: str, step: int) -> Normals:
        """Return the noise of a step; steps have to be requested in order."""
        drawn = SimpleNamespace(of_system=self.of_system, standard_normal=partial(self.numbers, purpose, step))
        return cast(Normals, drawn)

    def numbers(self, purpose: str, step: int, n: int) -> NDArray[np.float64]:
        # a step that was not foreseen, after a resume or of another size, is drawn at once
        foreseen = self._waiting.pop((step, n), None)
        drawn = self._secret(purpose, step).standard_normal(n) if foreseen is None else foreseen.result()
        if foreseen is None:
            self._waiting.clear()
        most = max(1, min(self._most, AHEAD // max(1, 8 * n)))
        for later in range(step + 1, min(step + 1 + most, self._steps)):
            if (later, n) not in self._waiting:
                source = self._secret(purpose, later)
                self._waiting[later, n] = self._threads.submit(source.standard_normal, n)
        return drawn


def of_system(source: Normals) -> bool:
    """Return whether numbers come from the operating system, so that nobody can repeat them."""
    return bool(getattr(source, "of_system", False))


def without_gaps(source: Source, n: int) -> NDArray[np.float64]:
    """Return standard normal numbers, [n], for what no lattice follows: of the operating system the sum of four over
    two, which hides the gaps that floating point leaves in a single one (Holohan and Braghin 2021,
    arXiv:2107.10138)."""
    if not of_system(source):
        return source.standard_normal(n)
    four: NDArray[np.float64] = source.standard_normal(4 * n).reshape(4, n)
    return four.sum(0) / 2


def by_place(key: builtins.bytes, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return four numbers in [0, 1) for each of places [n, 2], on a grid of 2^-32, [n, 4]: AES-256 of the place under
    `key`, KEY random bytes. They follow from the place, whatever other places there are, and those of different places
    are independent for everybody without the key."""
    bits = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(places.astype("<i8").tobytes())
    return np.frombuffer(bits, dtype="<u4").reshape(-1, 4) * 2.0**-32


def below(n: int, source: Source) -> int:
    """Return a uniform number in 0, ..., n - 1, exactly, for n of any size."""
    # a remainder would favour small numbers, so what is too large is drawn again
    bits = (n - 1).bit_length()
    while True:
        drawn = int.from_bytes(source.bytes((bits + 7) // 8)) >> (-bits % 8)
        if drawn < n:
            return drawn


def content(*tensors: Tensor) -> str:
    """Return a fingerprint of tensors: of their numbers, shapes and types."""

    def parts() -> Iterator[str | memoryview]:
        for tensor in tensors:
            yield f"{tuple(tensor.shape)} {tensor.dtype}\0"
            rows = max(1, HASHED * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() else 1
            for part in in_parts(tensor, rows) if tensor.dim() else [tensor]:
                yield part.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8).data

    return digest(parts())


def secret(
    what: str,
    *,
    settings: Mapping[str, Any],
    private: Iterable[Tensor],
    public: Iterable[Tensor],
    weights: Mapping[str, Tensor],
    plan: Mapping[str, Any],
    streams: Mapping[str, str],
    secure: bool,
) -> "Secret":
    """Return the secret streams of one release, which follow from ALL that decides it; with `secure`, the operating
    system's entropy.

    Two releases with the same noise would cancel it in their difference, which would reveal the contribution of one
    example. So everything that changes a bit of a release changes its streams:

    what: the kind of release, such as training. settings: all of the run that are not neutral, with its seed. private,
    public: the examples as they are used. weights: all tensors of the network at the start, and of frozen layers before
    it. plan: rate, steps, noise multiplier, epsilon and delta. streams: `code`, a digest of the program
    (`records.code`), and `place`, which changes rounding only, such as the device and the number of threads; a run may
    be resumed at another place, with everything else unchanged.
    """
    # one digest for each kind, so that a message can name what changed
    belongs = {
        "settings": _digest([what, dict(settings)]),
        "the private data": content(*private),
        "the public data": content(*public),
        "the starting weights": _digest([[name, content(tensor)] for name, tensor in weights.items()]),
        "the code": streams["code"],
        "the plan": _digest(dict(plan)),
    }
    return Secret(belongs, dict(plan), [f"0 {streams['place']}"], secure)


class Secret:
    """Secret streams of one release.

    A killed run that repeats a step at the same place draws the same sample and noise, so nothing is spent twice. At
    another place it draws new ones, because the sum may be rounded differently there; nobody saw the lost step.

    belongs: digests of everything that decides the release. With the private one, somebody who knows all examples but
    one could confirm a guess of that one: it is stored only in files of unfinished runs, and never shown.
    """

    def __init__(self, belongs: dict[str, str], plan: dict[str, Any], places: list[str], secure: bool):
        self.belongs, self.plan, self.places, self.secure = belongs, plan, places, secure
        self.key = _digest([belongs, places])
        self.begin: Callable[[str], None] | None = None  # called with the key, once, before anything is drawn

    def __call__(self, purpose: str, step: int = 0) -> "Source":
        """Return the stream of one purpose at one step."""
        # the ledger has its line before the first number is drawn
        if self.begin is not None:
            begin, self.begin = self.begin, None
            begin(self.key)
        return SystemEntropy() if self.secure else stream(self.key, purpose, step)

    def state_dict(self) -> dict[str, Any]:
        """Return a fingerprint, stored to check later that a file belongs to this release."""
        return {"belongs": self.belongs, "plan": self.plan, "places": self.places}

    def resumed(
        self, saved: Mapping[str, Any], step: int, path: Path, spent: Callable[[Mapping[str, Any]], str]
    ) -> "Secret":
        """Return the streams from `step` on of a release that began earlier, from its `state_dict`. It does not begin
        again.

        UserError names everything that has changed since, and the cost of that release so far, by spent(plan).
        """
        # the same noise on other data would cancel in a difference
        changed = [name for name, value in self.belongs.items() if saved["belongs"].get(name) != value]
        if changed:
            raise UserError(
                f"{path} is of another run: {', '.join(changed)} changed since, after it had spent "
                f"{spent(saved['plan'])}: restore what changed, or delete {path.parent} to start again, which spends "
                "its epsilon as well"
            )

        # Another place may round the sums differently: it continues with other streams.
        here = self.places[0].partition(" ")[2]
        places = list(saved["places"])
        if places[-1].partition(" ")[2] != here:
            places.append(f"{step} {here}")
        return Secret(self.belongs, self.plan, places, self.secure)


def _digest(value: Any) -> str:
    """Return a fingerprint of numbers, texts, and lists and mappings of them."""
    return digest([json.dumps(value, sort_keys=True)])
