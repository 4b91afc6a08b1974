"""The ledger: every release of private data that was drawn, whatever became of its run."""

import os
import stat
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from pubsel import records
from pubsel.commands import list_runs
from pubsel.messages import UserError
from pubsel.privacy import ledger
from pubsel.privacy.composition import components_of
from pubsel.privacy.ledger import Entry, Spent, cost_of, note, read
from pubsel.records import leave_out
from tests.made import done, failed, interrupted
from tests.synthetic import STATED, record, secret_named

SEEDED = Entry("cell", "digits", "training", 2.0, 1e-5, "key")
SECURE = SEEDED._replace(key=None)


def lines(folder: Path) -> list[dict]:
    return [line for path in (folder / "ledger").glob("*.jsonl") for line in read(path)]


def total(folder: Path) -> float:
    return cost_of(lines(folder)).epsilon


def test_epsilons_and_deltas_add_up_and_a_release_counts_once() -> None:
    training = {"cell": "cell", "what": "training", "epsilon": 2.0, "delta": 1e-5}
    choice = training | {"release": "c", "what": "choice", "epsilon": 0.5, "delta": 0.0}
    made = [training | {"release": name} for name in "aba"] + [choice]
    assert cost_of(made) == Spent(4.5, 2e-5, 3)

    # A measurement is of other examples than the training of its run, and of the same as that of another.
    measured = training | {"release": "d", "what": "measurement", "epsilon": 4.5, "delta": 3e-5}
    assert cost_of([*made, measured]) == Spent(4.5, 3e-5, 4)
    assert cost_of([*made, measured | {"cell": "other"}]) == Spent(9.0, 5e-5, 4)
    of_people = [line | {"what": f"{line['what']}, for a person (patient)"} for line in (*made, measured)]
    assert cost_of(of_people) == Spent(4.5, 3e-5, 4)
    assert components_of(of_people) == components_of([*made, measured])
    assert cost_of([]) == Spent(0.0, 0.0, 0)


def test_the_same_seeded_release_is_one_and_anything_else_another(tmp_path: Path) -> None:
    for _ in range(3):
        note(tmp_path, "content", SEEDED)
    assert total(tmp_path) == 2
    note(tmp_path, "content", SEEDED._replace(key="key of seed 2"))
    note(tmp_path, "content", SEEDED._replace(what="choice"))
    assert total(tmp_path) == 6
    assert len(list((tmp_path / "ledger").glob("*.jsonl"))) == 1
    note(tmp_path, "other content", SEEDED)
    assert len(list((tmp_path / "ledger").glob("*.jsonl"))) == 2


def test_noise_of_the_operating_system_is_new_each_time(tmp_path: Path) -> None:
    note(tmp_path, "content", SECURE)
    note(tmp_path, "content", SECURE)  # killed before anything was kept
    assert total(tmp_path) == 4
    ledger.mark_deleted(tmp_path, "cell")
    assert total(tmp_path) == 4
    note(tmp_path, "content", SECURE)
    assert total(tmp_path) == 6
    assert ledger.overview(tmp_path) == ["digits: 3 releases (2 of deleted runs), epsilon 6, delta 3e-05"]


def test_what_reads_nothing_is_left_out(tmp_path: Path) -> None:
    note(tmp_path, "content", SEEDED._replace(epsilon=0.0))
    assert os.listdir(tmp_path) == []


