"""The quality that is released with noise: what it is, what it costs, and that it is drawn once."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import pubsel.release.run
from pubsel.cell import Streams
from pubsel.cli import main
from pubsel.data import load
from pubsel.privacy import accountant
from pubsel.privacy.people import UNIT
from pubsel.release import card, measurement
from pubsel.release.quality import sensitivity
from pubsel.settings.keys import Pair
from tests.made import only_record

SEVERAL, TWO, THREE = "several.npz", "two.npz", "three.npz"
WORDS = tuple(
    (
        "model=pixels algorithm=whitened_head distance=none download=false threads=1 epsilon=2 privacy.delta=1e-3 "
        "pair.public=null pair.validation=0.25 privacy.measure=true"
    ).split()
)


@pytest.fixture
def folder(tmp_path, folder):
    """A folder with images of two and of three classes, and of three labels each."""
    draw = np.random.RandomState(0)
    for name, kinds in ((TWO, 2), (THREE, 3), (SEVERAL, 3)):
        arrays = {}
        for part, n in (("train", 800), ("test", 90)):
            chosen = np.eye(kinds, dtype=int)[draw.randint(kinds, size=n)]
            if name == SEVERAL:
                chosen = draw.randint(2, size=(n, kinds))
            images = draw.randint(0, 200, (n, 6, 6))
            images[:, :kinds] += 55 * chosen[:, :, None]
            labels = chosen if name == SEVERAL else chosen.argmax(1)
            arrays |= {f"{part}_images": images.astype(np.uint8), f"{part}_labels": labels}
        np.savez(name, **arrays)
    return tmp_path


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (THREE, ["accuracy", "balanced_accuracy", "recall of each class", "share of the largest class"]),
        (SEVERAL, ["auc", "auc of each label"]),
    ],
)
def test_a_run_measures_what_it_reaches(data, names, folder, capsys):
    """The figures without noise, which the record has too, lie in the intervals; the guarantee is of the budget."""
    assert main(["run", f"pair.private={data}", *WORDS]) == 0, capsys.readouterr().err
    assert f"Measured privately: {names[0]}" in capsys.readouterr().out
    record = only_record()
    quality = record["quality"]
    assert list(quality["figures"]) == names
    n = quality["examples"]
    assert n + record["private_examples"] == 800
    assert 150 < n < 250

    estimate, low, high = quality["figures"][names[0]]
    assert low <= record["selection"]["validation"] <= high
    assert low <= estimate <= high
    if data == THREE:
        assert abs(np.sum(quality["counts"]) - n) < 5 * 3 * quality["deviation"]
    privacy = quality["privacy"]
    assert privacy["noise_source"] == "seeded"
    assert accountant.ROUNDED in privacy["not_covered"]
    moved = 2**0.5 if data == THREE else 3**0.5
    assert privacy["sensitivity"] == pytest.approx(moved)
    assert privacy["epsilon"] == pytest.approx(2, abs=1e-3)
    assert record["privacy"]["epsilon"] == pytest.approx(2, abs=1e-3)
    mu = moved / quality["deviation"]
    assert accountant.gaussian_epsilon(mu, 1e-3) <= 2 + 1e-9


def test_scores_of_two_classes_are_released_if_the_metric_is_an_auc():
    outputs, y = torch.tensor([[0.0, 2.0], [1.0, -1.0], [0.0, 0.5]]), torch.tensor([1, 0, 1])
    assert measurement.table_of(outputs, y, "auc").shape == (1, 2, 32)
    assert measurement.table_of(outputs, y, "accuracy").tolist() == [[UNIT, 0], [0, 2 * UNIT]]


@pytest.mark.attack
@pytest.mark.parametrize("many", [1, 2, 7, 500])
@pytest.mark.parametrize(
    ("classes", "several", "metric"),
    [
        (2, False, "auc"),
        (2, False, "accuracy"),
        (7, False, "auc"),
        (14, True, "auc"),
    ],
)
def test_one_held_out_person_moves_the_table_by_at_most_its_sensitivity(classes, several, metric, many):
    """Whoever is before and after them, and whatever their images are."""
    torch.manual_seed(0)
    others = torch.tensor([2, 1, 4])

    def some(n):
        y = torch.randint(2, (n, classes)).float() if several else torch.randint(classes, (n,))
        if several:
            y[:, ::3] = torch.nan  # not known
        return torch.randn(n, classes), y

    outputs, y = some(7)
    before = measurement.table_of(outputs, y, metric, others)
    for place in (0, 3):  # before all others, and after them
        split = 0 if place == 0 else 7
        people = torch.cat([others[:place], torch.tensor([many]), others[place:]])
        for mine in (some(many), (torch.full((many, classes), torch.nan), y[:1].expand(many, *y.shape[1:]))):
            both = [torch.cat([a[:split], b, a[split:]]) for a, b in zip((outputs, y), mine, strict=True)]
            after = measurement.table_of(*both, metric, people)
            assert 0 < np.linalg.norm((after - before) / UNIT) <= sensitivity(before)


def test_people_are_measured(folder, capsys, monkeypatch):
    """Each of them counts as much as another, with whatever many images; those of one are counted as theirs."""
    arrays = dict(np.load(THREE))
    sizes = np.random.RandomState(3).randint(1, 6, 300)
    arrays["train_patient"] = np.repeat(np.arange(300), sizes)[:800]
    arrays["test_patient"] = np.arange(1000, 1090)
    np.savez("patients.npz", **arrays)
    seen = []
    table_of = measurement.table_of
    monkeypatch.setattr(measurement, "table_of", lambda *given: (seen.append(given), table_of(*given))[1])
    # The noise is the same each time: one interval in twenty does not contain the truth.
    monkeypatch.setattr("os.urandom", np.random.default_rng(0).bytes)
    words = ["pair.private=patients.npz", "pair.unit=patient", *WORDS, "epsilon=8", "privacy.secure_noise=true"]
    assert main(["run", *words]) == 0, capsys.readouterr().err

    # whose each held-out image is, by the images themselves
    pair = Pair(private="patients.npz", public=None, m=1, unit="patient", validation=0.25)
    held = load(pair, "", False)
    by_image = {
        image.tobytes(): who for image, who in zip(arrays["train_images"], arrays["train_patient"], strict=True)
    }
    whose = np.array([by_image[image.numpy().tobytes()] for image in held.validation.x])
    ((outputs, y, metric, people),) = seen
    assert metric == "accuracy"
    assert people.tolist() == [len(list(of)) for _, of in itertools.groupby(whose)]
    right = (outputs.argmax(1) == y).numpy()
    accuracy = np.mean([right[whose == who].mean() for who in set(whose)])

    record = only_record()
    quality = record["quality"]
    assert (quality["units"], quality["examples"]) == (len(people), len(y))
    estimate, low, high = quality["figures"]["accuracy"]
    assert low <= accuracy <= high
    assert abs(estimate - accuracy) < 5 * np.sqrt(3) * quality["deviation"] / len(people)
    assert "for a held-out person with all their examples (those with one patient)" in quality["privacy"]["statement"]
    assert "one person with all their held-out examples" in quality["privacy"]["adjacency"]
    assert quality["privacy"]["sensitivity"] == pytest.approx(2**0.5)

    assert main(["export", record["identity"], "to=model"]) == 0, capsys.readouterr().err
    readme, page = Path("model/README.md").read_text(), Path("model/privacy.html").read_text()
    assert f"On {len(y)} private images of {len(people)} people that were not trained on" in readme
    assert "Each person counts as much as another" in readme
    assert f"protect each of the {len(people)} held-out people" in page


@pytest.mark.attack
def test_each_thing_that_decides_a_measurement_decides_its_noise(folder, capsys, monkeypatch):
    """Two tables with the same noise would show, in their difference, what one example changed."""
    arrays = dict(np.load(THREE)) | {"train_patient": np.arange(800) // 3, "test_patient": np.arange(1000, 1090)}
    np.savez("patients.npz", **arrays)
    seen, keys, measured, secret = [], [], measurement.measure, Streams.secret
    monkeypatch.setattr(measurement, "measure", lambda *given: seen.append(given) or measured(*given))
    assert main(["run", "pair.private=patients.npz", "pair.unit=patient", *WORDS]) == 0, capsys.readouterr().err
    ((cell, prepared, task, *budget),) = seen

    monkeypatch.setattr(Streams, "secret", lambda *given: keys.append(secret(*given)) or keys[-1])
    held, people = prepared.task.validation, task.held_out_people.clone()
    people[:2] += torch.tensor([1, -1])
    others = [held, held._replace(x=held.x + 1), held._replace(y=held.y.roll(1))]
    cases = [(prepared._replace(task=prepared.task._replace(validation=other)), task) for other in others]
    cases += [(prepared, task._replace(held_out_people=people)), (prepared, task)]
    for place, case in enumerate(cases):
        if place == len(cases) - 1:
            next(prepared.model.parameters()).data.add_(1)
        (folder / str(place)).mkdir()
        measured(cell._replace(folder=folder / str(place)), *case, *budget)
    assert len({key.key for key in keys}) == len(cases)


def test_held_out_examples_change_the_table_alone(folder, capsys):
    """The weights are the same whatever is held out: the two guarantees are of different examples."""
    assert main(["run", f"pair.private={THREE}", *WORDS]) == 0, capsys.readouterr().err
    first = only_record()
    seen = pubsel.release.run.measurement.logits

    def other(model, x):
        return seen(model, x).roll(1, 1)  # as other examples would

    pubsel.release.run.measurement.logits = other
    try:
        assert main(["run", f"pair.private={THREE}", *WORDS, "results=other"]) == 0, capsys.readouterr().err
    finally:
        pubsel.release.run.measurement.logits = seen
    second = only_record("other")
    assert first["weights"] == second["weights"]
    noise = [np.array(r["quality"]["counts"]) for r in (first, second)]
    assert np.abs(noise[0] - noise[1]).max() > 20

    # one line for the training, one for the measurement, each of its own examples
    lines = [json.loads(line) for path in Path("results/ledger").glob("*.jsonl") for line in path.open()]
    spent = {line["what"]: (line["epsilon"], line["delta"]) for line in lines}
    parts = {"measurement": first["quality"]["privacy"], "training": first["privacy"]}
    assert spent == {what: (part["epsilon"], part["delta"]) for what, part in parts.items()}
    assert len(list(Path("results/ledger").glob("*.jsonl"))) == 2

    # Examples are known as they were loaded: another method maps the same ones otherwise.
    words = [*WORDS, "algorithm=dp_sgd_clip1", "training=adamix", "privacy.noise_multiplier=5"]
    assert main(["run", f"pair.private={THREE}", *words]) == 0, capsys.readouterr().err
    assert len(list(Path("results/ledger").glob("*.jsonl"))) == 2


@pytest.mark.parametrize("secure", ["false", "true"])
def test_a_measurement_is_drawn_once(secure, folder, capsys, monkeypatch):
    """A run that ends just after the draw has the same table when it goes on, whatever its noise is."""
    words = ["run", f"pair.private={THREE}", *WORDS, f"privacy.secure_noise={secure}"]
    figures = measurement.figures_of
    drawn = []

    def interrupted(released):
        drawn.append(released.counts)
        if len(drawn) == 1:
            raise KeyboardInterrupt
        return figures(released)

    monkeypatch.setattr(measurement, "figures_of", interrupted)
    assert main(words) == 130
    assert main(words) == 0, capsys.readouterr().err
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not list(Path("results/runs").glob("*/measurement.pt"))


def test_a_measured_run_is_repeated_and_exported(folder, capsys):
    assert main(["run", f"pair.private={THREE}", *WORDS, "privacy.secure_noise=true"]) == 0, capsys.readouterr().err
    record = only_record()
    assert main(["export", record["identity"], "to=model"]) == 0, capsys.readouterr().err
    quality = json.loads(Path("model/config.json").read_text())["quality"]
    assert quality["counts"] == record["quality"]["counts"]
    readme, page = Path("model/README.md").read_text(), Path("model/privacy.html").read_text()
    assert "measurement on held-out examples" in page
    assert f"{100 * record['utility']:.2f}" not in readme.partition("## Figures")[2].partition("| recall")[0]

    assert main(["run", f"pair.private={THREE}", *WORDS, "results=seeded"]) == 0, capsys.readouterr().err
    (path,) = Path("seeded").glob("runs/*/result.json")
    assert main(["run", f"replay={path}", "results=again"]) == 0, capsys.readouterr().err


def test_the_best_adversary_may_ask_about_a_held_out_example(folder, capsys):
    """A measurement with less noise than the training raises the bound on the page."""
    assert main(["run", f"pair.private={THREE}", *WORDS, "privacy.secure_noise=true"]) == 0, capsys.readouterr().err
    told = card.statement_of(only_record(), json.loads(next(Path("results").glob("runs/*/model.json")).read_text()))
    assert told.quality is not None
    loud = told.quality | {"part": told.quality["part"] | {"noise_multiplier": 0.5}}
    changed = card.Statement(**(told.__dict__ | {"quality": loud}))
    assert float(card.meaning(changed)["right"].split()[0]) > float(card.meaning(told)["right"].split()[0])


def test_the_measurement_spends_what_the_statement_says(folder, capsys):
    """Training may spend less than epsilon; the card states one epsilon for both."""
    words = [f"pair.private={THREE}", *WORDS, "algorithm=dp_sgd_clip1", "training=adamix", "privacy.noise_multiplier=5"]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    record = only_record()
    assert record["quality"]["privacy"]["epsilon"] <= record["privacy"]["epsilon"] < 2


def test_a_measurement_states_its_own_delta_and_neighbours(folder, capsys):
    """A training without Gaussian noise has delta 0; the counts have it, and rows that are equal are several units."""
    draw = np.random.RandomState(0)
    x, y = draw.normal(size=(600, 4)), np.repeat([0, 1], 300)
    np.savez("rows.npz", x=x + y[:, None], y=y)
    words = [word for word in WORDS if not word.startswith(("model", "algorithm", "pair.public"))]
    words += ["pair.private=rows.npz", "pair.public=rows.npz", "pair.take=train", "pair.m=60", "model=rows"]
    words += ["algorithm=dppl_public", "privacy.secure_noise=true"]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    record = only_record()
    assert record["privacy"]["delta"] == 0
    assert record["quality"]["privacy"]["adjacency"].startswith("one held-out example is there")

    assert main(["export", record["identity"], "to=model"]) == 0, capsys.readouterr().err
    readme, page = Path("model/README.md").read_text(), Path("model/privacy.html").read_text()
    assert "as nothing; epsilon 2, delta 0.001, for one held-out row." in readme
    assert "epsilon 2, delta 0, for one training row" in readme
    assert "<p>Epsilon 2 and delta 0.001 protect each of the" in page


def test_an_auc_of_two_classes_is_told_once(folder, capsys):
    words = [f"pair.private={TWO}", *WORDS, "pair.metric=auc", "privacy.secure_noise=true"]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    told = card.statement_of(only_record(), json.loads(next(Path("results").glob("runs/*/model.json")).read_text()))
    names = [name for name, _ in card.figures(told)[0]]
    assert [name for name in names if "auc" in name] == ["auc"]
    assert {"accuracy", "balanced accuracy", "share of the largest class"} < {*names}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pair.validation=0"],
            "privacy.measure=true: measures on held-out private examples: give pair.validation=0.1",
        ),
        (["pair.validation=0.9", "privacy.delta=2e-3"], "privacy.delta=0.002 is above 1/n"),
        (["epsilon=inf"], "privacy.measure=true: needs a private algorithm and epsilon=NUMBER"),
        (["algorithm=non_private"], "privacy.measure=true: needs a private algorithm and epsilon=NUMBER"),
    ],
)
def test_without_held_out_examples_or_noise_nothing_is_measured(words, message, folder, capsys):
    assert main(["run", f"pair.private={THREE}", *WORDS, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_training_without_a_delta_is_measured_with_that_of_the_budget(folder, capsys):
    words = [f"pair.private={THREE}", *WORDS, f"pair.public={THREE}", "pair.m=80", "algorithm=dppl_public"]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    record = only_record()
    assert (record["privacy"]["delta"], record["quality"]["privacy"]["delta"]) == (0, 1e-3)
