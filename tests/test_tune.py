"""pubsel tune: the best of several settings, and one guarantee for all that was tried."""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pubsel.commands.replay  # noqa: F401  # which takes `run` when it is first imported, not one that a test watches
from pubsel.commands import tune
from pubsel.data import load
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant, ledger, repeated
from pubsel.privacy.accountant import plan, pure
from pubsel.privacy.randomness import stream
from pubsel.release import adversary, card, measurement, quality, reopen
from pubsel.release import run as training
from pubsel.settings.keys import Pair
from pubsel.training import workers
from tests.made import FINISHED, Cli, done, failed, interrupted, only_record

DATA = "three.npz"
WORDS = (
    "model=pixels algorithm=dp_sgd_clip1 training.epochs=2 training.batch_size=100000 pair.public=null distance=none "
    "download=false threads=1 privacy.delta=1e-3 epsilon=8"
).split()
OVER = "over=training.weight_decay=1000000,0"  # the first turns the weights round


@pytest.fixture
def folder(tmp_path, folder):
    """A folder with images of three classes."""
    draw, arrays = np.random.RandomState(0), {}
    for part, n in (("train", 700), ("test", 60)):
        chosen = np.eye(3, dtype=int)[draw.randint(3, size=n)]
        images = draw.randint(0, 120, (n, 5, 5))
        images[:, :3] += 135 * chosen[:, :, None]
        arrays |= {f"{part}_images": images.astype(np.uint8), f"{part}_labels": chosen.argmax(1)}
    np.savez(DATA, **arrays)
    return tmp_path


def tuned(*words: str) -> list[str]:
    return ["tune", f"./{DATA}", *WORDS, OVER, *words]


def watched(monkeypatch: pytest.MonkeyPatch, change: Any = lambda settings, record: record) -> list[Any]:
    """The settings of each run that is made; change: of what it returns."""
    made, run = [], training.run

    def watch(settings):
        made.append(settings)
        return change(settings, run(settings))

    monkeypatch.setattr(training, "run", watch)
    return made


def drawing(monkeypatch: pytest.MonkeyPatch, *places: int) -> None:
    """Draw these candidates, in this order."""
    monkeypatch.setattr(tune, "draw", lambda _, secret: [secret("runs") and place for place in places])


