"""Files and folders of the user's choice: written into or replaced as they are meant to be, or refused before work."""

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from pubsel.cli import _help, main
from pubsel.messages import UsageError, UserError
from pubsel.records import find
from pubsel.release.reopen import folder_of
from pubsel.settings.compose import composed
from pubsel.settings.keys import SCHEMAS
from pubsel.settings.outputs import OWNED, check_folder, folder, output


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(to, text="new\n"):
    with output(to).open() as file:
        file.write(text)


def test_a_file_is_replaced_whole_and_a_link_stays(tmp_path):
    Path("real.csv").write_text("old")
    Path("link").symlink_to("real.csv")
    Path("dangling").symlink_to("deep/er.csv")
    with pytest.raises(TypeError), output("link").open() as file:
        file.writelines(["half", None])
    assert Path("real.csv").read_text() == "old"
    for to, real in (("link", "real.csv"), ("dangling", "deep/er.csv"), ("a" * 250, "a" * 250)):
        written(to)
        assert Path(real).read_text() == "new\n"
    assert Path("link").is_symlink()
    assert Path("dangling").is_symlink()
    assert not list(Path().rglob(".*"))


@pytest.mark.attack
def test_what_is_no_plain_file_is_written_into(capfd):
    os.mkfifo("pipe")
    Path("to_null").symlink_to("/dev/null")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    written("pipe")
    reader.join()
    assert read == ["new\n"]
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)

    capfd.readouterr()  # it may have waited for the reader
    before = os.stat("/dev/null")
    for to in ("/dev/null", "to_null"):
        written(to)
    assert os.path.samestat(os.stat("/dev/null"), before)
    with pytest.raises(UserError, match="cannot write to=/dev/full: No space left on device"):
        written("/dev/full")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)

    Path("to_stdout").symlink_to("/dev/stdout")
    for to in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "to_stdout"):
        assert (output(to).is_stdout, output(to).report("a line")) == (True, "")
        written(to)
    assert tuple(capfd.readouterr()) == (5 * "new\n", 5 * "a line\n")


def test_a_file_that_is_open_already_is_written_on(tmp_path):
    with open("log", "a+") as log:
        log.write("first\n")
        log.flush()
        written(f"/dev/fd/{log.fileno()}")
    assert Path("log").read_text() == "first\nnew\n"


@pytest.mark.attack
def test_what_is_read_or_cannot_be_written_is_refused(monkeypatch):
    Path("in.csv").write_text("x")
    os.link("in.csv", "hard")
    Path("soft").symlink_to("in.csv")
    Path("loop").symlink_to("loop")
    Path("dir").mkdir()
    for to in ("in.csv", "./in.csv", "dir/../in.csv", "hard", "soft"):
        with pytest.raises(UsageError, match=r"this is in\.csv, which the command reads"):
            output(to, [Path("absent"), Path("in.csv")])
    for to in ("", ".", "..", "/", "dir", "new/"):
        with pytest.raises(UsageError, match="a folder: name a file"):
            output(to)
    for to in ("in.csv/a", "loop", "/proc/new", "/proc/self/fd/99", "b" * 300):
        with pytest.raises(UserError, match=f"cannot write to={to}: "):
            output(to)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"cannot write to=in\.csv: Permission denied"):
        output("in.csv")
    monkeypatch.setattr("stat.S_IFMT", lambda mode: stat.S_IFBLK)
    with pytest.raises(UsageError, match="a disk or a socket"):
        output("in.csv")


def test_folders_are_apart_from_what_is_read_and_can_be_made(tmp_path, monkeypatch):
    for name in ("mine", "results", "full/a"):
        Path(name).mkdir(parents=True)
    Path("into_mine").symlink_to("mine")
    assert folder("new/er", "results", ["./mine", "cifar10"]) == tmp_path / "new" / "er"
    assert folder("full", "results") == tmp_path / "full"
    for to in ("mine/x", "into_mine/x", "results/x", "results/runs/a", "absent/../mine/x"):
        for check in (folder, check_folder):
            with pytest.raises(UsageError, match="which this command uses"):
                check(to, "results", ["./mine"])
    for to in ("", "-", ".", "..", "/", "into_mine"):
        with pytest.raises(UsageError):
            folder(to, "results", ["./mine"])
    for to in ("/proc/x", "mine/../f/x"):
        Path("f").write_text("")
        with pytest.raises(UserError, match="cannot write"):
            folder(to, "results")
    assert folder("new", ".") == tmp_path / "new"
    Path(OWNED[0]).mkdir()
    with pytest.raises(UsageError, match="which this command uses"):
        folder(f"{OWNED[0]}/x", ".")
    assert not Path("new").exists()


@pytest.mark.parametrize("command", [name for name, schema in SCHEMAS.items() if "to" in schema.__annotations__])
def test_output_is_another_word_for_to(command, capsys):
    for words in (["output=a"], ["to=a"], ["++output=a"]):
        with composed(command, words) as values:
            assert values.to == "a"
    assert main([command, "to=a", "output=b"]) == 2
    assert "to=a output=b: two words for one setting: give to=... alone" in capsys.readouterr().err


@pytest.mark.attack
@pytest.mark.parametrize("name", ["", ".", "..", "/", "./", "../runs", "results/runs/a-run", "*", "a-*", "a-", "run"])
def test_no_name_but_a_whole_one_deletes(name, capsys):
    for run in ("a-run", "b-run"):
        Path("results/runs", run).mkdir(parents=True)
        Path("results/runs", run, "log.txt").write_text("")
    main(["runs", "delete", name, "yes=true"])
    main(["runs", "delete", "yes=true"])
    main(["runs", "delete", name, "all=true", "yes=true"])
    main(["runs", "delete", "state=unfinished", "all=true", "yes=true"])
    assert len(list(Path("results/runs").glob("*/log.txt"))) == 2
    capsys.readouterr()
    assert main(["runs", "delete", "all=true"]) == 2
    out, err = capsys.readouterr()
    assert (out, re.findall(r"^(\S+)  unfinished", err, re.MULTILINE)) == ("", ["a-run", "b-run"])
    assert main(["runs", "delete", "a-run", "yes=true"]) == 0
    assert main(["runs", "delete", "all=true", "yes=true"]) == 0
    assert not list(Path("results/runs").glob("*/log.txt"))


@pytest.mark.parametrize("name", ["", " ", ".", ".."])
def test_an_empty_or_dotted_name_is_no_record(name, capsys):
    for place in ("results", "results/runs"):
        Path(place).mkdir(exist_ok=True)
        Path(place, "result.json").write_text('{"identity": "x"}')
    for call in (lambda: folder_of(name, Path("results")), lambda: find(name, Path("results"))):
        with pytest.raises(UserError):
            call()
    for words in (["runs", "show", name], ["runs", "list", name], ["attack", "loss", f"run='{name}'"]):
        assert main(words) == 2, words


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_that_help_lists_is_accepted(command):
    listed = re.findall(r"^  (\+?[\w.]+)=(.*)$", _help(command, []), re.MULTILINE)
    keys = [key for key, value in listed if not re.match(r"NAME|\{", value)]
    assert len(keys) > 2
    with composed(command, [f"{key}=null" for key in keys if key not in ("pair", "model", "distance")]):
        pass
