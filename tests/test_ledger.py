"""The ledger: every release of private data that was drawn, whatever became of its run."""

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock, Timeout
from PIL import Image

from pubsel import records
from pubsel.cell import Spending, Streams
from pubsel.commands import list_runs
from pubsel.data import Split, load, memory
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant, ledger
from pubsel.privacy.composition import Components, components_of
from pubsel.privacy.ledger import Cap, Entry, Spent, cost_of, note, of_data, read
from pubsel.records import leave_out
from pubsel.settings.keys import Convert, Pair, Read, Scale
from tests.made import done, failed, interrupted, write_npz
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
    note(tmp_path, "content", SEEDED._replace(epsilon=0.0, delta=0.0))
    assert os.listdir(tmp_path) == []


def test_a_delta_alone_is_listed_and_capped(tmp_path: Path) -> None:
    """With so small an epsilon that its accountant finds 0, noise still has a delta."""
    assert accountant.plan(1e-14, 1e-3, 1.0, 2, 1.0).epsilon == 0
    release = SECURE._replace(epsilon=0.0, delta=1e-3, cap=Cap(1.0, 1.5e-3))
    note(tmp_path, "content", release)
    with pytest.raises(UserError, match=r"has spent delta 0\.001 of 0\.0015"):
        note(tmp_path, "content", release)
    assert cost_of(lines(tmp_path)) == Spent(0.0, 1e-3, 1)
    stated = {"identity": "lost", "private": "digits", "privacy": {"epsilon": 0.0, "delta": 1e-3}}
    assert [line["delta"] for line in ledger.lacking([], [stated])] == [1e-3]


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


# Budgets


def spent_of(results: Path) -> dict[str, tuple[float, float]]:
    return {unit: cost_of(of_unit)[:2] for unit, of_unit in ledger.per_unit(lines(results)).items()}


@pytest.mark.attack
def test_a_release_above_the_budget_has_no_line_and_the_budget_is_kept(tmp_path: Path) -> None:
    note(tmp_path, "content", SECURE._replace(cap=Cap(5.0)))
    note(tmp_path, "content", SECURE)
    with pytest.raises(UserError) as refused:
        note(tmp_path, "content", SECURE)
    assert str(refused.value) == (
        "budget: digits has spent epsilon 4 of 5 for one example; this would add 2, and 1 is left: lower it, or set "
        "budget=6 (pubsel runs budget lists the releases); nothing of it was drawn"
    )
    assert total(tmp_path) == 4
    note(tmp_path, "content", SECURE._replace(epsilon=1.0))  # all of it, to the last digit
    with pytest.raises(UserError, match="has spent epsilon 5 of 5"):
        note(tmp_path, "content", SECURE._replace(epsilon=1e-3))

    # raised by a new value, which is one more line; and what is not of these data has no budget
    note(tmp_path, "content", SECURE._replace(cap=Cap(7.0)))
    note(tmp_path, "other content", SECURE._replace(private="mnist", epsilon=100.0))
    caps = [json.loads(text) for text in (tmp_path / "ledger" / "budgets").read_text().splitlines()]
    assert [(cap["private"], cap["epsilon"], cap["delta"]) for cap in caps] == [
        ("digits", 5, None),
        ("digits", 7, None),
    ]


def test_a_budget_may_bound_delta_too(tmp_path: Path) -> None:
    note(tmp_path, "content", SECURE._replace(cap=Cap.of([100, 2.5e-5])))
    note(tmp_path, "content", SECURE)
    with pytest.raises(UserError, match=r"has spent delta 2e-05 of 2.5e-05 .* budget=\[100,3e-05\] "):
        note(tmp_path, "content", SECURE)
    note(tmp_path, "content", SECURE._replace(delta=0.0))
    for wrong in (0, -1, "inf", "x", [1, 2, 3], [1, 1.0], [], "nan"):
        with pytest.raises(UserError, match="give the most epsilon"):
            Cap.of(wrong)
    assert Cap.of(None) is None
    assert str(Cap.of("4")) == "4"


@pytest.mark.attack
def test_what_was_deleted_lost_or_is_of_another_path_is_of_the_budget(tmp_path: Path) -> None:
    finished(tmp_path, "unlisted")
    note(tmp_path, "content", SECURE._replace(original="all", cap=Cap(7.0)))
    ledger.mark_deleted(tmp_path, "cell")
    copy = SECURE._replace(private="./copy.npz", original="all")
    with pytest.raises(UserError, match=r"has spent epsilon 4 of 7 .* would add 4"):
        note(tmp_path, "another part of it", copy._replace(epsilon=4.0))
    note(tmp_path, "another part of it", copy._replace(epsilon=1.0))
    with pytest.raises(UserError, match="has spent epsilon 5 of 7"):  # by the path alone
        note(tmp_path, "a third part", SECURE._replace(private=str(Path("copy.npz").absolute()), epsilon=4.0))
    note(tmp_path, "data of a like name", SECURE._replace(private="copy", epsilon=4.0))
    assert ledger.left_for(tmp_path, "mnist", "all") == "budget 7: epsilon 5 is spent for one example, 2 is left"
    assert ledger.left_for(tmp_path, "mnist", "others") == ""