@pytest.mark.attack
def test_the_name_of_a_ledger_confirms_no_data(tmp_path: Path) -> None:
    """Two results folders name the same data differently; nobody but the owner reads the key."""
    before = os.umask(0)
    try:
        for folder in ("one", "two"):
            note(tmp_path / folder, "content", SEEDED)
    finally:
        os.umask(before)
    names = [path.name for path in tmp_path.glob("*/ledger/*.jsonl")]
    assert len(set(names)) == 2
    keys = {path.read_bytes() for path in tmp_path.glob("*/ledger/key")}
    assert [len(key) for key in keys] == [32, 32]
    releases = {line["release"] for folder in ("one", "two") for line in lines(tmp_path / folder)}
    assert len(releases) == 2
    for path in tmp_path.glob("*/ledger/*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_ledgers_of_one_name_are_one_sum(tmp_path: Path) -> None:
    """Features, parts and changed files of a set have other contents, and its images stand behind all of them."""
    note(tmp_path, "images", SEEDED)
    note(tmp_path, "features", SEEDED)
    note(tmp_path, "images", SEEDED._replace(private="data/digits.npz", key="another"))
    note(tmp_path, "another set", SEEDED._replace(private="mnist"))
    found = ledger.overview(tmp_path)
    assert sorted(line.partition(":")[2] for line in found) == [
        " 1 release, epsilon 2, delta 1e-05",
        " 3 releases, epsilon 6, delta 3e-05",
    ]


def test_a_line_that_was_cut_short_is_written_over(tmp_path: Path) -> None:
    note(tmp_path, "content", SECURE)
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"release": "x", "eps')
    assert total(tmp_path) == 2
    note(tmp_path, "content", SECURE)
    assert total(tmp_path) == 4
    assert path.read_text().count("\n") == 2


def test_a_line_is_on_the_disk_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, list[tuple[int, int]]()

    def noted(handle: int) -> None:
        fsync(handle)
        stat = os.fstat(handle)
        synced.append((stat.st_ino, stat.st_size))

    monkeypatch.setattr(os, "fsync", noted)
    for _ in range(2):
        note(tmp_path, "content", SECURE)
        (path,) = (tmp_path / "ledger").glob("*.jsonl")
        assert (path.stat().st_ino, path.stat().st_size) in synced


def test_a_line_of_which_a_part_was_written_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full by then."""
    note(tmp_path, "content", SECURE)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[:20]))
        with pytest.raises(UserError, match=r"cannot write to .*ledger"):
            note(tmp_path, "content", SECURE)
    assert total(tmp_path) == 2
    note(tmp_path, "content", SECURE)
    assert total(tmp_path) == 4


@pytest.mark.parametrize("damage", ["{}\n", "nonsense\n", '{"release": 1, "epsilon": "x"}\n', "[1]\n"])
def test_a_damaged_ledger_is_named_and_nothing_is_drawn(tmp_path: Path, damage: str) -> None:
    note(tmp_path, "content", SECURE)
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    path.write_text(damage + path.read_text())
    with pytest.raises(UserError, match=f"{path} does not read.*restore it"):
        note(tmp_path, "content", SECURE)
    (tmp_path / "ledger" / "key").write_bytes(b"")
    with pytest.raises(UserError, match="key is damaged: restore it"):
        note(tmp_path, "content", SECURE)


def test_where_no_line_can_be_written_nothing_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file")
    source = secret_named(secure=True)
    source.begin = lambda key: note(tmp_path, "content", SECURE)
    with pytest.raises(UserError, match=r"cannot write .*: File exists; make room, .*; nothing is drawn without"):
        source("noise", 0)


def test_the_line_is_there_before_the_first_draw_and_once(tmp_path: Path) -> None:
    source, seen = secret_named(), list[str]()

    def begin(key: str) -> None:
        seen.append(key)
        note(tmp_path, "data", SEEDED._replace(key=key))

    source.begin = begin
    assert not (tmp_path / "ledger").exists()
    for purpose in ("sample", "noise"):
        source(purpose, 0)
        assert total(tmp_path) == 2
    assert seen == [source.key]


def test_a_release_that_is_resumed_does_not_begin_again(tmp_path: Path) -> None:
    source = secret_named(secure=True)
    source.begin = pytest.fail
    source.resumed(source.state_dict(), 3, tmp_path / "checkpoint.pt", str)("noise", 3)


def test_the_ledger_is_held_by_one_process_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that made its key at once would each write under their own."""
    held = list[str]()

    def write(path: Path, *_: object, **__: object) -> None:
        with pytest.raises(Timeout):
            FileLock(tmp_path / "ledger" / "lock").acquire(timeout=0)
        held.append(path.name)

    for name in ("append", "write_whole"):
        original = getattr(ledger, name)
        both = lambda *given, original=original, **keys: write(*given) or original(*given, **keys)  # noqa: E731
        monkeypatch.setattr(ledger, name, both)
    note(tmp_path, "content", SECURE)
    ledger.mark_deleted(tmp_path, "cell")
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    assert held == ["key", path.name, path.name]


def test_what_it_spends_to_make_a_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "cell"
    assert ledger.again(folder) == ""
    note(tmp_path, "content", SEEDED._replace(what="choice", epsilon=0.5))
    note(tmp_path, "content", SECURE)
    note(tmp_path, "content", SECURE)  # of an earlier life of the run
    assert ledger.again(folder) == "; that spends epsilon 2.5 once more"
    note(tmp_path, "content", SEEDED._replace(cell="other"))
    unless = "; that spends epsilon 2 once more, unless data, settings and code are what they were"
    assert ledger.again(tmp_path / "runs" / "other") == unless


# As runs write it

TINY = """
+experiment=quickstart training.epochs=1 epsilon=2 distance=none download=false device=cpu
training.batch_size=1297 training.chunk=256 threads=1
""".split()


@pytest.mark.attack
def test_a_run_that_is_deleted_and_made_again_is_counted_twice_and_told_before(cli) -> None:
    """With noise of the operating system. Nothing said so: a second release came from `delete it to run again`."""
    secure = [*TINY, "privacy.secure_noise=true"]
    assert cli("run", *secure)[0] == 0
    assert "  digits: 1 release, epsilon 2, delta 1e-05\n" in cli("runs")[1]
    (path,) = Path("results/runs").glob("*/result.json")
    whole = path.read_text()
    path.write_text("")
    err = failed(cli, "run", *secure, code=1)
    assert err.endswith("delete it to run the cell again; that spends epsilon 2 once more\n")
    path.write_text(whole)
    err = failed(cli, "run", f"replay={path}")
    assert "spends epsilon 2 once more" in err
    code, _, err = cli("runs", "delete", path.parent.name, "yes=true")
    assert (code, err) == (0, f"{path.parent.name}  finished; to run it again spends epsilon 2 once more\n")
    assert cli("runs")[1].endswith("  digits: 1 release (1 of deleted runs), epsilon 2, delta 1e-05\n")
    assert cli("run", *secure)[0] == 0
    assert cli("runs")[1].endswith("  digits: 2 releases (1 of deleted runs), epsilon 4, delta 2e-05\n")


def test_seeded_noise_that_is_repeated_is_one_release(cli) -> None:
    for words in ([], ["results=elsewhere"], ["seed=1"]):
        assert cli("run", *TINY, *words)[0] == 0
    assert total(Path("results")) == pytest.approx(4)
    (path,) = Path("elsewhere/runs").glob("*/result.json")
    assert cli("run", f"replay={path}", "results=elsewhere", "threads=1")[0] == 0
    assert total(Path("elsewhere")) == pytest.approx(2)
    (other,) = Path("results/runs").glob("*-seed1-*")
    _, err = done(cli, "runs", "delete", other.name, "yes=true")
    assert "once more, unless data, settings and code are what they were" in err
    assert cli("runs")[1].endswith("2 releases (1 of deleted runs), epsilon 4, delta 2e-05\n")
    assert cli("run", *TINY, "seed=1")[0] == 0
    assert cli("runs")[1].endswith("2 releases, epsilon 4, delta 2e-05\n")


def test_a_divergence_that_was_seen_is_spent(cli) -> None:
    wild = [*TINY, "algorithm=dp_sgd", "training.epochs=3", "training.learning_rate=1e38"]
    assert cli("run", *wild)[0] == 1
    _, err = done(cli, "runs", "delete", "state=failed", "yes=true")
    assert "failed; to run it again spends epsilon 2 once more" in err
    assert "1 release (1 of deleted runs), epsilon 2" in cli("runs")[1]


def test_what_cannot_be_read_names_what_is_spent_again(cli) -> None:
    words = [*TINY, "training.epochs=3", "privacy.secure_noise=true", "training.checkpoint_seconds=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pubsel.release.run.trained_parameters", interrupted)
        assert cli("run", *words)[0] == 130
    (path,) = Path("results/runs").glob("*/checkpoint.pt")
    path.write_bytes(b"PK\x03\x04 and no more")
    err = failed(cli, "run", *words, code=1)
    assert "to start this run again; that spends epsilon 2 once more" in err


def test_choices_and_noisy_distances_are_releases_too(cli) -> None:
    small = ["distance.m=100", "distance.initialisations=1", "distance.k=4"]
    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "device=cpu", "threads=1", *small]
    assert cli("rank", *words)[0] == 0
    assert lines(Path("results")) == []  # without noise: not a release that is accounted for
    assert cli("rank", *words, "epsilon_select=0.5", "secure_noise=true")[0] == 0
    assert cli("rank", *words, "distance=dp_gsd", "distance.epsilon=1", "distance.delta=1e-6")[0] == 0
    found = [(line["what"], line["epsilon"], line["delta"], line["noise"]) for line in lines(Path("results"))]
    assert found == [("choice", 0.5, 0, "operating system"), ("DP-GSD", pytest.approx(1), 1e-6, "seeded")]
    auto = [*TINY, "pair.public=auto", "pair.candidates=[digits,noise]", "epsilon_select=0.25", "distance=gsd_m200"]
    assert cli("run", *auto, *small)[0] == 0
    assert [line["what"] for line in lines(Path("results"))][2:] == ["choice", "training"]
    assert cli("rank", *words, "public=[noise]", "epsilon_select=0.5")[0] == 0  # reads nothing
    assert total(Path("results")) == pytest.approx(3.75)


