"""Digests of files that are kept for later runs: damage to a file is noticed before anything is computed from it."""

import hashlib
from pathlib import Path

DIGEST = 16  # bytes
_KNOWN = dict[tuple[Path, str, int, int, int, int], bytes]()


def digest(path: Path, of: str = "", end: int = 0) -> bytes:
    """Return blake2b of a text and a file without the last `end` bytes. of: the name of what the file is kept for, so
    that two files cannot take each other's place. A process reads a file once for that, until it changes. OSError if
    it cannot be read."""
    stat = path.stat()
    stamp = (path, of, end, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if stamp not in _KNOWN:
        content = hashlib.blake2b(of.encode(), digest_size=DIGEST)
        left = stat.st_size - end
        with path.open("rb") as file:
            while left > 0 and (part := file.read(min(left, 2**20))):
                content.update(part)
                left -= len(part)
        _KNOWN[stamp] = content.digest()
    return _KNOWN[stamp]
