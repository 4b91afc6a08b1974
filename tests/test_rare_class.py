"""A class that a model hardly ever answers is told, with and without noise."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pubsel import records
from pubsel.cli import main
from pubsel.papers import report
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT, weights_of
from pubsel.release import card, measurement, quality
from pubsel.release import run as training
from pubsel.release.quality import Released
from pubsel.training.evaluation import hardly_answered
from tests.made import only_record

DRAWS = 2000
EXACT = 1e-6
HEALTHY, DISEASE = "healthy", "rare disease"
NEVER = [[960, 0], [40, 0]]  # of a class of 4 %
WELL = [[950, 10], [8, 32]]
SIGMA = accountant.deviation(accountant.plan(1.0, 1e-5, 1.0, 1, 2**0.5).noise_multiplier, 2**0.5)  # at epsilon 1


def drawn(counts, seed=0, sigma=SIGMA, sizes=False):
    """DRAWS releases of a table of counts."""
    random, counts = np.random.default_rng(seed), np.array(counts, float)
    noisy = counts + sigma * random.standard_normal((DRAWS, *counts.shape))
    beside = counts.sum(1) + sigma * random.standard_normal((DRAWS, len(counts)))
    return Released(noisy, sigma, int(counts.sum()), sizes=beside if sizes else None)


def released(counts, sigma=EXACT):
    counts = np.array(counts, float)
    return Released(counts, sigma, int(counts.sum()), right=np.trace(counts))


def of_record(table, labels=(HEALTHY, DISEASE)):
    """What a record has of a released table."""
    figures = {name: [part.tolist() for part in figure] for name, figure in measurement.figures_of(table).items()}
    return {"figures": figures, **measurement.answered_of(table, labels)}


# What follows from the noisy table


def test_a_class_that_is_never_answered_is_named_beside_both_figures_and_the_largest_class():
    text = measurement.quality_text(of_record(released(NEVER)))
    assert text.startswith(" Measured privately: accuracy 96.0 % [94.6, 97.0], balanced accuracy 50.0 % [49.8, 54.4]; ")
    assert text.endswith(
        " the largest class is 96.0 % [94.4, 97.0] of all. Never or hardly ever answered: rare disease."
    )

    text = measurement.quality_text(of_record(released(WELL)))
    assert "accuracy 98.2 % [97.2, 98.9], balanced accuracy 89.5 %" in text
    assert "answered" not in text


@pytest.mark.parametrize("sizes", [False, True])
def test_with_the_noise_of_epsilon_one_a_class_of_4_percent_is_named(sizes):
    """Of 1,000 held-out images; one that is answered is not named."""
    never, well = (quality.answered(drawn(counts, sizes=sizes)) for counts in (NEVER, WELL))
    assert never.hardly_answered[:, 1].mean() > 0.7
    assert (never.hardly_answered | never.perhaps_unanswered)[:, 1].mean() > 0.95
    assert not (never.hardly_answered | never.perhaps_unanswered)[:, 0].any()
    assert not well.hardly_answered.any()


@pytest.mark.parametrize(("rare", "sizes"), [(5, False), (15, False), (15, True)])
def test_what_the_noise_hides_is_said_and_not_decided(rare, sizes):
    """Few images of a class: whether the model always answers it or never, the noise hides it."""
    for counts in ([[500 - rare, 0], [rare, 0]], [[500 - rare, 0], [0, rare]]):
        kinds = quality.answered(drawn(counts, sizes=sizes))
        assert kinds.hardly_answered[:, 1].mean() < (0.3 if counts[1][0] else 0.005)
        assert kinds.perhaps_unanswered[:, 1].mean() > (0.65 if counts[1][0] else 0.15)
        assert not (kinds.hardly_answered & kinds.perhaps_unanswered).any()


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("classes", [2, 5, 30])
def test_no_class_is_named_that_is_answered_half_as_often_as_it_occurs(classes, sizes, monkeypatch):
    """In 95 % of draws, of all classes together, without the rule that few answers are needed too; where the noise
    does not make negative numbers of answers, in no more than that."""
    monkeypatch.setattr(quality, "HARDLY", 1.0)
    counts = 100.0 * np.eye(classes)
    counts[1:, 0], counts[np.arange(1, classes), np.arange(1, classes)] = 50, 50
    named = quality.answered(drawn(counts, sizes=sizes, sigma=0.5)).hardly_answered
    assert named[:, 0].mean() == 0
    assert 0.02 < named.any(1).mean() < 0.06


def test_half_of_the_largest_possible_error_is_no_reason_to_name_a_class():
    """Noise that makes the number of answers negative is no evidence."""
    table = Released(np.array([[990.0, -20.0], [30.0, -20.0]]), 10.0, 1000)
    assert not quality.answered(table).hardly_answered.any()
    assert quality.answered(table).perhaps_unanswered.tolist() == [False, True]


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_noise_of_the_sizes_is_what_is_stated(classes, sizes):
    matrix = drawn(10.0 * np.ones((classes, classes)), sizes=sizes)
    estimates, variance = quality._class_sizes(matrix)
    assert estimates.var(0) == pytest.approx(variance, rel=0.15)
    assert estimates.sum(1) == pytest.approx(matrix.n)


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("shares", [(0.97, 0.03), (0.5, 0.5), (0.4, 0.3, 0.3), (0.1,) * 10])
@pytest.mark.parametrize("n", [100, 2000])
def test_the_interval_of_the_largest_class_contains_its_share(shares, n, sizes):
    random = np.random.default_rng(1)
    of_each = random.multinomial(n, shares, DRAWS)
    counts = np.zeros((DRAWS, len(shares), len(shares)))
    counts[..., 0] = of_each
    noise = SIGMA * random.standard_normal((DRAWS, len(shares), len(shares) + 1))
    matrix = Released(counts + noise[..., 1:], SIGMA, n, sizes=of_each + noise[..., 0] if sizes else None)
    figure = quality.largest_class(matrix)
    assert ((figure.low <= max(shares)) & (max(shares) <= figure.high)).mean() >= 0.93
    assert (figure.low <= figure.estimate).all()
    assert (figure.estimate <= figure.high).all()
    assert (figure.low >= 1 / len(shares) - 1e-12).all()
    clear = shares[0] > 0.9 and n == 2000
    assert not clear or (figure.high - figure.low).mean() < 0.03


def test_histograms_of_two_classes_tell_the_answers_too():
    random = torch.Generator().manual_seed(0)
    y = (torch.rand(400, generator=random) < 0.3).long()
    outputs = torch.randn(400, 2, generator=random) + 2 * torch.nn.functional.one_hot(y, 2)
    steps = measurement.table_of(outputs, y, "auc")
    matrix = quality.at_half(Released(steps / UNIT, 2.0, 400))
    weights = torch.tensor(weights_of(None, 400))
    assert np.array_equal(matrix.counts, quality.confusion(y, outputs.argmax(1), 2, weights) / UNIT)
    assert matrix.deviation == 2.0 * 16**0.5

    # noise on each bin has this deviation in the sum
    bins = Released(2.0 * np.random.default_rng(0).standard_normal((DRAWS, 1, 2, quality.BINS)), 2.0, 400)
    assert quality.at_half(bins).counts.std(0) == pytest.approx(quality.at_half(bins).deviation, rel=0.1)

    names = ["auc", "auc of each label", "accuracy", "balanced_accuracy", measurement.LARGEST, "recall of each class"]
    assert list(measurement.figures_of(Released(steps / UNIT, 2.0, 400))) == names
    several = Released(np.concatenate([steps, steps]) / UNIT, 2.0, 400)
    assert list(measurement.figures_of(several)) == names[:2]
    assert measurement.answered_of(several, "ab") == {}


def test_many_names_are_cut_short():
    names = {"hardly_answered": list("abcdefg"), "perhaps_unanswered": ["h"]}
    hardly, perhaps = measurement.answered_text(names).strip().split(". ")
    assert hardly == "Never or hardly ever answered: a, b, c, d, e and 2 more"
    assert perhaps == "Noise hides whether these classes are ever answered: h."
    assert measurement.answered_text({}) == ""


# Without noise


def test_classes_that_are_answered_less_than_a_tenth_as_often_as_they_occur():
    y = torch.tensor([0] * 100 + [1] * 50 + [2] * 50)
    answers = torch.tensor([0] * 145 + [1] * 5 + [2] * 4 + [0] * 46)
    outputs = torch.eye(4)[answers]
    assert hardly_answered(outputs, y) == [2]  # 4 of 50; nobody is of class 3
    assert hardly_answered(outputs[:150], y[:150]) == []
    assert hardly_answered(torch.eye(4)[[0, 0, 0, 0]], torch.tensor([0, 0, 1, 2])) == [1, 2]


# The commands


def draw(folder, n=1200, rare=60):
    """Images that tell nothing of their class."""
    random = np.random.default_rng(0)
    for i in range(n):
        path = Path(folder) / (DISEASE if i < rare else HEALTHY) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (6, 6)).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with what pubsel fit made of a rare class, and what it printed."""
    home = tmp_path_factory.mktemp("rare")
    draw(home / "xrays")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        # The noise is the same each time.
        patch.setattr("os.urandom", np.random.default_rng(0).bytes)
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        printed = list[str]()
        words = "public=null epsilon=4 delta=1e-4 held_out=0.5 features=pixels download=false threads=1"
        assert main(["fit", "./xrays", *words.split()]) == 0
    return home, "\n".join(printed)


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home[0])
    return home[1]


