"""Membership inference: figures with known answers, attacks that must succeed and attacks that must not, and what
`pubsel attack` says of runs and of mistakes."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from omegaconf import OmegaConf
from scipy.stats import norm
from torch import nn

from pubsel.attacks.membership import (
    SKETCH,
    attack_figures,
    black_box,
    classifier_scores,
    gradients,
    last_layers,
    member_scores,
    pick_rate,
    success_rate,
    white_box,
)
from pubsel.cell import weights_digest
from pubsel.commands.attack import reopened
from pubsel.data import Split, open_dataset
from pubsel.distances import gsd
from pubsel.gradients.matrix import PerExampleGradients, random_labels
from pubsel.models import build
from pubsel.papers import join
from pubsel.papers.attacked import beside_paper
from pubsel.privacy.randomness import stream
from pubsel.settings.keys import Model, Norm
from pubsel.training.evaluation import evaluate
from tests.made import Scaled, checked, done, failed, network, write_npz
from tests.synthetic import distance

RANDOM = np.random.default_rng(0)
DISTANCE = distance("gsd", k=4, m=60, initialisations=2)


def digits(n, seed=0, classes=10):
    """Random images and labels."""
    draw = np.random.default_rng(seed)
    images = torch.from_numpy(draw.integers(256, size=(n, 1, 8, 8), dtype=np.uint8))
    return Split(images, torch.from_numpy(draw.integers(classes, size=n)))


# Figures


def test_figures_of_scores_counted_by_hand():
    """300 others 0 ... 299; of 10 members 4 lie above all, 1 above all but two, 5 below all."""
    scores = np.concatenate([[500.0, 501, 502, 503, 297.5, -1, -2, -3, -4, -5], np.arange(300.0)])
    member = np.arange(310) < 10
    found = attack_figures(scores, member, np.random.default_rng(0))
    assert found["auc"] == pytest.approx((4 * 300 + 298) / 3000)
    assert found["tpr"] == {"0.001": 0.4, "0.01": 0.5}  # no false positive allowed; three allowed
    assert (found["members"], found["others"]) == (10, 300)
    assert found["auc_interval"][0] < found["auc"] < found["auc_interval"][1]


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_figures_of_two_gaussians(shift):
    """AUC Phi(d / sqrt 2) and true-positive rate Phi(d - z) in closed form; the bootstrap has the width of theory."""
    n = 4000
    member = np.arange(2 * n) < n
    scores = np.random.default_rng(1).normal(size=2 * n) + shift * member
    found = attack_figures(scores, member, np.random.default_rng(0))
    auc, (low, high) = norm.cdf(shift / math.sqrt(2)), found["auc_interval"]
    assert low < auc < high
    if shift == 0:
        assert high - low == pytest.approx(2 * 1.96 * math.sqrt((2 * n + 1) / (12 * n * n)), rel=0.1)
    for rate, value in found["tpr"].items():
        rate = float(rate)
        assert value == pytest.approx(norm.cdf(shift - norm.isf(rate)), abs=0.06 if rate < 0.01 else 0.03)


def test_success_counts_the_right_side():
    found = success_rate(np.array([0.9, 0.6, 0.4, 0.1]), np.array([True, False, True, False]))
    assert found["success"] == 0.5
    assert found["success_interval"][0] == pytest.approx(0.0676, abs=1e-4)  # Clopper and Pearson, 2 of 4


def test_a_classifier_on_chance_is_right_half_of_the_time_and_on_a_leak_always():
    noise = RANDOM.normal(size=(800, 5)).astype(np.float32)
    scores, member = classifier_scores(noise[:400], noise[400:], 200, 0)
    found = success_rate(scores, member)
    assert len(member) == 400
    assert found["success_interval"][0] < 0.5 < found["success_interval"][1]
    leak = noise + np.repeat([[8], [0]], 400, axis=0).astype(np.float32) * (np.arange(5) == 3)
    scores, member = classifier_scores(leak[:400], leak[400:], 200, 0)
    assert success_rate(scores, member)["success"] == 1
    assert attack_figures(scores, member, np.random.default_rng(0))["auc"] == 1


def test_the_loss_and_labels_of_an_example_are_those_that_are_known():
    y = torch.tensor([[0, torch.nan, 1]]).repeat(4, 1)
    members = Split(torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8), y)
    features = black_box(nn.Sequential(Scaled(), nn.Flatten(), nn.Linear(64, 3)), members, members)
    responses = features["outputs", None]
    assert np.isfinite(responses).all()
    assert responses[0, 4:].tolist() == [0, 0.5, 1]


# GSD


def test_gradient_features_are_the_sketch_norm_loss_and_distance_of_each_row():
    split, engine = digits(20), PerExampleGradients(network(0), names=["net.fc.weight"])
    basis = torch.linalg.qr(torch.randn(engine.size, 3, dtype=torch.float64)).Q
    found, own = gradients(engine, split, [basis, basis[:, :1]], np.random.default_rng(0))
    rows = engine.matrix(split.x, split.y).rows.double()
    sketch = np.random.default_rng(0).standard_normal((engine.size, SKETCH), np.float32) / math.sqrt(SKETCH)
    np.testing.assert_allclose(found[:, :SKETCH], rows.numpy() @ sketch, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[:, SKETCH].double(), rows.norm(dim=1), rtol=1e-5, atol=0)
    losses = nn.functional.cross_entropy(network(0)(split.x), split.y, reduction="none")
    torch.testing.assert_close(found[:, SKETCH + 1], losses)
    for j, b in enumerate((basis, basis[:, :1])):  # the sine of the angle between row and subspace
        sine = (rows - rows @ b @ b.T).norm(dim=1) / rows.norm(dim=1)
        torch.testing.assert_close(own[:, j].double(), sine, rtol=1e-4, atol=1e-6)
    inside = PerExampleGradients(network(0), names=["net.fc.weight"])
    unit = rows[:1].T / rows[0].norm()
    assert gradients(inside, split, [unit], np.random.default_rng(0))[1][0].item() == pytest.approx(0, abs=1e-3)


def test_activations_are_what_the_head_takes_its_answers_and_the_loss():
    split, model = digits(7), network(0)
    seen = last_layers(model, split)
    inputs = (split.x.float() / 255 - 0.3) / 0.4
    outputs = model(split.x)
    losses = nn.functional.cross_entropy(outputs, split.y, reduction="none")
    torch.testing.assert_close(seen, torch.cat([inputs.flatten(1), outputs, losses[:, None]], 1).detach())


def attacked(targets=4):
    members, others, public = digits(60, 1), digits(60, 2), digits(80, 3)
    sets = {"public": public, "again": digits(60, 4)}
    return members, others, public, white_box(DISTANCE, network, members, others, sets, 10, targets, "key")


def test_what_the_white_box_attacker_sees():
    """Released values are GSD itself; one column for each public set and network; one row for each example."""
    members, others, public, seen = attacked()
    assert seen.gradients.shape == (120, SKETCH + 2)
    assert seen.activations.shape == (120, 64 + 10 + 1)
    assert seen.values.shape == (120, 4)
    shown = seen.features()
    widths = {"gradients": (SKETCH + 2, SKETCH + 6), "hidden_activations": (75, 79)}
    assert {kind: tuple(shown[kind, key].shape[1] for key in ("without", "with")) for kind in widths} == widths
    assert len(shown) == 4
    labels = random_labels(stream("key", "labels", 1), 60, 10, False)  # of the second network
    engine = gsd.engine_of(network(1), DISTANCE)
    v_public = gsd.basis_of("", Split(public.x[:60], public.y), labels, DISTANCE, engine, 10)
    rows = gsd.gradients_of(engine, DISTANCE, members.x, labels)
    released = gsd.gsd(rows, gsd.gradients_of(gsd.engine_of(network(1), DISTANCE), DISTANCE, public.x[:60], labels), 4)
    both = Split(torch.cat([members.x, others.x]), torch.cat([members.y, others.y]))
    _, own = gradients(engine, both, [v_public], np.random.default_rng(0))
    torch.testing.assert_close(seen.values[:, 2], own[:, 0] - released, rtol=1e-4, atol=1e-5)


def test_whoever_knows_all_but_one_sees_the_distance_of_a_batch_with_another_in_its_place():
    members, others, public, seen = attacked()
    assert seen.replaced.shape == (4, 2, 2)
    labels = random_labels(stream("key", "labels", 0), 60, 10, False)

    def distance(x):
        sides = [gsd.gradients_of(gsd.engine_of(network(0), DISTANCE), DISTANCE, s, labels) for s in (x, public.x[:60])]
        return gsd.gsd(*sides, 4)

    assert seen.replaced[:, 0, 0] == pytest.approx(distance(members.x), abs=1e-6)
    for i in (0, 3):
        x = members.x.clone()
        x[i] = others.x[i]
        assert seen.replaced[i, 1, 0] == pytest.approx(distance(x), abs=1e-6)


def test_told_apart_where_rounded_values_differ():
    values = np.array([[[0.12341, 0.5], [0.12342, 0.5]], [[0.12341, 0.5], [0.12341, 0.6]], [[0.3, 0.4], [0.3, 0.4]]])
    assert pick_rate(values, 6) == pytest.approx((1 + 1 + 0.5) / 3)
    assert pick_rate(values, 4) == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert pick_rate(values, 0) == pytest.approx((0.5 + 1 + 0.5) / 3)  # 0.5 and 0.6 round to 0 and 1


def test_a_network_that_was_never_trained_says_nothing_of_random_images():
    """Right about half of the time, in every row of Tables 8 and 9; told apart for certain with all but one known."""
    members, others, public = digits(300, 1), digits(300, 2), digits(300, 3)
    by = distance("gsd", k=4, m=300, initialisations=1)
    seen = white_box(by, network, members, others, {"public": public}, 10, 5, "key")
    shown = seen.features() | black_box(network(0), members, others)
    assert len(shown) == 6
    for kind, rows in shown.items():
        low, high = success_rate(*classifier_scores(rows[:300], rows[300:], 150, 0))["success_interval"]
        assert low < 0.52, kind
        assert high > 0.48, kind
    assert pick_rate(seen.replaced, 6) == 1


def test_the_paper_s_figures_stand_beside_ours():
    row = {"private": "x", "model": "y", "private_examples": 2000, "trials": 1, "success": 0.5, "members": 4}
    white = [
        row | {"attack": "white_box", "gsd_values": "with", "features": "gradients", "known_members": known}
        for known in (1000, 1800, 500)
    ]
    found = beside_paper(white, "gsd_table8.csv")["paper_success_rate"]
    assert list(found)[:2] == [50.25, 50.31]
    assert math.isnan(found[2])
    black = row | {"attack": "black_box", "gsd_values": None, "features": "images", "known_members": 1800}
    assert list(beside_paper([black], "gsd_table9.csv")["paper_success_rate"]) == [52.19]
    assert len(join.paper_rows("gsd_table8.csv")) == 8


# Trained models


@pytest.fixture
def folder(tmp_path: Path, folder: Path) -> Path:
    made("tiny.npz")
    return tmp_path


def made(path, n=60):
    """Images with labels that mean nothing: whatever a network knows of them it has by heart."""
    draw = np.random.default_rng(0)
    parts = ((draw.integers(256, size=(size, 8, 8), dtype=np.uint8), np.arange(size) % 3) for size in (n, 200))
    write_npz(path, *parts)


RUN = ["run", "pair.private=tiny.npz", "pair.public=tiny.npz", "distance=none", "threads=1"]
LINEAR = [*RUN, "model=linear", "training.batch_size=60", "training.momentum=0.9", "training.learning_rate=0.2"]
BY_HEART = [*LINEAR, "algorithm=non_private", "training.epochs=300"]


def run_of(words, cli) -> tuple[Path, dict]:
    before = set(Path("results").glob("runs/*/result.json"))
    done(cli, *words)
    (path,) = set(Path("results").glob("runs/*/result.json")) - before
    return path.parent, json.loads(path.read_text())


def test_a_network_that_knows_its_examples_by_heart_is_attacked_and_a_private_one_is_not(folder, cli):
    run_of(BY_HEART, cli)
    run_of([*LINEAR, "algorithm=dp_sgd", "epsilon=0.1"], cli)
    out, _ = done(cli, "attack", "loss", "run=all", "threads=1")
    assert "tpr_at_fpr_0.01" in out
    frame = pandas.read_csv("results/tables/loss_attack.csv").set_index("algorithm")
    assert frame.loc["non_private", "auc_low"] > 0.8
    assert frame.loc["dp_sgd", "auc_low"] < 0.5 < frame.loc["dp_sgd", "auc_high"]
    assert (list(frame["members"]), list(frame["others"])) == ([60, 60], [200, 200])
    assert set(frame["label"]) == {"own"}  # of no paper
    stored = [json.loads(path.read_text()) for path in Path("results").glob("attacks/*/result.json")]
    assert {record["algorithm"]: record["auc"] for record in stored} == pytest.approx(dict(frame["auc"]))
    assert all("not differentially private" in record["privacy"] for record in stored)


def test_a_network_that_never_saw_the_examples_is_not_attacked():
    members, others = digits(300, 1), digits(300, 2)
    scores = np.concatenate([member_scores(network(0), split) for split in (members, others)])
    low, high = attack_figures(scores, np.arange(600) < 300, np.random.default_rng(0))["auc_interval"]
    assert low < 0.5 < high


FEATURES = [*RUN, "model=pixels", "pair.take=train", "pair.m=20", "epsilon=2", "training.batch_size=40"]
NETWORK = [*RUN, "model=digits_cnn"]


@pytest.mark.parametrize(
    "words",
    [
        [*NETWORK, "algorithm=gep_digits", "training=digits", "algorithm.k=20", "pair.m=50", "training.epochs=2"],
        [*NETWORK, "model.trained=[fc]", "model.once=true", "algorithm=non_private"],
        [*FEATURES, "algorithm=dp_pca", "algorithm.k=5", "training=pillar", "training.steps=3"],
        [*FEATURES, "algorithm=paragon", "epsilon=inf", "pair.private_share=0.5", "pair.validation=0.2"],
    ],
    ids=lambda words: next(word for word in words if word.startswith("algorithm=")),
)
def test_a_run_is_reopened_as_it_was_trained(folder, cli, words):
    """The loss of the reopened network is that of the one that was trained: its utility, to the last digit."""
    run, record = run_of(words, cli)
    model, task = reopened(record, run, checked("attack", "attack=loss"), torch.device("cpu"))
    assert evaluate(model, task.test, task.metric) == record["utility"]
    assert weights_digest(model) == record["weights"]
    assert len(task.private.x) == record["private_examples"]


def test_an_attack_is_kept_until_the_weights_are_others(folder, cli):
    run, _ = run_of(BY_HEART, cli)
    assert cli("attack", "loss", f"run={run.name}")[0] == 0
    record = json.loads(Path(f"results/attacks/loss-{run.name}/result.json").read_text())
    (run / "model.pt").rename(folder / "elsewhere")
    assert cli("attack", "loss", "run=tiny*")[0] == 0  # from the record
    change_record(run, {"weights": "others"})
    err = failed(cli, "attack", "loss", "run=tiny*", code=1)
    assert "model.pt: no such file" in err
    assert record["auc"] > 0.8


def test_of_several_runs_one_that_is_damaged_is_named_and_left_out(folder, cli):
    run, _ = run_of(BY_HEART, cli)
    other, _ = run_of([*BY_HEART, "seed=1"], cli)
    (run / "model.pt").unlink()
    _, err = done(cli, "attack", "loss", "run=all")
    assert f"left out: results/runs/{run.name}/model.pt" in err
    assert list(pandas.read_csv("results/tables/loss_attack.csv")["run"]) == [other.name]


def change_record(run, change):
    """Change the record of a run by merging values into it."""
    path = run / "result.json"
    path.write_text(json.dumps(OmegaConf.to_container(OmegaConf.merge(json.loads(path.read_text()), change))))


HARM = {
    "no weights": (lambda run: (run / "model.pt").unlink(), "model.pt: no such file"),
    "no record": (lambda run: (run / "result.json").unlink(), "no finished run of this name in results/runs"),
    "half a record": (lambda run: (run / "result.json").write_text("{"), "result.json is no complete record"),
    "no data": (lambda run: Path("tiny.npz").unlink(), "tiny.npz: no such file or folder"),
    "other data": (lambda run: made("tiny.npz", 50), "trained on 60 private examples, tiny.npz has 50 now"),
    "other record": (
        lambda run: change_record(run, {"weights": "0"}),
        "result.json states the guarantee of other weights: restore both from the same run",
    ),
    "other settings": (
        lambda run: change_record(run, {"settings": {"training": {"momentum": 0.5}}}),
        "made by a version of pubsel with other settings",
    ),
}


@pytest.mark.parametrize(("harm", "says"), HARM.values(), ids=HARM)
def test_what_a_run_lacks_is_said_in_one_line(folder, cli, harm, says):
    run, _ = run_of(BY_HEART, cli)
    harm(run)
    code, _, err = cli("attack", "loss", f"run={run.name}")
    (line,) = [line for line in err.splitlines() if not line.startswith("warning")]
    assert code == 1
    assert says in line


GSD = ["private=digits", "public=[noise]", "model=digits_cnn", "distance.m=40", "known=[20]", "trials=1", "threads=1"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["loss"], 2, "run=NAME"),
        (["loss", "run=../x"], 2, "without a path"),
        (["loss", "run=nothing"], 1, "no finished run of this name"),
        (["gsd"], 2, "gsd_white_box"),
        (["gsd_white_box", *GSD, "known=[40]"], 2, "below distance.m=40"),
        (["gsd_white_box", *GSD, "targets=41"], 2, "targets=41"),
        (["gsd_white_box", *GSD, "distance.m=1000"], 2, "has 1297 training images"),
        (["gsd_white_box", *GSD, "distance.labels=given"], 2, "distance.labels=random"),
        (["gsd_black_box", *GSD, "public=[]", "private=./none"], 1, "no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_in_one_line(folder, cli, words, code, says):
    result, _, err = cli("attack", *words)
    assert (result, err.count("\n")) == (code, 1)
    assert says in err


def test_attacks_on_gsd_from_the_command_line(folder, cli):
    words = [*GSD, "distance.k=4", "targets=2", "distance.initialisations=2"]
    first, _ = done(cli, "attack", "gsd_white_box", *words)
    assert "known_but_one" in first
    assert not Path("results/tables").exists()
    assert cli("table", "gsd_table8")[0] == 0
    frame = pandas.read_csv("results/tables/gsd_table8.csv")
    assert list(frame["attack"]) == ["white_box"] * 4 + ["known_but_one"] * 4
    assert list(frame["asked"]) == [40] * 4 + [2] * 4
    code, again, err = cli("attack", "gsd_white_box", *words)
    assert (code, again) == (0, first)
    assert "attacked before" in err
    out, _ = done(cli, "attack", "gsd_black_box", *words)
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["images", "outputs"]


TABLE = ["gsd_table9.csv", "gsd_table9.md", "gsd_table9.tex"]


def test_a_table_of_attacks_is_written_from_records(folder, cli):
    assert cli("attack", "gsd_black_box", *GSD)[0] == 0
    assert cli("table", "gsd_table9")[0] == 0
    tables, kept = Path("results/tables"), Path("results/records/attacks")
    wrote = {path.name: path.read_bytes() for path in tables.iterdir()}
    assert sorted(wrote) == TABLE
    (attacked,) = Path("results/attacks").glob("*/result.json")

    def again(words) -> str:
        for path in tables.iterdir():
            path.unlink()
        out, _ = done(cli, "table", words)
        return out

    for table in ("gsd_table9", "all"):
        said = again(table)
        assert ("gsd_table8" in said) == (table == "all")  # which has no record
        assert {name: (tables / name).read_bytes() for name in TABLE} == wrote

    # a record that is kept with the code, until there is one of this machine
    record = json.loads(attacked.read_text())
    kept.mkdir(parents=True)
    for row in record["rows"]:
        row["success"] = 0.125
    (kept / f"{record['identity']}.json").write_text(json.dumps(record))
    again("gsd_table9")
    assert {name: (tables / name).read_bytes() for name in TABLE} == wrote
    attacked.unlink()
    again("gsd_table9")
    assert list(pandas.read_csv(tables / "gsd_table9.csv")["success_rate"]) == [12.5, 12.5]
    assert "| 12.50 " in (tables / "gsd_table9.md").read_text()


def test_a_table_of_attacks_without_a_record_says_so(folder, cli):
    code, out, _ = cli("table", "gsd_table9")
    (line,) = (line for line in out.splitlines() if "No record" in line)
    assert code == 0
    assert line == "No record of this table in results/attacks yet: the figures are the paper's alone."
    assert list(pandas.read_csv("results/tables/gsd_table9.csv")["paper_success_rate"]) == [51.65, 52.19]
    out, _ = done(cli, "table", "all")
    assert out.splitlines()[-1].endswith(", gsd_table8, gsd_table9")
    err = failed(cli, "table", "gsd_table99")
    assert "gsd_table8, gsd_table9" in err


@pytest.mark.data
def test_the_distances_of_fashion_mnist_with_all_but_one_example_known():
    source = open_dataset("fashion_mnist", os.environ["PUBSEL_DATA"], False)
    mnist = open_dataset("mnist", os.environ["PUBSEL_DATA"], False).test

    def make(seed):
        model = Model("fmnist_cnn", None, False, None, Norm.replace, None)
        return build(model, (1, 28, 28), 10, source.mean, source.std, seed=seed)

    members, others = (Split(source.train.x[part], source.train.y[part]) for part in (slice(500), slice(500, 1000)))
    seen = white_box(distance("gsd", m=500, initialisations=1), make, members, others, {"mnist": mnist}, 10, 5, "key")
    assert pick_rate(seen.replaced, 6) == 1
    rows = seen.features()["gradients", "with"]
    assert success_rate(*classifier_scores(rows[:500], rows[500:], 300, 0))["success"] < 0.6