def test_what_adds_nothing_is_drawn_again_under_a_lower_budget(tmp_path: Path) -> None:
    """The same seeded noise, the measurement of a run, and a run that is resumed."""
    note(tmp_path, "content", SEEDED)
    note(tmp_path, "held out", SECURE._replace(cell="other", what="measurement", epsilon=1.0))
    with pytest.raises(UserError, match="has spent epsilon 3 of 1"):
        note(tmp_path, "content", SECURE._replace(cap=Cap(1.0)))
    note(tmp_path, "content", SEEDED)
    note(tmp_path, "content", SECURE._replace(cell="other", epsilon=1.0))
    ledger.check_planned(tmp_path, SEEDED)
    with pytest.raises(UserError, match=r"would add 0\.5"):
        ledger.check_planned(tmp_path, SEEDED._replace(epsilon=2.5))
    ledger.mark_deleted(tmp_path, "cell")
    with pytest.raises(UserError, match="would add 2"):
        ledger.check_planned(tmp_path, SEEDED)
    note(tmp_path, "content", SEEDED)


@pytest.mark.attack
def test_nothing_is_drawn_of_a_release_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = secret_named(secure=True)
    source.begin = lambda key: note(tmp_path, "content", SECURE._replace(cap=Cap(1.0)))
    monkeypatch.setattr("pubsel.privacy.randomness.SystemEntropy", pytest.fail)
    with pytest.raises(UserError, match="nothing of it was drawn"):
        source("noise", 0)
    assert lines(tmp_path) == []


@pytest.mark.attack
def test_processes_at_once_do_not_exceed_the_budget_together(tmp_path: Path) -> None:
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(3):
                    note(tmp_path, "content", SECURE._replace(cap=Cap(9.0)))
            except UserError:
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children].count(0) >= 3
    assert total(tmp_path) == 8


def test_a_damaged_budget_is_named_and_nothing_is_drawn(tmp_path: Path) -> None:
    note(tmp_path, "content", SECURE._replace(cap=Cap(9.0)))
    path = tmp_path / "ledger" / "budgets"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(UserError, match=f"{path} does not read"):
        note(tmp_path, "content", SECURE)


def test_a_person_covers_an_image_twice_and_an_image_covers_no_person(tmp_path: Path) -> None:
    person = SECURE._replace(what="training, for a person (patient)")
    note(tmp_path, "content", person)
    note(tmp_path, "content", person._replace(what="measurement, for a person (patient)"))
    assert spent_of(tmp_path) == {"person (patient)": (2.0, 1e-5)}
    note(tmp_path, "content", SECURE._replace(cell="other", epsilon=0.5, cap=Cap(4.5)))
    both = {"example": (4.5, pytest.approx(1e-5 * (2 + math.exp(2)))), "person (patient)": (2.0, 1e-5)}
    assert spent_of(tmp_path) == both
    with pytest.raises(UserError, match=r"epsilon 4\.5 of 4\.5 for one example; this would add 0\.2,"):
        note(tmp_path, "content", person._replace(epsilon=0.1, cell="third"))
    (line,) = ledger.overview(tmp_path)
    assert "3 releases, for one example epsilon 4.5, delta 9.389e-05; for one person (patient) epsilon 2," in line

    # people of another kind are another unit, and nothing is known of how one is part of the other
    note(tmp_path / "b", "content", person._replace(cap=Cap(4.0)))
    with pytest.raises(UserError, match="epsilon 0 of 4 for one example; this would add 8"):
        note(tmp_path / "b", "content", person._replace(what="training, for a person (lesion)", cell="b"))


def test_a_line_of_an_older_version_is_read_and_composes_as_a_pair(tmp_path: Path) -> None:
    old = {"cell": "a", "private": "digits", "what": "training", "epsilon": 1.0, "delta": 1e-5, "release": "r"}
    old |= {"noise": "seeded", "state": "begun", "when": "2026-01-01T00:00:00+00:00"}
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "0.jsonl").write_text(json.dumps(old) + "\n")
    assert lines(tmp_path) == [old]
    assert components_of(lines(tmp_path)) == Components(0.0, ((1.0, 1e-5),))
    with pytest.raises(UserError, match="has spent epsilon 1 of 2"):
        note(tmp_path, "content", SECURE._replace(cap=Cap(2.0)))