def test_the_screen_has_both_figures_and_the_name_marked_by_what_may_be_published(here):
    record, lines = only_record(), here.splitlines()
    (measured,) = (line for line in lines if "Measured privately" in line)
    assert f" {measurement.quality_text(record['quality'])} This is in the folder." == measured
    assert "Never or hardly ever answered: rare disease." in measured

    (tested,) = (line for line in lines if "test images" in line and "not in the folder" in line)
    assert tested.startswith(f"  On {record['test_examples']} test images: accuracy {100 * record['utility']:.1f} % [")
    assert "; balanced accuracy 50.0 % [50.0, 50.0]; the largest class is 9" in tested
    assert tested.endswith(
        "% of them. Never or hardly ever answered: rare disease. This is not private, and not in the folder."
    )
    on_test = record["on_test"]
    assert on_test["figures"]["accuracy"] == [record["utility"], *record["utility_interval"]]
    assert on_test["largest_class"] == pytest.approx(record["utility"])
    assert on_test["hardly_answered"] == [DISEASE]

    shown = training.show_run(record)
    assert "; balanced accuracy 50.00 % [50.00, 50.00]; the largest class is" in shown
    assert "Never or hardly ever answered: rare disease. This is not private. Measured privately: " in shown


def test_the_folder_has_what_was_released_of_it(here):
    config, readme = json.loads(Path("release/config.json").read_text()), Path("release/README.md").read_text()
    record = only_record()
    assert config["quality"]["hardly_answered"] == [DISEASE]
    assert config["quality"]["perhaps_unanswered"] == []
    assert "**Never or hardly ever answered**: rare disease. By estimate" in readme
    for name in ("accuracy", "balanced_accuracy", measurement.LARGEST):
        estimate, low, high = (f"{100 * value:.1f}" for value in record["quality"]["figures"][name])
        assert f"| {name.replace('_', ' ')} | {estimate} | {low} to {high} |" in readme
    assert "on_test" not in config
    assert "<p>Never or hardly ever answered: rare disease.</p>" in report.page([record])


