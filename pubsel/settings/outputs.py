"""Files and folders that a user names with to=...: checked before any work, and written whole. Imports no torch.

What is no plain file (a pipe, a terminal, /dev/null) is written into, and never replaced. A link stays, and what it
points to is replaced.
"""

import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from pubsel.files import whole
from pubsel.messages import UsageError, UserError, cannot_write, say
from pubsel.settings.identity import is_path

STDOUT = "-"
# folders of results
OWNED = ("attacks", "audits", "distances", "figures", "ledger", "ranks", "records", "runs", "sweeps", "tables")


class Output(NamedTuple):
    """A file to write. to: as it was typed; path: behind all links; descriptor: of an open file of this process that
    it names, such as 1 for /dev/stdout; special: no plain file."""

    to: str
    path: Path
    descriptor: int | None = None
    special: bool = False

    @property
    def is_stdout(self) -> bool:
        """Return whether the content goes to standard output."""
        return self.descriptor == 1

    @contextmanager
    def open(self, private: bool = False) -> Iterator[TextIO]:
        """Yield a text file whose content comes to `to`: at once if that is no plain file, otherwise at the end, whole
        or not at all; private: only its owner may read it. UserError if it cannot be written."""
        try:
            # what Python still holds of standard output comes before what is written past it
            if self.descriptor is not None:
                if sys.stdout is not None:
                    sys.stdout.flush()
                with _as_text(os.dup(self.descriptor)) as file:
                    yield file
            elif self.special:
                with _as_text(self._opened()) as file:
                    yield file
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with whole(self.path, private) as partial, _as_text(os.open(partial, os.O_WRONLY)) as file:
                    yield file
        except BrokenPipeError:
            if self.is_stdout:  # `| head` ends the command silently
                raise
            raise UserError(f"to={self.to}: whoever read it has stopped") from None
        except OSError as error:
            raise cannot_write(f"to={self.to}", error) from None

    def _opened(self) -> int:
        """Return a descriptor of what is no plain file. A pipe without a reader makes a writer wait."""
        with suppress(OSError):
            handle = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.set_blocking(handle, True)
            return handle
        say(f"to={self.to}: waiting for a reader")
        return os.open(self.path, os.O_WRONLY | os.O_NOCTTY)

    def report(self, line: str) -> str:
        """Return a line about the content for standard output; "" if the content goes there, and say it instead."""
        if not self.is_stdout:
            return line
        say(line)
        return ""


def output(to: str, inputs: Iterable[Path] = ()) -> Output:
    """Return the file to write, `-` for standard output, before anything is written. UsageError if it is a folder, a
    disk, or a file of `inputs`; UserError if it cannot be written."""
    named = Path(to).expanduser()
    try:
        descriptor, there = 1 if to == STDOUT else _descriptor(named), None
        with suppress(FileNotFoundError):
            there = os.stat(named) if descriptor is None else os.fstat(descriptor)
        # an input is recognised by its file, since a link may have any name
        for path in inputs:
            with suppress(OSError):
                if there is not None and os.path.samestat(there, os.stat(path)):
                    raise UsageError(f"to={to}: this is {path}, which the command reads: name another file")
        if descriptor is not None:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise PermissionError(errno.EACCES, "open for reading only")
            return Output(to, named, descriptor)

        # a link stays, so what it points to is checked
        path, kind = Path(os.path.realpath(named)), stat.S_IFMT(there.st_mode) if there else stat.S_IFREG
        if not to or to.endswith(os.sep) or kind == stat.S_IFDIR:
            raise UsageError(f"to={to}: a folder: name a file")
        if kind in (stat.S_IFBLK, stat.S_IFSOCK):
            raise UsageError(f"to={to}: a disk or a socket: name a file")
        if there is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if kind == stat.S_IFREG:
            _probe(path.parent)
        return Output(to, path, special=kind != stat.S_IFREG)
    except OSError as error:
        raise cannot_write(f"to={to}", error) from None


def folder(to: str, results: str, inputs: Iterable[str] = ()) -> Path:
    """Return the folder to make, or that is there. UsageError if it is a link, the folder that this runs in, or no
    folder. Otherwise as `check_folder`."""
    target = Path(to).expanduser()
    try:
        if target.is_symlink() or Path.cwd().is_relative_to(target.resolve()):
            raise UsageError(f"to={to}: a link, or the folder that you are in: give a new folder")
        target = target.resolve()
        if target.exists() and not target.is_dir():
            raise UsageError(f"to={to}: it is there already: give a new folder, or delete it")
    except OSError as error:
        raise cannot_write(f"to={to}", error) from None
    check_folder(to, results, inputs)
    return target


def check_folder(to: str, results: str, inputs: Iterable[str] = ()) -> None:
    """Raise UsageError if a folder to write lies in `results` or in a folder of `inputs`; UserError if it cannot be
    made, or nothing can be written in it."""
    if to in ("", STDOUT):
        raise UsageError(f"to={to}: name a folder")
    target = Path(to).expanduser().resolve()
    kept = Path(results).expanduser().resolve()
    # in the folder that one works in, only the folders that pubsel makes are taken
    places = [kept] if not Path.cwd().is_relative_to(kept) else [kept / name for name in OWNED]
    places += [Path(name).expanduser().resolve() for name in inputs if is_path(name)]
    for place in places:
        if place in target.parents or target == kept:
            raise UsageError(f"to={to}: inside of {place}, which this command uses: give a folder elsewhere")
    try:
        _probe(target)
    except OSError as error:
        raise cannot_write(f"to={to}", error) from None


def _probe(place: Path) -> None:
    """Raise OSError if nothing can be written in a folder, or in the nearest one above that exists."""
    while not os.path.lexists(place):
        place = place.parent
    with tempfile.TemporaryFile(dir=place):
        pass


def _descriptor(path: Path) -> int | None:
    """Return the number of the open file of this process that a path such as /dev/stdout leads to; None for others.
    Opened once more by that path, a file would be written from its beginning."""
    descriptors = Path("/proc/self/fd").resolve()
    for _ in range(40):  # links that Linux follows
        if path.name.isdecimal() and path.parent.resolve() == descriptors and path.exists():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent.resolve() / path.readlink()
    return None


def _as_text(handle: int) -> TextIO:
    return os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="")