def test_only_gaussian_noise_is_stated_as_such() -> None:
    streams = Streams({}, "cell", "code", "here", True, "results", "digits", "patient", None)
    gaussian = accountant.plan(1.0, 1e-5, 1.0, 4, 1.0)
    split = Split(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    for plan, noise in (
        (gaussian, (1.0, 4, gaussian.noise_multiplier)),
        (accountant.pure(1.0, 1.0, 4, "exponential mechanism"), (None, None, None)),
        (accountant.NOTHING, (None, None, None)),
        (None, (None, None, None)),
    ):
        entry = streams._entry("training", Spending(split, 1.0, 1e-5, "all", plan), "key")
        assert entry == Entry(
            "cell", "digits", "training, for a person (patient)", 1.0, 1e-5, None, "all", None, *noise
        )


def test_runs_keep_to_their_budget_as_a_whole(cli) -> None:
    assert cli("run", *TINY, "budget=4.5")[0] == 0
    assert "so budget=... sets none" in cli("run", *TINY, "budget=9")[2]
    small = ["distance.m=100", "distance.initialisations=1", "distance.k=4", "distance=gsd_m200"]
    auto = [*TINY, "pair.public=auto", "pair.candidates=[digits,noise]", "epsilon_select=0.75", *small]
    err = failed(cli, "run", *auto)
    assert "digits has spent epsilon 2 of 4.5 for one example; this would add 2.75, and 2.5 is left" in err
    assert [line["what"] for line in lines(Path("results"))] == ["training"]
    assert not any(path.is_file() and path.name != "lock" for path in Path("results/runs").glob("*-auto-*/*"))
    assert cli("run", *auto, "budget=4.75")[0] == 0
    found = {line["what"]: (line.get("rate"), line.get("steps")) for line in lines(Path("results"))}
    assert found["choice"] == (None, None)
    assert found["training"] == (1, 1)
    out = done(cli, "runs", "budget")[0]
    assert "for one example: epsilon 4.75 at delta 2e-05, the sum" in out
    assert "budget 4.75: epsilon 4.75 is spent for one example, " in out
    assert 0 <= float(out.partition("one example, ")[2].partition(" ")[0]) < 1e-3
    rows = [line.split() for line in out.splitlines() if "digits-" in line]
    assert [row[3:6] for row in rows] == [["2", "1e-05", "2"], ["0.75", "0", "2.75"], ["2", "1e-05", "4.75"]]
    assert rows[2][6] == "#" * 20
    assert "no release of mnist" in done(cli, "runs", "budget", "mnist")[0]
    assert "takes a name of private data" in failed(cli, "runs", "budget", "state=failed")


def test_the_same_examples_are_found_under_another_path_in_another_order_and_form(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 6, 6)).astype(np.uint8)
    labels = np.arange(40) % 2
    for folder, order in (("a", range(40)), ("b", range(39, -1, -1))):
        for place, i in enumerate(order):
            path = tmp_path / folder / "xy"[labels[i]] / f"{place:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[i]).save(path)
    write_npz(tmp_path / "c.npz", (pixels[:30], labels[:30]), (pixels[30:], labels[30:]))
    write_npz(tmp_path / "fewer.npz", (pixels[:30], labels[:30]), (pixels[31:], labels[31:]))

    def original(name: str) -> str | None:
        name = str(tmp_path / name) if (tmp_path / name).exists() else name
        pair = Pair(private=name, public=None, m=1, convert=Convert.resize)
        return load(pair, str(tmp_path), False).original

    assert original("a") == original("b") == original("c.npz") != original("fewer.npz")

    # in colour, but for some images: a file of these has one channel, an array three
    coloured = np.stack([pixels, pixels, 255 - pixels], 3)
    coloured[::10] = pixels[::10, ..., None]
    for i, image in enumerate(coloured):
        path = tmp_path / "coloured" / "xy"[labels[i]] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0] if i % 20 == 0 else image).save(path)
    write_npz(tmp_path / "coloured.npz", (coloured[:30], labels[:30]), (coloured[30:], labels[30:]))
    with memory.holding(memory.examples_in(coloured, labels)) as names:
        assert original("coloured") == original("coloured.npz") == original(str(names[0]))