@pytest.mark.usefixtures("here")
def test_the_card_has_the_balanced_accuracy_however_wide_its_interval_is():
    record, facts = only_record(), json.loads(Path("release/config.json").read_text())
    figures = record["quality"]["figures"]
    figures |= {"balanced_accuracy": [0.4, 0.0, 0.9], "recall of each class": [[1.0, 0.0], [0.9, 0.0], [1.0, 0.9]]}
    statement = card.statement_of(record, facts)
    names = ["accuracy", "balanced accuracy", measurement.LARGEST, f"recall of {HEALTHY}"]
    assert [name for name, _ in card.figures(statement)[0]] == names
    assert "1 figure of one class is left out" in card.readme(statement)


@pytest.mark.usefixtures("here")
def test_a_record_from_before_has_its_figures_alone():
    record, facts = only_record(), json.loads(Path("release/config.json").read_text())
    del record["on_test"], record["quality"]["hardly_answered"], record["quality"]["perhaps_unanswered"]
    del record["quality"]["figures"][measurement.LARGEST]
    records.parsed(json.dumps(record))
    assert "answered" not in training.show_run(record)
    assert "hardly" not in card.readme(card.statement_of(record, facts))


@pytest.mark.attack
def test_what_is_released_follows_from_the_noisy_table_alone(tmp_path, folder, monkeypatch):
    """Two private tables that noise makes equal have the same figures, names, text and card."""
    draw(tmp_path / "xrays", 300, 60)
    noisy = Released(np.array([[100.0, 1.0], [49.0, -2.0]]), 2.0, 148, right=np.array(98.0))
    tables = {"never": [[120, 0], [28, 0]], "always": [[10, 110], [0, 28]]}
    seen = []
    for name, table in tables.items():
        monkeypatch.setattr(measurement, "table_of", lambda *_, table=table: np.array(table) * UNIT)
        monkeypatch.setattr(quality, "release", lambda counts, *_, **__: seen.append(counts // UNIT) or noisy)
        words = "model=pixels algorithm=whitened_head distance=none download=false threads=1 epsilon=2 pair.public=null"
        words += " pair.validation=0.6 privacy.delta=1e-4 privacy.measure=true privacy.secure_noise=true"
        assert main(["run", "pair.private=./xrays", *words.split(), f"results={name}"]) == 0
    assert [counts.tolist() for counts in seen] == [*tables.values()]

    first, second = (only_record(name)["quality"] for name in tables)
    assert first == second
    assert first["hardly_answered"] == [DISEASE]
    assert measurement.quality_text(first) == measurement.quality_text(second)
    for name in tables:
        assert main(["export", only_record(name)["identity"], f"results={name}", f"to=model_{name}"]) == 0
    figures = [Path(f"model_{name}/README.md").read_text().partition("## Figures")[2] for name in tables]
    assert figures[0] == figures[1]
    assert "rare disease" in figures[0]
