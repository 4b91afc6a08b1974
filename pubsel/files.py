"""Files and folders: written whole or not at all, by one process at a time, read only if they are plain ones, and
mapped. Nothing here imports torch before it is used."""

import contextlib
import fcntl
import glob
import hashlib
import itertools
import mmap
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from pubsel.messages import UserError, bars, cannot_write, duration, gib, limit, say

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, device

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # modes of what is made from private data, whatever the umask
LONGEST_STEM = 200  # bytes of a name that the names of its temporary files have
PATIENCE = 1.0  # seconds that another process is waited for in silence
PAUSE = 10.0  # seconds between two lines about the progress
DAMAGE = (OSError, ValueError, EOFError)
# A private map may be written to, so the system would promise memory for all of it, and refuse more than it has.
UNPROMISED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
AT_ONCE = 2**27  # bytes of a mapped tensor that a pass over all of it holds in memory
AROUND = 2**16  # bytes that the system maps around one that is read


# Locks


def hold(lock: Path, private: bool = True, seconds: float = 0.0) -> FileLock | None:
    """Return the lock that a file stands for, held; None if another process holds it, for `seconds` at least. private:
    only its owner may open the file. OSError if it cannot be made."""
    held = FileLock(lock, mode=PRIVATE_FILE if private else -1)  # -1: as the umask says
    try:
        held.acquire(timeout=seconds)
    except Timeout:
        return None
    return held


@contextlib.contextmanager
def locked(lock: Path, what: str, private: bool = True) -> Iterator[None]:
    """Hold a lock inside, as `hold` does; if another process holds it, wait, and print a line that names `what` and the
    file of the lock."""
    held = hold(lock, private, PATIENCE)
    if held is None:
        say(f"{what}: another process works on it; waiting until it releases {lock}")
        held = hold(lock, private, -1)
    assert held is not None
    try:
        yield
    finally:
        held.release()


# Writing


@contextlib.contextmanager
def whole(path: Path, private: bool = False, folder: bool = False) -> Iterator[Path]:
    """Yield a new, empty file, or folder, that takes the place of `path` when the block ends well, and then lasts
    through a power cut; if it does not end well, nothing is left of it. OSError if that is not possible.

    private: only its owner may read it. What a process that was killed has left of the same path is removed.
    """
    # a process that was killed leaves files that nobody else would remove
    remove_left(path)
    partial, handle = _begun(path, private, folder)
    try:
        yield partial

        # The content has to be on the disk before the name points to it.
        for file in (file for file in (partial.rglob("*") if folder else ()) if file.is_file()):
            _sync(file)
            if private:
                file.chmod(PRIVATE_FILE)
        _sync(partial)
        os.replace(partial, path)
    finally:
        os.close(handle)
        _remove(partial)
    with contextlib.suppress(OSError):  # not every file system can do that with a folder
        _sync(path.parent)


def _begun(path: Path, private: bool, folder: bool) -> tuple[Path, int]:
    """Return a new file, or folder, next to `path`, and a handle with a lock, by which others see that its process
    lives. Its name has no number of a process: in each container that may be 1."""
    while True:
        partial = path.with_name(f"{_stem(path)}.{secrets.token_hex(4)}.part")
        if folder:
            partial.mkdir(PRIVATE_FOLDER if private else 0o777)
        flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_EXCL
        handle = os.open(partial, flags, PRIVATE_FILE if private else 0o666)
        if _lock(handle) is not False and partial.exists():
            if private:
                os.fchmod(handle, PRIVATE_FOLDER if folder else PRIVATE_FILE)  # whatever the umask
            return partial, handle
        os.close(handle)  # another process took it for one that was left


def left_of(path: Path) -> list[Path]:
    """Return the temporary files of a path, whether their processes still write or were killed."""
    return list(path.parent.glob(f"{glob.escape(_stem(path))}.*.part"))


def _stem(path: Path) -> str:
    """Return how the names of temporary files for a path begin, which are no longer than a name may be."""
    return "." + os.fsdecode(os.fsencode(path.name)[:LONGEST_STEM])


def left_in(folder: Path) -> list[Path]:
    """Return the temporary files of all paths in a folder, whether their processes still write or were killed."""
    return list(folder.glob(".*.part"))


def remove_left(path: Path) -> None:
    """Remove the temporary files of a path that no living process holds."""
    for left in left_of(path):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(handle):
                    _remove(left)
            finally:
                os.close(handle)