def test_a_first_release_is_one_too(cli) -> None:
    words = ["model=pixels", "algorithm=dp_pca", "algorithm.k=4", "algorithm.share=0.25"]
    done(cli, "run", *TINY, *words)
    found = [(line["what"], line["epsilon"]) for line in lines(Path("results"))]
    assert found == [("first release", pytest.approx(0.5, rel=1e-3)), ("training", pytest.approx(1.5, rel=1e-3))]


# Held against the records


def finished(folder: Path, cell: str = "cell", **changes: object) -> None:
    changed = record() | {"identity": cell, "private": "digits", "privacy": STATED} | changes
    records.write_record(folder / "runs" / cell / "result.json", changed)


def with_value(key: str, value: str):
    old = {"epsilon": '"epsilon": 2.0', "delta": '"delta": 1e-05'}[key]
    return lambda text: text.replace(old, f'"{key}": {value}')


CHANGES = {
    "gone": lambda text: "",
    "cut": lambda text: text[:-20],
    "smaller": with_value("epsilon", "0.1"),
    **{value: with_value("epsilon", value) for value in ("-2.0", "NaN", "Infinity", "1e999", '"2"', "null", "true")},
    **{f"delta {value}": with_value("delta", value) for value in ("-1", "NaN", "2")},
    "broken": lambda text: "{" + text,
    "lacks": lambda text: text.replace('"cell"', '"sell"'),
}