def test_the_same_rows_are_found_however_they_are_read(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": draw.normal(size=60), "n": draw.integers(0, 9, 60).astype(float), "code": ["07", "8"] * 30}
    )
    frame["sex"], frame["label"] = draw.choice(["f", "M "], 60), np.arange(60) % 2
    frame.loc[::7, ["n", "sex"]] = np.nan
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.assign(sex=frame["sex"].replace("f", "x")).to_csv(tmp_path / "others.csv", index=False)
    frame[["a", "n", "label"]].to_csv(tmp_path / "numbers.csv", index=False)
    np.savez(tmp_path / "rows.npz", x=frame[["a", "n"]].to_numpy(), y=frame["label"])

    def original(name: str, **read: object) -> str | None:
        pair = Pair(
            private=str(tmp_path / name), public=None, read=Read(accept=["words", "missing", "outside"], **read)
        )
        return load(pair, str(tmp_path), False).original

    def bounds(**values: list) -> str:
        path = tmp_path / f"{'_'.join(values)}.json"
        path.write_text(json.dumps(values))
        return str(path)

    ways = [{}, {"scale": Scale.none}, {"bounds": bounds(a=[-1, 1], n=[0, 3])}]
    ways += [{"bounds": bounds(sex=["m", "f"])}, {"bounds": bounds(code=["7", "8"], sex=["m"], a=[0, 1])}]
    same = {original("rows.csv", **way) for way in ways}
    assert len(same) == 1
    assert same.isdisjoint({original("others.csv", **ways[3]), original("numbers.csv")})
    arrays = [{}, {"scale": Scale.private}, {"bounds": [0, 2]}]
    assert {original("rows.npz", **way) for way in arrays} == {original("numbers.csv", **way) for way in ways[:3]}
    assert len({original("rows.npz", **way) for way in arrays}) == 1


def test_a_link_to_the_data_is_the_data(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,label")
    (tmp_path / "link.csv").symlink_to(tmp_path / "rows.csv")
    (tmp_path / "folder").symlink_to(tmp_path)
    note(tmp_path, "content", SECURE._replace(private=str(tmp_path / "rows.csv"), cap=Cap(2.5)))
    for name in ("link.csv", "folder/rows.csv", "folder/link.csv"):
        with pytest.raises(UsageError, match=r"budget: .* has spent"):
            note(tmp_path, name, SECURE._replace(private=str(tmp_path / name)))
    lines_of, cap = of_data(tmp_path, str(tmp_path / "folder" / "link.csv"))
    assert (len(lines_of), cap) == (1, Cap(2.5))


def test_a_relative_path_is_the_same_data_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its content is by then."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    note(tmp_path, "content", SECURE._replace(private="./data/rows.csv", cap=Cap(2.5)))
    monkeypatch.chdir(tmp_path / "data")
    with pytest.raises(UsageError, match=r"budget: ./rows.csv has spent epsilon 2 of 2.5"):
        note(tmp_path, "changed", SECURE._replace(private="./rows.csv"))
    assert [len(group) for group in ledger.ledgers(tmp_path)] == [1]
    note(tmp_path, "other", SECURE._replace(private="./other.csv"))


def test_where_a_link_led_is_kept(tmp_path: Path) -> None:
    (tmp_path / "link.csv").symlink_to(tmp_path / "rows.csv")
    note(tmp_path, "content", SECURE._replace(private=str(tmp_path / "link.csv"), cap=Cap(2.5)))
    (tmp_path / "link.csv").unlink()
    (tmp_path / "link.csv").symlink_to(tmp_path / "other.csv")
    with pytest.raises(UsageError, match=r"budget: .* has spent"):
        note(tmp_path, "changed", SECURE._replace(private=str(tmp_path / "rows.csv")))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.batch_size=200", "training.steps=3"],
        ["model=pixels", "algorithm=dp_pca", "algorithm.k=4", "algorithm.share=0.25"],
        ["model=pixels", "algorithm=whitened_head", "pair.public=null"],
        ["model=pixels", "algorithm=whitened_head", "pair.public=null", "pair.metric=balanced_accuracy"],
        ["pair.validation=0.2", "privacy.measure=true", "privacy.secure_noise=true"],
    ],
    ids=["full batch", "samples", "first release", "private centre", "counts of classes", "measurement"],
)
def test_the_noise_of_a_line_costs_what_the_line_states(words: list[str], cli) -> None:
    """Its mu, or its samples, compose in place of epsilon and delta; so they may not be less."""
    done(cli, "run", *TINY, *words)
    found = [line for line in lines(Path("results")) if line.get("rate")]
    assert found
    for line in found:
        cost = accountant.spent(line["noise_multiplier"], line["rate"], line["steps"], line["delta"])
        assert cost == pytest.approx(line["epsilon"], rel=2e-3), line["what"]
