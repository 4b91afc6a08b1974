"""Whatever decides a release decides its noise; and what is kept to resume a run belongs to that run alone."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pubsel.commands.rank
import pubsel.release.run
from pubsel import records
from pubsel.cli import main
from pubsel.privacy import accountant
from pubsel.privacy.randomness import Secret, SystemEntropy
from pubsel.selection import Comparison
from pubsel.settings import methods
from pubsel.training.loop import Job
from tests.made import FINISHED, interrupted

N = 120  # private examples
WORDS = """
+experiment=quickstart pair.private=./private.npz pair.public=./public.npz pair.m=40 model=digits_cnn
algorithm=dp_md distance=none device=cpu threads=1
training.batch_size=30 training.epochs=2 training.checkpoint_seconds=0 privacy.delta=1e-3 epsilon=4
""".split()
SMALL = "distance.m=20 distance.k=3 distance.initialisations=1".split()
RANK = "private=./private.npz public=[./public.npz,./other.npz] model=digits_cnn device=cpu threads=1".split() + SMALL
AUTO = "pair.public=auto pair.candidates=[./public.npz,./other.npz] epsilon_select=1 distance=gsd".split()
CHOICE = [*AUTO, *SMALL]
OWN = '''
from dataclasses import dataclass
from pubsel.algorithms.dp_sgd import DPSGD


@dataclass
class Own(DPSGD):
    """{}"""
'''


class Caught(Exception):
    """A release is about to be made."""


def images(seed: int, n: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"train_images": random.integers(256, size=(n, 8, 8), dtype=np.uint8), "train_labels": np.arange(n) % 4}


def write(path: str, seed: int, n: int = N, **changed: np.ndarray) -> None:
    test = {key.replace("train", "test"): value for key, value in images(seed + 100, 60).items()}
    np.savez(path, **images(seed, n) | test | changed)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, folder: Path) -> Path:
    for seed, name in enumerate(("private", "public", "other")):
        write(name, seed)
    return tmp_path


def caught(*words: str, command: str = "run") -> Secret:
    """The streams of the release that a command makes, in place of making it."""

    secrets: list[Secret] = []

    def catch(*arguments: object, **named: object) -> None:
        passed = [*arguments, *named.values()]
        passed += [part for value in passed if isinstance(value, Comparison) for part in value]
        secrets.extend(value for value in passed if isinstance(value, Secret))
        raise Caught

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pubsel.release.run.fit", catch)
        patch.setattr("pubsel.selection.select", catch)
        patch.setattr("pubsel.distances.dp_gsd.DPGSD.release", catch)
        assert main([command, *(WORDS if command == "run" else RANK), *words]) == 1
    return secrets[0]


def noise(*words: str, command: str = "run") -> np.ndarray:
    return np.asarray(caught(*words, command=command)("noise", 3).standard_normal(200_000))


def alike(one: np.ndarray, two: np.ndarray) -> float:
    return abs(float(np.corrcoef(one, two)[0, 1]))


def one_pixel(path: str, seed: int) -> None:
    changed = images(seed, N)["train_images"]
    changed[-1, 0, 0] ^= 1
    write(path, seed, train_images=changed)


CHANGES = {
    "a pixel of a private example": lambda: one_pixel("private", 0),
    "a private label": lambda: write("private", 0, train_labels=np.roll(images(0, N)["train_labels"], 1)),
    "the public file under its path": lambda: write("public", 7),
    "a label of a public test image": lambda: write("public", 1, test_labels=np.arange(60) // 15),
}


@pytest.mark.attack
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_data_under_the_same_names_draws_other_noise(change):
    before = noise()
    assert np.array_equal(before, noise())
    change()
    assert alike(before, noise()) < 0.02


@pytest.mark.attack
def test_other_weights_at_the_start_draw_other_noise(monkeypatch):
    """A file of weights that was replaced under its name: one number of them is another one."""
    before, build = noise(), pubsel.cell.network

    def changed(*arguments, **named):
        model = build(*arguments, **named)
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3
        return model

    monkeypatch.setattr("pubsel.cell.network", changed)
    assert alike(before, noise()) < 0.02


OTHERS = """
seed=1 epsilon=3 training.learning_rate=0.01 training.chunk=7 threads=2
algorithm=dp_sgd training.batch_size=40 privacy.delta=2e-3
"""


@pytest.mark.parametrize("word", OTHERS.split())
def test_other_settings_draw_other_noise(word):
    assert alike(noise(), noise(word)) < 0.02


def test_other_circumstances_draw_other_noise(monkeypatch):
    """What is computed elsewhere, or by several processes, is rounded in another way; another program does another
    thing."""
    before = noise()
    for target, made in {
        "pubsel.release.run.torchrun": SimpleNamespace(place=lambda: (0, 2)),
        "torch.backends.cpu.get_cpu_capability": lambda: "another",
        "pubsel.records._package": lambda: "another line",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(target, made)
            assert alike(before, noise()) < 0.02, target
    assert np.array_equal(before, noise())


@pytest.mark.attack
def test_a_line_of_a_users_own_algorithm_draws_other_noise(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    known = methods.targets
    monkeypatch.setattr(methods, "targets", lambda folders: known(folders) | {"own_method.Own"})
    for line in ("one", "two", "two"):
        Path("own_method.py").write_text(OWN.format(line))
        importlib.invalidate_caches()
        sys.modules.pop("own_method", None)
        found.append(noise("algorithm=dp_sgd", "algorithm._target_=own_method.Own", "algorithm.name=own"))
    assert alike(found[0], found[1]) < 0.02
    assert np.array_equal(found[1], found[2])


def test_code_that_cannot_be_read_never_repeats():
    made = type("Made", (), {"__module__": "nowhere"})
    assert records.code(made) != records.code(made)
    assert records.code() == records.code(dict) != records.code(made)


def test_where_files_lie_changes_nothing(folder):
    before = noise()
    assert np.array_equal(before, noise("data_root=/elsewhere", "results=there", "training.checkpoint_seconds=5"))


@pytest.mark.attack
@pytest.mark.parametrize(
    "release", [["epsilon_select=1"], ["distance=dp_gsd", "distance.epsilon=1", "distance.delta=1e-3"]], ids=len
)
def test_choices_and_private_distances_draw_other_noise_for_other_data(release):
    before = noise(*release, command="rank")
    assert np.array_equal(before, noise(*release, command="rank"))
    assert alike(before, noise(*release, "seed=1", command="rank")) < 0.02
    for change in (lambda: one_pixel("private", 0), lambda: write("other", 9)):
        change()
        after = noise(*release, command="rank")
        assert alike(before, after) < 0.02
        before = after


def test_the_releases_of_a_run_share_no_noise():
    assert alike(noise(*CHOICE), noise()) < 0.02


def test_the_loop_is_given_the_noise_of_the_plan(monkeypatch):
    given, plan = [], accountant.plan
    monkeypatch.setattr(accountant, "plan", lambda *how: plan(*how)._replace(noise_multiplier=7.25))

    def catch(*arguments, **_):
        given.append(arguments)
        raise Caught

    monkeypatch.setattr(pubsel.release.run, "fit", catch)
    assert main(["run", *WORDS]) == 1
    (job,) = [argument for argument in given[0] if isinstance(argument, Job)]
    assert job.noise_multiplier == 7.25


def test_secure_noise_is_the_operating_systems():
    assert isinstance(caught("privacy.secure_noise=true")("noise", 0), SystemEntropy)


def test_only_one_function_makes_secret_streams():
    """A key that leaves something out would share noise: no other line of the package makes such streams."""
    package = Path(pubsel.__file__).parent
    makers = [path.name for path in package.rglob("*.py") if "Secret(" in path.read_text().replace("class Secret", "")]
    assert makers == ["randomness.py"]
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert not any(f'stream({key}, "{what}"' in text for key in ("key", "name") for what in ("noise", "sample"))


# Files of an unfinished run


def stopped(monkeypatch: pytest.MonkeyPatch, at: int = 5) -> Path:
    """The run's checkpoint, after it was stopped before a step."""
    take, calls = pubsel.training.loop.noisy_mean, iter(range(10_000))

    def stop(*arguments, **named):
        return interrupted() if next(calls) == at else take(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr("pubsel.training.loop.noisy_mean", stop)
        assert main(["run", *WORDS]) == 130
    (path,) = Path("results").glob("runs/*/checkpoint.pt")
    return path


def error_of(capsys: pytest.CaptureFixture, *words: str) -> str:
    capsys.readouterr()
    assert main(["run", *WORDS, *words]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: one_pixel("private", 0), "the private data changed"),
        (lambda: write("private", 0, n=4 * N), "the private data, the plan changed"),  # other rate, steps and noise
        (lambda: write("public", 9), "the public data changed"),
    ],
    ids=["one pixel", "more examples", "public"],
)
def test_a_checkpoint_of_other_data_is_refused(monkeypatch, capsys, change, says):
    """With a hundred times as many examples it would have been resumed with a seventh of the noise."""
    path = stopped(monkeypatch)
    content = path.read_bytes()
    change()
    said = error_of(capsys)
    assert says in said
    assert "in 5 of 8 steps" in said
    assert "epsilon 3." in said
    assert path.read_bytes() == content