@pytest.mark.usefixtures("folder")
def test_the_best_is_released_under_one_guarantee(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, *[0, 1] * 3 + [0] * 7)
    made = watched(monkeypatch)
    out, err = done(cli, *tuned())
    record = only_record()
    assert "are (8, 0.001)-differentially private" in out
    assert f"pubsel export {record['identity']} to=FOLDER" in out

    # one line for the whole, one for other units, and nothing of the runs
    (lines,) = ledger.ledgers("results")
    assert [
        (line["what"], line["epsilon"], line["noise"]) for line in sorted(lines, key=lambda line: line["what"])
    ] == [
        ("measurement", pytest.approx(8, abs=1e-3), "operating system"),
        ("tuning", 8, "operating system"),
    ]
    assert ledger.cost_of(lines)[:2] == (8, 1e-3)
    privacy = record["privacy"]
    assert (privacy["epsilon"], privacy["delta"], record["epsilon"]) == (8, 1e-3, 8)
    assert privacy["accountant"] == repeated.ACCOUNTANT
    assert privacy["statement"].startswith("The choice of the settings and the trained weights are (8, 0.001)")
    assert repeated.HIDDEN in privacy["not_covered"]
    assert record["quality"]["privacy"]["epsilon"] == pytest.approx(8, abs=1e-3)
    half = load(Pair(private=DATA, public=None, m=1, validation=0.1, convert="resize"), ".", False)
    assert record["quality"]["units"] == half.held_out_units
    assert record["tuning"]["chosen"] == "training.weight_decay=0"
    assert record["settings"]["training"]["weight_decay"] == 0

    # all that was tried is gone, and how much it was is nowhere
    (run,) = Path("results/runs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == FINISHED
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert len(made) == 13
    kept = json.dumps({key: record[key] for key in ("tuning", "privacy", "notes")})
    assert not re.search(r"\b13\b", f"{out} {err} {kept}")

    # the same command reads it, and spends nothing
    again, _ = done(cli, *tuned())
    assert again == out
    assert len(made) == 13
    assert ledger.cost_of(ledger.ledgers("results")[0]).releases == 2

    # what is given away states the whole, and no curve that it does not have
    done(cli, "export", record["identity"], "to=model")
    statement = card.statement_of(record, json.loads(Path("model/config.json").read_text()))
    assert repeated.HIDDEN in statement.not_covered
    assert adversary.exchanged(statement.parts).epsilon == 16
    assert "that of pubsel tune" in done(cli, "runs", "show", record["identity"])[0]
    assert "0.5" in done(cli, "attack", "loss", f"run={record['identity']}", "threads=1")[0]
    assert "its noise came from the operating system" in failed(cli, "run", f"replay={record['identity']}")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "algorithm",
    [
        "dp_sgd_clip1",
        "whitened_head",
        "adassp",
        pytest.param("dp_sgd_clip1 training.batch_size=100", marks=pytest.mark.slow),
    ],
)
def test_each_run_has_what_its_noise_pays_for(algorithm, cli: Cli, monkeypatch) -> None:
    """By the noise of its record, whatever the algorithm releases; so do the counts that choose."""
    drawing(monkeypatch, 0)
    records = []
    made = watched(monkeypatch, lambda _, record: records.append(record) or record)
    done(cli, *tuned("runs=4", *f"algorithm={algorithm}".split(), "over=label=a,b"))
    (settings,), (record,) = made, records
    assert settings.privacy.delta == 1e-3 / 4
    assert settings.privacy.secure_noise
    assert settings.epsilon < 0.9 * 8
    stated, counted = record["privacy"], record["quality"]["privacy"]
    assert stated["epsilon"] <= settings.epsilon
    for noise in (*(stated.get("parts") or [stated | {"rate": stated["sampling_rate"]}]), counted):
        parts = [plan(noise["epsilon"], noise["delta"], noise["rate"], noise["steps"], 1.0)]
        assert parts[0].noise_multiplier <= noise["noise_multiplier"] * 1.001
        assert settings.epsilon + repeated.price(4, parts) <= 8
    assert record["quality"]["deviation"] > 0.9 * math.sqrt(2) * counted["noise_multiplier"]


@pytest.mark.usefixtures("folder")
def test_noisy_counts_choose_and_nothing_else(cli: Cli, monkeypatch) -> None:
    """Neither the utility on test examples nor that on held-out ones without noise."""
    drawing(monkeypatch, 1, 0, 0, 1)

    def other(settings, record):
        record["quality"]["figures"]["accuracy"][0] = 0.9 - (settings.training.weight_decay == 0) / 2
        return record

    watched(monkeypatch, other)
    done(cli, *tuned())
    assert only_record()["tuning"]["chosen"] == "training.weight_decay=1000000"


@pytest.mark.usefixtures("folder")
def test_a_stopped_command_resumes_and_spends_nothing_twice(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 0, 1, 0)
    run = training.run

    def stop(settings):
        return run(settings) if Path(settings.results).name == "0" else interrupted()

    with monkeypatch.context() as killed:
        killed.setattr(training, "run", stop)
        assert cli(*tuned())[0] == 130
    (folder,) = Path("results/runs").iterdir()
    assert (folder / "draws.pt").exists()
    assert stat.S_IMODE((folder / "draws.pt").stat().st_mode) == 0o600
    first = next(folder.glob("tuning/0/runs/*/result.json")).read_bytes()
    assert "that of pubsel tune" in done(cli, "runs", "show", folder.name)[0]

    # other draws would be another number of runs: those that were kept count
    drawing(monkeypatch, 1)
    with monkeypatch.context() as killed:
        killed.setattr(reopen, "whole_of", interrupted)
        assert cli(*tuned())[0] == 130
    assert next(folder.glob("tuning/0/runs/*/result.json")).read_bytes() == first
    assert len([*folder.glob("tuning/*/runs/*/result.json")]) == 3

    trained = []
    with monkeypatch.context() as watching:
        watching.setattr(training, "train", lambda cell: trained.append(cell))
        done(cli, *tuned())
    assert trained == []
    lines = [line for path in Path("results/ledger").glob("*.jsonl") for line in ledger.read(path)]
    assert sorted(line["what"] for line in lines) == ["measurement", "tuning"]
    assert sorted(path.name for path in folder.iterdir()) == FINISHED


