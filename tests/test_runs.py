"""`pubsel runs`, and repeating a record."""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from pubsel import records
from pubsel.commands import list_runs, replay
from tests.made import Cli, done, failed

TINY = """
+experiment=quickstart training.epochs=1 epsilon=2 distance=none download=false
training.batch_size=1297 training.chunk=256 threads=1
""".split()


def made(name: str, state: str, **settings) -> Path:
    """A run's folder as a run of that state leaves it."""
    folder = Path("results/runs") / name
    folder.mkdir(parents=True)
    (folder / "lock").write_text("")
    asked = {"identity": name, "settings": {"pair": {"private": "digits", "public": None}, "epsilon": 2.0} | settings}
    (folder / "settings.json").write_text(json.dumps(asked))
    says = {"failed": "failed: training diverged", "corrupt": "finished"}.get(state, "  epoch 1")
    (folder / "log.txt").write_text(f"2026-01-01 00:00:00  on cpu\n2026-01-01 00:00:01  {says}\n")
    if state == "corrupt":
        (folder / "result.json").write_text('{"identity": "x", "util')
    if state == "unfinished":
        (folder / "checkpoint.pt").write_bytes(b"weights")
    return folder


def names(out: str) -> list[str]:
    """The runs of a listing."""
    return [line.split()[0] for line in out.partition("\n\n")[0].splitlines()[1:]]


def test_a_run_is_listed_shown_repeated_and_deleted(cli: Cli) -> None:
    assert cli("run", *TINY, "seed=3")[0] == 0
    (path,) = Path("results/runs").glob("*/result.json")
    record = json.loads(path.read_text())
    name = record["identity"]

    code, out, _ = cli("runs", "algorithm=gep", "epsilon=2", "state=finished", "algorithm.k=100", "seed=3,4")
    assert (code, names(out)) == (0, [name])
    assert f"{100 * record['utility']:.2f} %" in out
    assert cli("runs", "epsilon=3")[1] == f"no such run in {path.parent.parent}\n"
    assert "private_share" not in record["settings"]["pair"]  # it has its default
    assert names(cli("runs", "pair.private_share=1")[1]) == [name]
    assert not names(cli("runs", "pair.private_share=0.5")[1])

    out, _ = done(cli, "runs", "show", name.split("-")[-1])
    assert f"{100 * record['utility']:.2f} %" in out
    assert record["privacy"]["statement"] in out
    assert re.search(r"  \S+ \S+  finished: accuracy 0\.", out)
    (command,) = re.findall(r"^ +pubsel (run .+)$", out, re.MULTILINE)
    code, _, err = cli(*shlex.split(command))
    assert (code, err) == (0, f"{name}: finished before\n")  # the command is that of this run

    out, _ = done(cli, "run", f"replay={path}")
    assert out.startswith(f"{name}: the same, bit for bit\n  weights: {record['weights']}\n")

    # numbers on other hardware may have changed a little
    elsewhere = record | {"weights": "0" * 16, "utility": record["utility"] + 0.004}
    elsewhere["streams"] = record["streams"] | {"place": "another"}  # and with it the noise
    path.write_text(json.dumps(elsewhere))
    assert "other" not in cli("run", f"replay={path}")[1].splitlines()[1]

    record["weights"], record["commit"] = "0" * 16, "1" * 40
    path.write_text(json.dumps(record))
    code, out, err = cli("run", f"replay={name}", "threads=1")
    assert code == 1
    assert out.splitlines()[:2][1].startswith(f'  weights: "{"0" * 16}" -> "')
    assert "may be why" in out
    assert f'commit: "{"1" * 40}"' in out
    assert len(err.splitlines()) > 1
    assert err.splitlines()[-1] == f"pubsel: replay={name}: it did not come out the same"
    assert names(cli("runs", "state=stale")[1]) == []

    del record["numbers"]
    path.write_text(json.dumps(record))
    code, out, _ = cli("runs", "state=stale")
    assert (code, names(out)) == (0, [name])
    why = f"made by version 0 of what decides numbers, this is version {records.NUMBERS}: install pubsel "
    assert why in cli("runs", "show", name)[1]
    err = failed(cli, "run", f"replay={name}")
    assert err.startswith(f"pubsel: replay={name}: {why}")
    assert err.endswith(", commit 1111111111, or run it anew\n")
    path.with_name("model.pt").unlink()
    assert "model.pt is gone" in cli("runs", "show", name)[1]

    assert cli("runs", "delete", name)[0] == 2  # no terminal to ask, no yes
    assert path.exists()
    assert cli("runs", "delete", name, "yes=true")[1] == "1 runs deleted\n"
    assert sorted(os.listdir(path.parent)) == ["lock"]
    assert cli("runs")[1].startswith("no such run")