def test_a_checkpoint_of_another_program_is_refused(monkeypatch, capsys):
    stopped(monkeypatch)
    monkeypatch.setattr("pubsel.records._package", lambda: "another line")
    assert "the code changed" in error_of(capsys)


def test_a_resumed_run_is_the_run_that_was_not_stopped_and_forgets(monkeypatch):
    path = stopped(monkeypatch)
    assert main(["run", *WORDS]) == 0
    assert sorted(file.name for file in path.parent.iterdir()) == FINISHED
    assert main(["run", *WORDS, "results=again"]) == 0
    one, two = (json.loads(next(Path(top).glob("runs/*/result.json")).read_text()) for top in ("results", "again"))
    assert one["weights"] == two["weights"]


def test_a_run_resumed_elsewhere_draws_anew(monkeypatch):
    """The rounding is another one there: noise that the first place drew would be used with another sum."""
    stopped(monkeypatch)
    asked = []
    call = Secret.__call__
    monkeypatch.setattr(Secret, "__call__", lambda self, *what: asked.append((self.places, *what)) or call(self, *what))
    assert main(["run", *WORDS, "training.chunk=7"]) == 0
    places = {tuple(one[0]) for one in asked if one[1] == "noise"}
    (resumed,) = places
    assert [place.partition(" ")[0] for place in resumed] == ["0", "5"]
    assert "chunk None" in resumed[0]
    assert "chunk 7" in resumed[1]
    assert noise("training.chunk=7", "results=fresh").tolist() != noise("results=fresh").tolist()


@pytest.mark.attack
def test_a_choice_of_other_data_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("pubsel.release.run.fit", interrupted)
    assert main(["run", *WORDS, *CHOICE]) == 130
    assert list(Path("results").glob("runs/*/selection.pt"))
    write("other", 9)
    said = error_of(capsys, *CHOICE)
    assert "selection.pt is of another run: the public data changed" in said
    assert "spent epsilon 1" in said