@pytest.mark.usefixtures("folder")
def test_runs_side_by_side_are_those_of_one_after_another(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 0, 1)
    trained = []
    with monkeypatch.context() as watching:
        watching.setattr(training, "train", lambda cell: trained.append(cell))
        done(cli, *tuned("jobs=2"))
    assert trained == []  # all in processes of their own
    record = only_record()
    assert record["tuning"]["chosen"] == "training.weight_decay=0"
    (lines,) = ledger.ledgers("results")
    assert sorted(line["what"] for line in lines) == ["measurement", "tuning"]
    assert sorted(path.name for path in Path("results/runs", record["identity"]).iterdir()) == FINISHED


@pytest.mark.usefixtures("folder")
def test_what_a_process_loses_is_made_again(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 1, 0)
    monkeypatch.setattr(workers, "run_parallel", lambda calls, n, start, lost: lost(0, "killed"))
    made = watched(monkeypatch)
    done(cli, *tuned("jobs=2"))
    assert len(made) == 2


@pytest.mark.usefixtures("folder")
def test_a_run_without_a_model_is_an_outcome_and_a_full_disk_is_not(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 1, 0)
    run, tried = training.run, []

    def fail(error):
        def failing(settings):
            tried.append(settings.training.weight_decay)
            if settings.training.weight_decay == 0:
                raise error
            return run(settings)

        monkeypatch.setattr(training, "run", failing)

    fail(OSError(28, "No space left on device"))
    failed(cli, *tuned(), code=1)
    assert tried == [0]

    # a run that fails by what it computes gets no second chance, for it would be one more run
    fail(UserError("utility nan: not a number"))
    with monkeypatch.context() as killed:
        killed.setattr(measurement, "measure", interrupted)
        assert cli(*tuned())[0] == 130
    done(cli, *tuned())
    assert tried == [0, 0, 1e6, 1e6]
    assert only_record()["tuning"]["chosen"] == "training.weight_decay=1000000"


@pytest.mark.usefixtures("folder")
def test_if_no_run_gives_a_model_none_is_released(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 1, 1)
    monkeypatch.setattr(training, "run", lambda _: math.sqrt(-1))
    for words in ([], ["jobs=2"]):  # the second finds that all have failed, and starts no process
        assert "no run gave a model" in failed(cli, *tuned(*words), code=1)
    lines = [line for path in Path("results/ledger").glob("*.jsonl") for line in ledger.read(path)]
    assert [line["what"] for line in lines] == ["tuning"]