def test_every_state_is_found(cli: Cli) -> None:
    for state in ("failed", "unfinished", "corrupt"):
        made(f"digits-none-x-{state}", state, algorithm={"name": state})
    out, _ = done(cli, "runs")
    assert [line.split()[1] for line in out.splitlines()[1:4]] == ["corrupt", "failed", "unfinished"]
    assert "digits-none-x-failed: training diverged" in out
    assert "3 runs: 1 failed, 1 unfinished, 1 corrupt" in out
    assert names(cli("runs", "state=unfinished,failed", "private=digits", "public=none")[1]) == [
        "digits-none-x-failed",
        "digits-none-x-unfinished",
    ]
    assert names(cli("runs", "algorithm=corrupt")[1]) == ["digits-none-x-corrupt"]
    assert "no complete record" in cli("runs", "show", "x-corrupt")[1]
    assert "from a checkpoint" in cli("runs", "show", "x-unfinished")[1]


def test_a_run_that_somebody_works_on_is_never_deleted(cli: Cli) -> None:
    folder, other = made("a-run", "unfinished"), made("b-run", "failed")
    with FileLock(folder / "lock"):
        assert names(cli("runs", "state=running")[1]) == ["a-run"]
        code, out, _ = cli("runs", "delete", "all=true", "yes=true")
    assert (code, out) == (0, "1 runs deleted; kept, since a process works on them: a-run\n")
    assert (folder / "checkpoint.pt").exists()
    assert os.listdir(other) == ["lock"]
    assert names(cli("runs")[1]) == ["a-run"]


def test_the_person_is_asked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("a-run", "failed")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    assert cli("runs", "delete", "a-run")[1] == "nothing is deleted\n"
    assert (folder / "log.txt").exists()
    monkeypatch.setattr("builtins.input", lambda _: "delete")
    assert cli("runs", "delete", "a-run")[1] == "1 runs deleted\n"


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["runs", "show"], 2, "show NAME"),
        (["runs", "show", "nope"], 2, "no run in results/runs"),
        (["runs", "show", "run"], 2, "2 runs, such as a-run, b-run"),
        (["runs", "delete"], 2, "state=failed"),
        (["runs", "state=done"], 2, "finished, stale, running"),
        (["runs", "stat=failed"], 2, "unknown key stat (did you mean state?)"),
        (["runs", "delete", "stat=failed", "yes=true"], 2, "unknown key stat (did you mean state?)"),
        (["runs", "training.epoch=2"], 2, "unknown key training.epoch (did you mean training.epochs?)"),
        (["runs", "remove", "x"], 2, "list, show NAME, delete NAME or budget DATA"),
        (["run", "replay=nope"], 1, "no record of this name"),
    ],
)
def test_mistakes(cli: Cli, words: list[str], code: int, expected: str) -> None:
    made("a-run", "failed")
    made("b-run", "failed")
    err = failed(cli, *words, code=code)
    assert expected in err
    assert len(err.splitlines()) == 1