def _lock(handle: int) -> bool | None:
    """Return whether a file could be locked; None if its file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_whole(path: Path, content: str | bytes, private: bool = False) -> None:
    """Write a file: `path` has either its old content or all of the new. UserError names a folder that cannot be
    written to."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, private) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise cannot_write(f"{path.name} in folder {path.parent}", error) from None


def append(path: Path, line: bytes) -> None:
    """Append a line durably to a file that only its owner may read. OSError if not all of it is written."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    try:
        # A process that was killed, or had no space, may have left an incomplete line.
        there = os.pread(handle, os.fstat(handle).st_size, 0)
        if not there.endswith(b"\n"):
            os.ftruncate(handle, there.rfind(b"\n") + 1)

        if os.write(handle, line) != len(line):
            raise OSError(28, "No space left on device")
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner may read, unless it is there."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(PRIVATE_FOLDER)  # mkdir's own mode is cut by the umask


def guard(folder: Path) -> None:
    """Make a folder and everything in it readable and writable only by its owner; what belongs to another stays as it
    is."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            with contextlib.suppress(OSError):
                path.chmod(PRIVATE_FOLDER if path.is_dir() else PRIVATE_FILE)


# Reading


def plain(path: Path) -> Path:
    """Return a path that may be opened. UserError for a pipe, a socket or a device: to open one may wait forever, and
    to read it may never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # the one who opens it tells why
        return path
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return path
    raise UserError(f"{path}: no plain file but a pipe, a socket or a device: copy its content to a file, give that")


@contextlib.contextmanager
def reading(path: Path, remedy: str, damage: tuple[type[Exception], ...] = DAMAGE) -> Iterator[None]:
    """Read a file inside. UserError for one of the errors `damage` names the limit of the system that was met; or if
    there is none, the file and the remedy for a damaged one."""
    plain(path)
    try:
        yield
    except damage as error:
        raise unreadable(path, error, remedy) from None


def unreadable(path: Path, error: Exception, remedy: str) -> UserError:
    """Return the error of a file that cannot be read, as `reading` raises it."""
    if met := limit(error):
        return UserError(f"{path} cannot be read now: {met}")
    reason = str(error).partition("\n")[0] or type(error).__name__
    return UserError(f"{path} cannot be read ({reason}): {remedy}")


# Digests


def digest(parts: Iterable[Any], size: int = 16) -> str:
    """Return blake2b of texts, bytes and contiguous arrays, one after another: `size` bytes, in hexadecimal."""
    content = hashlib.blake2b(digest_size=size)
    for part in parts:
        content.update(part.encode() if isinstance(part, str) else part)
    return content.hexdigest()


def file_digest(path: Path, of: str = "", end: int = 0) -> str:
    """Return the digest of a text and a file without the last `end` bytes: damage to what is kept for later runs is
    noticed before anything is computed from it. of: the name of what the file is kept for, so that two files cannot
    take each other's place. A process reads a file once for that, until it changes. OSError if it cannot be read."""
    stat = path.stat()
    stamp = (path, of, end, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    # a file of many gigabytes is hashed in parts, and once in a process
    if stamp not in _KNOWN:
        with path.open("rb") as file:
            places = range(0, stat.st_size - end, 2**20)
            _KNOWN[stamp] = digest(itertools.chain([of], (file.read(min(2**20, places.stop - at)) for at in places)))
    return _KNOWN[stamp]


_KNOWN = dict[tuple[Path, str, int, int, int, int], str]()


# Memory maps: arrays and tensors of which memory holds little. The system keeps what was read of a mapped file until
# memory is short. That looks as if a process took as much memory as its images, so what was read is given back before.


def file_map(file: IO[bytes], start: int, shape: tuple[int, ...], dtype: Any) -> "NDArray[Any]":
    """Return an array that is mapped from a file, from byte `start` on. It may be larger than memory. What is changed
    in it does not reach the file. OSError or ValueError if the file is too short."""
    import numpy as np

    size = prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    # a map must begin at a page boundary, so the array starts `rest` bytes into it
    rest = start % mmap.ALLOCATIONGRANULARITY
    flags, access = mmap.MAP_PRIVATE | UNPROMISED, mmap.PROT_READ | mmap.PROT_WRITE
    content = mmap.mmap(file.fileno(), rest + size, flags=flags, prot=access, offset=start - rest)
    return np.ndarray(shape, dtype, content, rest)


def npy_map(path: Path) -> "NDArray[Any]":
    """Return the array of a npy file, mapped as `file_map` does. OSError, ValueError or EOFError if it is damaged."""
    import numpy as np

    # numpy maps for reading only, and torch takes no such array
    shown = np.load(path, mmap_mode="r")  # reads its header
    if not shown.flags.c_contiguous:
        raise ValueError("its rows are not contiguous")
    with path.open("rb") as file:
        return file_map(file, shown.offset, shown.shape, shown.dtype)


def mapped(array: "NDArray[Any]") -> "Tensor":
    """Return an array of `file_map` as a tensor that the functions below know."""
    import torch

    x = torch.from_numpy(array)
    if isinstance(array.base, mmap.mmap):
        _maps()[x] = array.base
    return x


@cache
def _maps() -> Any:
    """Return the map of each mapped tensor, while the tensor is there."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def gathered(parts: Iterable["Tensor"], n: int) -> "Tensor":
    """Return parts with n rows in all as one tensor on the CPU; of AT_ONCE bytes or more, it is mapped from a file
    without a name, so that memory holds little of it. UserError if the file cannot be written."""
    import torch

    parts = iter(parts)
    first = next(parts)
    row = first[:1].nbytes
    if n * row < AT_ONCE or len(first) == n:
        return torch.cat([first, *parts])
    try:
        with tempfile.TemporaryFile() as file:  # only its owner may read it, and it is gone with the process
            for part in itertools.chain([first], parts):
                file.write(part.contiguous().cpu().numpy().data)
            file.flush()
            return mapped(file_map(file, 0, (n, *first.shape[1:]), first.cpu().numpy().dtype))
    except OSError as error:
        raise cannot_write(f"{gib(n * row)} in {tempfile.gettempdir()}, which TMPDIR names", error) from None


def taken(x: "Tensor", places: "Tensor") -> "Tensor":
    """Return the rows of x [n, ...] at some places, int64 [m], as `gathered` does."""
    if not len(places):
        return x[places]
    rows = max(1, AT_ONCE // max(AROUND, x[:1].nbytes))

    def parts() -> Iterator["Tensor"]:
        for some in places.split(rows):
            yield x[some]
            give_back(x)

    return gathered(parts(), len(places))


def sent(x: "Tensor", device: "device") -> "Tensor":
    """Return x on `device`. A copy to a GPU is made from pinned memory, which torch keeps until the copy has ended, so
    that the host need not wait."""
    if device.type == "cuda" and x.is_cpu:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def give_back(x: "Tensor") -> None:
    """Give back the memory of what was read of a mapped tensor; if it is used again, it is read from the file again.
    Changes to the tensor are lost."""
    if (whole_map := _maps().get(x)) is not None:
        whole_map.madvise(mmap.MADV_DONTNEED)


def in_parts(x: "Tensor", rows: int) -> Iterator["Tensor"]:
    """Yield x [n, ...] in parts of some rows, as x.split does, with at most about AT_ONCE of a mapped one in memory."""
    size = 0
    for part in x.split(rows):
        yield part
        size += part.nbytes
        if size >= AT_ONCE:
            give_back(x)
            size = 0
    give_back(x)


# Progress


class ProgressLine:
    """A line now and then, on a terminal a bar: how many of n are done, and how long the others will take.

    what: who says it, at its beginning; of: what is counted.
    """

    def __init__(self, what: str, n: int, say: Callable[[str], None] = say, of: str = "images"):
        self.what, self.n, self.say, self.of = what, n, say, of
        self.done = self.read = 0
        self.began = self.reported = time.monotonic()

    def add(self, count: int, at_once: bool = False) -> None:
        """Count some more; at_once: they took no time, since they were done before."""
        self.done, self.read, now = self.done + count, self.read + (0 if at_once else count), time.monotonic()
        bars.show(self.what, self.done, self.n)
        # what was done before took no time, so it tells nothing about the rest
        if self.read and self.done < self.n and now - self.reported >= PAUSE:
            self.reported = now
            left = duration((now - self.began) / self.read * (self.n - self.done))
            line = f"{self.what}: {self.done:,} of {self.n:,} {self.of}, about {left} left"
            bars.line(self.what, line, say=self.say)