@pytest.mark.parametrize("private", [f"./{DATA}", "digits"])
def test_a_unit_trains_or_chooses_or_measures(private, folder) -> None:
    """The side that measures is the same whatever is chosen, and together they are what a larger share holds out."""

    def side(validation, reserved):
        pair = Pair(private=private, public=None, m=1, validation=validation, reserved=reserved, convert="resize")
        task = load(pair, str(folder), False)
        return [{x.numpy().tobytes() for x in split.x} for split in (task.private, task.validation)]

    (train, chooses), (_, measures), (rest, both) = side(0.2, 0.1), side(0.1, 0.0), side(0.2, 0.0)
    assert not train & chooses
    assert not train & measures
    assert not chooses & measures
    assert (train, chooses | measures) == (rest, both)
    assert len(chooses) > 20 < len(measures)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["over=training.learning_rate=1"], "over=training.learning_rate=1: one setting"),
        (["over=training.learning_rate=interval(0,1)"], "give its values, KEY=A,B"),
        (["over=nonsense"], "over: cannot read 'nonsense': write KEY=A,B"),
        (["over=training.rate=1,2"], "unknown key training.rate"),
        (["over=epsilon=1,2"], "over: epsilon=1, epsilon=2: the same run: choose among"),
        (["over=training.momentum=0,0.0"], "the same run"),
        (["over=seed=0,1"], "choose among model, algorithm, training or public data"),
        (["over=pair.private=a.npz,b.npz"], "choose among model"),
        (["over=pair.seed=0,1"], "choose among model"),
        (["over=privacy.delta=1e-3,1e-4"], "choose among model"),
        (["pair.validation=0.3"], "pair.validation=0.3: pubsel tune decides it (held_out= sets it): leave it out"),
        (["privacy.secure_noise=false"], "privacy.secure_noise=false: pubsel tune decides it"),
        (["distance=gsd"], "distance=gsd: pubsel tune decides it"),
        (["algorithm=non_private"], "needs a private algorithm"),
        (["privacy.accounting=paper"], "privacy.accounting=paper"),
        (["algorithm=gep_digits", "pair.public=auto", "pair.candidates=[a,b]", "epsilon_select=1"], "pair.public=auto"),
        (["privacy.delta=0.01"], "privacy.delta=0.01 is above 1/n"),
        (["held_out=0.001"], "pair.validation=0.0"),
        (["runs=1001"], "runs=1001"),
    ],
)
def test_what_no_guarantee_covers_is_refused_before_anything_is_spent(words, message, cli: Cli) -> None:
    assert message in failed(cli, *tuned(*words))
    assert not Path("results/ledger").exists()
    assert not [*Path("results").glob("runs/*/*")]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algorithm=noisy_sgd algorithm.steps=2 over=algorithm.k=2,3", "noisy_sgd learns a halfspace"),
        ("algorithm=pillar over=algorithm.k=2,30", "algorithm.k=30 is more than the 25 features"),
        ("algorithm=dp_pca algorithm.k=2 over=algorithm.share=0.1,0", "give it a share over 0"),
        ("algorithm=dope_sgd over=algorithm.clip_norm=1,2", "dope_sgd needs public labels of the private task"),
        ("model=linear over=algorithm=dp_sgd_clip1,pillar", "pillar takes features"),
        ("over=algorithm=dp_sgd_clip1,dp_randp", "algorithm.head=temporary: a linear classifier is all head"),
    ],
)
def test_a_run_that_would_stop_is_refused_before_anything_is_spent(words, message, cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 0, 1)
    with np.load(DATA) as arrays:
        np.savez("public.npz", **{name: 255 - x if "images" in name else x + 1 for name, x in arrays.items()})
    assert message in failed(cli, *tuned("pair.public=./public.npz", "pair.m=50", *words.split()))
    assert not Path("results").exists()


@pytest.mark.usefixtures("folder")
def test_a_budget_of_the_data_knows_what_tuning_spends(cli: Cli, monkeypatch) -> None:
    drawing(monkeypatch, 0, 1)
    made = watched(monkeypatch)
    assert (
        "budget 7.5: epsilon 0 is spent for one example, 7.5 is left" in done(cli, *tuned("budget=7.5", "dry=true"))[0]
    )
    assert not Path("results").exists()
    code, _, err = cli(*tuned("budget=7.5"))
    assert code == 2
    assert "spent epsilon 0 of 7.5 for one example; this would add 8, and 7.5 is left" in err
    assert (made, ledger.ledgers("results")) == ([], [])
    done(cli, *tuned("budget=12"))
    assert "budget 12: epsilon 8 is spent for one example, 4 is left" in done(cli, "runs", "budget")[0]


def test_without_settings_there_is_nothing_to_choose(cli: Cli) -> None:
    assert 'pubsel tune FOLDER over="KEY=A,B"' in failed(cli, "tune", "./mine")


def test_the_settings_are_all_combinations() -> None:
    cells = tune.grid("algorithm=a,b training.milestones=[0.1,0.2],[] label=x")
    assert cells[0] == ["algorithm=a", "training.milestones=[0.1,0.2]", "label=x"]
    assert len(cells) == len({tuple(cell) for cell in cells}) == 4
    with pytest.raises(UsageError, match="one setting"):
        tune.grid("")


def test_values_between_quotes_may_have_blanks() -> None:
    assert tune.grid("pair.public='./a b','./c' label=\"x y\"") == [
        ["pair.public='./a b'", 'label="x y"'],
        ["pair.public='./c'", 'label="x y"'],
    ]