def test_a_failure_is_explained_from_its_log(cli: Cli) -> None:
    err = failed(cli, "run", *TINY, "algorithm=dp_sgd", "training.epochs=3", "training.learning_rate=1e38", code=1)
    _, out, _ = cli("runs", "state=failed")
    assert err.splitlines()[-1].removeprefix("pubsel: ") in out
    (name,) = names(out)
    assert "training diverged" in cli("runs", "show", name)[1]


def test_a_clock_that_goes_back_makes_no_age_negative(cli: Cli) -> None:
    folder = made("a-run", "failed")
    os.utime(folder / "log.txt", (time.time() + 1e6,) * 2)
    assert list_runs.look(folder).age == 0


def test_what_differs_is_told_apart_from_why_it_may() -> None:
    one = {"weights": "a", "utility": 0.5, "commit": "x", "versions": {"torch": "1"}, "seconds": 1, "distance": None}
    assert replay.changes(one, one | {"seconds": 2}, True) == ([], [])
    two = one | {"utility": 0.6, "versions": {"torch": "2"}, "distance": {"mean": 1}, "new": 1}
    figures, around = replay.changes(one, two, True)
    assert figures == ["utility: 0.5 -> 0.6", 'distance: null -> {"mean": 1}']
    assert around == ['versions.torch: "1" -> "2"']


def test_a_record_is_outdated_only_if_its_method_is_another_one_since() -> None:
    for version, algorithm, is_outdated in (
        (records.NUMBERS, "whitened_head", False),
        (1.1, "whitened_head", True),
        (1.1, "gep", False),
        (0, "gep", True),
    ):
        assert bool(records.outdated({"numbers": version, "algorithm": algorithm})) is is_outdated


def test_which_differences_count() -> None:
    """Sentences never do; a number does beyond rounding, and weights where sums are rounded alike."""
    privacy = {"statement": "a sentence", "not_covered": ["x"], "valid": True, "epsilon": 2.0, "steps": 90}
    one = {"weights": "a", "utility": 0.5, "distance": {"values": [0.25, 0.75], "mean": 0.5}, "privacy": privacy}
    sentences = privacy | {"statement": "another", "not_covered": ["y"]}
    rounded = {"values": [0.25, 0.75 + 1e-10], "mean": 0.5 + 1e-10}
    assert replay.changes(one, one | {"privacy": sentences, "distance": rounded}, True)[0] == []

    other = {"weights": "b", "utility": 0.504}
    assert len(replay.changes(one, one | other, True)[0]) == 2
    assert replay.changes(one, one | other, False)[0] == []
    changed = {"valid": False, "epsilon": 2.1, "steps": 91}
    for exact in (True, False):
        for key, value in changed.items():
            assert replay.changes(one, one | {"privacy": privacy | {key: value}}, exact)[0]
        assert replay.changes(one, one | {"distance": {"values": [0.25], "mean": 0.5}}, exact)[0]
        assert replay.changes(one, one | {"utility": 0.52}, exact)[0]


@pytest.mark.attack
def test_a_utility_that_is_no_number_is_a_failed_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pubsel.release.run.utility", lambda *_: float("nan"))
    err = failed(cli, "run", *TINY, "algorithm=dp_sgd", code=1)
    assert err.splitlines()[-1].startswith("pubsel: utility nan: not a number")
    assert len(names(cli("runs", "state=failed")[1])) == 1
    assert not list(Path("results").glob("runs/*/result.json"))


@pytest.mark.attack
def test_weights_are_on_the_disk_before_they_take_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from pubsel.training import loop

    seen: list[tuple[str, int]] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(("sync", os.fstat(handle).st_ino)), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(("replace", os.stat(a).st_ino)), replace(a, b)))
    loop.save(tmp_path / "model.pt", {"w": torch.zeros(3)})
    file, folder = (tmp_path / "model.pt").stat().st_ino, tmp_path.stat().st_ino
    assert seen == [("sync", file), ("replace", file), ("sync", folder)]
