"""Files that are written whole, locks that are not waited for in silence, and what is opened."""

import contextlib
import errno
import os
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm.models  # noqa: F401 (no module can be imported without a file)
import torch
from PIL import Image

from pubsel import files, records
from pubsel.data import delimited, images, open_dataset, prepared
from pubsel.data.embeddings import Shard, open_embeddings
from pubsel.data.given import given
from pubsel.data.ham10000 import read_metadata
from pubsel.data.imagenet import annotated
from pubsel.data.openml import read_arff
from pubsel.data.splits import Unreadable
from pubsel.data.torchvision_sets import fetching_files
from pubsel.files import hold, locked, plain, reading, whole, write_whole
from pubsel.messages import UserError, limit
from pubsel.models.weights import load_weights, weight_file
from pubsel.release.classifier import read_facts
from pubsel.settings.compose import composed
from tests.forked import forked

SYSTEM = [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EAGAIN, errno.ENOMEM, errno.EFBIG]


def killed_while_writing(path: str, folder: bool, begun: str) -> None:
    with whole(Path(path), folder=folder) as partial:
        (partial / "a" if folder else partial).write_text("half")
        Path(begun).touch()
        signal.pause()


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path, folder: bool) -> None:
    """By its lock, not by its age or the number of its process, which in each container may be 1."""
    path, begun = tmp_path / "name", tmp_path / "begun"
    process = forked(killed_while_writing, str(path), folder, str(begun))
    while not begun.exists():
        process.join(0.01)
    (left,) = files.left_of(path)
    (tmp_path / ".name2.0.part").write_text("of another file")

    with whole(path, folder=folder):
        assert left.exists()
    process.kill()
    process.join()
    with whole(path, folder=folder):
        assert not left.exists()
    assert sorted(os.listdir(tmp_path)) == [".name2.0.part", "begun", "name"]


def test_temporary_names_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with whole(tmp_path / "a") as first, whole(tmp_path / "a") as second:
        assert first != second
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    happened, sync, replace = list[object](), os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (happened.append(os.fstat(handle).st_ino), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (happened.append("renamed"), replace(a, b)))
    with whole(tmp_path / "name", private=True, folder=folder) as partial:
        (partial / "a" if folder else partial).write_text("all")
    inside = [(tmp_path / "name" / "a").stat().st_ino] if folder else []
    assert happened == [*inside, (tmp_path / "name").stat().st_ino, "renamed", tmp_path.stat().st_ino]
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == ({0o700, 0o600} if folder else {0o600})


def test_what_ends_badly_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), whole(tmp_path / "a", folder=True) as partial:
        (partial / "b").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    write_whole(tmp_path / "a", "old")
    with contextlib.suppress(KeyboardInterrupt), whole(tmp_path / "a") as partial:
        partial.write_text("new")
        raise KeyboardInterrupt
    assert (os.listdir(tmp_path), (tmp_path / "a").read_text()) == (["a"], "old")


def test_a_wait_for_a_lock_is_told_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, go, lines = threading.Event(), threading.Event(), list[str]()

    def other() -> None:
        with locked(tmp_path / "lock", "other"):
            is_held.set()
            go.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert is_held.wait(20)
    assert hold(tmp_path / "lock") is None
    monkeypatch.setattr(files, "PATIENCE", 0)
    monkeypatch.setattr(files, "say", lambda text: (lines.append(text), go.set()))
    with locked(tmp_path / "lock", "digits"):
        assert lines == [f"digits: another process works on it; waiting until it releases {tmp_path}/lock"]
    thread.join()


def test_no_pipe_socket_or_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    monkeypatch.setattr("io.open", lambda *_, **__: pytest.fail("opened"))
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(UserError, match="no plain file but a pipe"), reading(path, ""):
            path.read_text()
    assert plain(tmp_path / "absent") == tmp_path / "absent"


@pytest.mark.parametrize("number", SYSTEM, ids=lambda number: errno.errorcode[number])
def test_a_limit_of_the_system_is_no_damage(number: int) -> None:
    words = os.strerror(number)
    for error in (OSError(number, words), RuntimeError(f"of a library: {words}")):
        text = str(files.unreadable(Path("a.npy"), error, "delete it"))
        assert text.startswith(f"a.npy cannot be read now: {words}: ")
        assert "delete" not in text


def test_other_errors_meet_no_limit() -> None:
    assert limit(RuntimeError("can't start new thread")).endswith("ulimit -u unlimited, or set threads=1")
    for error in (OSError(errno.EACCES, "no"), ValueError("bad"), OSError("not an image")):
        assert limit(error) == ""
    assert str(files.unreadable(Path("a"), ValueError("bad\nmore"), "delete it")) == "a cannot be read (bad): delete it"


FETCHED = SimpleNamespace(options={"files": ["MNIST/raw/t10k-images"]})
READERS = {
    "a/x.png": images.photograph,
    "mine.npz": lambda path: open_dataset(str(path), str(path.parent), False),
    "mine.csv": lambda path: delimited.rows_of(path, ["path"]),
    "pool/a.npy": lambda path: open_embeddings(str(path.parent)),
    "w.pth": lambda path: weight_file("checkpoint", str(path), ""),
    "HAM10000_metadata": read_metadata,
    "mnist.arff": read_arff,
    "val_annotations.txt": lambda path: annotated(path.parent),
    "MNIST/raw/t10k-images": lambda path: fetching_files("mnist", FETCHED, path.parents[2], True).__enter__(),
    "model/mine.yaml": lambda path: composed("data", ["action=list"], path.parents[1]).__enter__(),
    "result.json": records.read_record,
    "config.json": read_facts,
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_opens_a_pipe(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    os.mkfifo(path)
    asked = [given] if path.suffix in (".png", ".npz", ".csv") else []
    for read, argument in ((READERS[name], path), *((read, str(path)) for read in asked)):
        with pytest.raises(UserError, match=f"{path.name}: no plain file but a pipe"):
            read(argument)


def read_with_no_file_left(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    for read in (
        lambda: prepared.arrays_of(folder / "a.npz", ("x",)),
        lambda: prepared.array_stream(folder / "a.npz", "x"),
        lambda: Shard(folder / "a.npy", 3, 2).rows(np.arange(1)),
        lambda: images.photograph(folder / "a.png"),
        lambda: read_facts(folder / "model.json"),
        lambda: delimited.rows_of(folder / "rows.csv", ["path"]),
        lambda: load_weights(torch.nn.Linear(1, 1), folder / "model.json", None, "checkpoint"),
    ):
        with pytest.raises(UserError, match="Too many open files: raise the limit of open files") as error:
            read()
        assert not isinstance(error.value, Unreadable)
        assert "delete" not in str(error.value)


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    """Whatever is read: with corrupt images that are skipped, each would be left out."""
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "model.json").write_text("{}")
    (tmp_path / "rows.csv").write_text("path\na.png\n")
    process = forked(read_with_no_file_left, tmp_path)
    process.join(60)
    assert process.exitcode == 0