@pytest.mark.usefixtures("folder")
def test_the_plan_says_what_a_run_gets_and_spends_nothing(cli: Cli) -> None:
    out, _ = done(cli, *tuned("dry=true"))
    each = float(re.search(r"each run has epsilon ([\d.]+) of 8, delta 0.0005 of 0.001", out)[1])
    assert 6 < each < 8
    assert "2 runs on average, drawn: with 5 % chance 6 or more" in out
    assert "tried with 67 % chance" in out
    assert "warning" not in out
    assert "dry=true: nothing was trained, and nothing spent" in out
    assert not Path("results").exists()

    # so much noise hides which setting is best
    out, _ = done(cli, *tuned("dry=true", "runs=500", "epsilon=0.5"))
    assert "warning: tuning can hardly pay here" in out


# The program as a whole


def toy(monkeypatch: pytest.MonkeyPatch, score: Any, runs: float, trials: int) -> np.ndarray:
    """The score and the place of the best, [trials, 2], by the code that draws and chooses; score: of a candidate."""

    def scored(tuning, number, candidate):
        return tune.Scored(score(candidate), {}, Path(), candidate)

    monkeypatch.setattr(tune, "_score", scored)
    planned = tune.Tuning(list(range(2)), None, runs, 0.0, 0.0)  # type: ignore[arg-type]
    source = stream("toy", "runs")
    best = (tune._best(planned, tune.draw(planned, lambda _: source)) for _ in range(trials))  # type: ignore[arg-type]
    return np.array([[each.score, each.candidate] for each in best])


@pytest.mark.attack
@pytest.mark.parametrize(
    ("fault", "leaks"),
    [(None, False), ("each run has all of epsilon", True), ("the number is fixed", True), ("no noise", True)],
)
def test_an_attack_measures_no_more_than_the_whole_claims(fault, leaks, monkeypatch) -> None:
    """Randomised response as the score, the worst program there is: an adversary who knows all else counts how often
    the best is low. With a planted fault it finds more than epsilon."""
    epsilon, runs, trials = 2.0, 3.0, 10_000
    each, _ = repeated.budget_of_run(epsilon, 1e-6, runs, lambda epsilon, _: [[pure(epsilon, 1.0, 1, "")]])
    each = {"each run has all of epsilon": epsilon, "no noise": 50.0}.get(fault, each)
    if fault == "the number is fixed":
        monkeypatch.setattr(repeated, "number", lambda runs, _: round(runs))

    random = np.random.RandomState(0)
    keeps = 1 / (1 + math.exp(-each))  # how often the answer is the true one
    low = []
    for member in (0, 1):
        best = toy(monkeypatch, lambda _, member=member: float((random.rand() < keeps) == member), runs, trials)
        low.append(max(1.0, (best[:, 0] == 0).sum()))
    measured = math.log(max(low) / min(low)) - 4 / math.sqrt(min(low))  # four standard deviations below
    assert (measured > epsilon) == leaks
    if fault is None:
        assert math.log(max(low) / min(low)) > 0.7 * epsilon


def test_the_interval_of_the_best_holds_since_other_examples_measure_it(monkeypatch) -> None:
    """Of equal candidates, the counts that chose are too high, and their interval with them; those of the other half
    are not."""
    n, p, many = 60, 0.6, 30_000
    random = np.random.RandomState(0)
    sigma = accountant.deviation(plan(3.0, 1e-3, 1.0, 1, math.sqrt(2)).noise_multiplier, math.sqrt(2))
    right = random.binomial(n, p, many)
    counts = np.stack([right, n - right, 0 * right, 0 * right], 1).reshape(-1, 2, 2)
    noisy = [np.round(each + sigma * random.randn(*each.shape), 1) for each in (counts, right)]
    found = quality.accuracy(quality.Released(noisy[0], sigma, n, noisy[1]))
    holds = (found.low <= p) & (p <= found.high)
    places = iter(range(many))

    def score(_):
        place = next(places)
        return found.estimate[place] + 1e-9 * place  # so that the score says which it was

    best = toy(monkeypatch, score, 12.0, 1500)
    order = {found.estimate[place] + 1e-9 * place: place for place in range(many)}
    assert np.mean([holds[order[each]] for each in best[:, 0]]) < 0.9
    assert holds.mean() > 0.945