@pytest.mark.attack
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_record_says_is_spent_whatever_the_ledger_says(tmp_path: Path, change: str, capsys) -> None:
    """It was `1 release, epsilon 0.1` beside a run of epsilon 2."""
    note(tmp_path, "content", SECURE)
    finished(tmp_path)
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    assert ledger.overview(tmp_path) == ["digits: 1 release, epsilon 2, delta 1e-05"]
    path.write_text(CHANGES[change](path.read_text()))
    leave_out.cache_clear()
    (line,) = ledger.overview(tmp_path)
    assert line.endswith("epsilon 2, delta 1e-05")
    assert "(by their records alone: cell; the ledger lacks them: restore it)" in line
    assert ledger.again(tmp_path / "runs" / "cell").startswith("; that spends epsilon 2 once more")

    damaged = change not in ("gone", "cut", "smaller")
    assert (f"{path} does not read" in capsys.readouterr().err) == damaged
    if damaged:  # what is shown goes on, and what is drawn does not
        with pytest.raises(UserError, match=f"{path} does not read.*restore it"):
            note(tmp_path, "content", SECURE)


@pytest.mark.parametrize("end", ["\n", "\n\n\n", "  \n", "\r\n"])
def test_blank_lines_and_other_line_ends_are_no_damage(tmp_path: Path, end: str) -> None:
    note(tmp_path, "content", SECURE)
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n" if "\r" in end else b"\n") + end.encode())
    note(tmp_path, "content", SECURE)
    assert total(tmp_path) == 4


def test_what_is_measured_is_held_against_the_record_by_itself(tmp_path: Path) -> None:
    quality = {"table": "confusion", "counts": [[1.0]], "deviation": 1.0, "examples": 3}
    quality["figures"] = {"recall of each class": [[0.5], [0.4], [0.6]]}
    quality["privacy"] = STATED | {"epsilon": 3.0}
    note(tmp_path, "content", SECURE)
    finished(tmp_path, quality=quality)
    finished(tmp_path, "open", privacy={"valid": False, "epsilon": None})
    assert ledger.overview(tmp_path)[0].endswith("restore it), epsilon 3, delta 1e-05")


@pytest.mark.attack
def test_a_run_that_no_ledger_knows_stays_spent_once_it_is_deleted(tmp_path: Path) -> None:
    finished(tmp_path)
    assert list_runs.deleted(tmp_path / "runs" / "cell")
    assert ledger.overview(tmp_path) == ["digits: 1 release (1 of deleted runs), epsilon 2, delta 1e-05"]
