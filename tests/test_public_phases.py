"""DP mirror descent, DOPE-SGD and second-phase pre-training: what public data does, written out."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pubsel.algorithms import View
from pubsel.algorithms.dp_md import alpha
from pubsel.algorithms.dp_sgd import DPSGD
from pubsel.algorithms.second_phase import SecondPhase, by_views
from pubsel.cell import Cell
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.data.augment import augmented
from pubsel.data.splits import NO_CLASS
from pubsel.gradients.factored import FactoredGradients, LinearGradients
from pubsel.gradients.matrix import DenseGradients, PerExampleGradients
from pubsel.messages import UsageError, UserError
from pubsel.models.trained import head
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import schedule
from pubsel.records import read_records
from pubsel.release.run import check_sides, other_utilities
from pubsel.rules import canonical
from pubsel.settings.keys import Augment, Labels, Training
from pubsel.training.loop import Job, fit
from tests.made import build, checked, hurtful, interrupted, secret, write_npz
from tests.synthetic import secret_named


def patterns(n, classes, seed=0):
    """Images 1 x 6 x 6 that differ in where they are bright, in noise."""
    draw = np.random.RandomState(seed)
    y = draw.randint(classes, size=n)
    x = draw.randint(0, 100, (n, 1, 6, 6))
    x[np.arange(n), 0, y] += 120
    return Split(torch.from_numpy(x.astype(np.float32) / 100), torch.from_numpy(y))


def view(public, classes=3, steps=10, same_task=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, classes)).eval()
    gradients = PerExampleGradients(model, 16)
    return View(model, gradients, public, classes, False, secret, steps=steps, same_task=same_task)


def gradient_of(v):
    v.model.zero_grad()
    nn.functional.cross_entropy(v.model(v.public.x), v.public.y).backward()
    return torch.cat([p.grad.flatten() for p in v.model.parameters()])


# DP mirror descent


def test_alpha_falls_from_one_along_a_cosine_and_is_never_negative():
    values = [alpha(t, 100, 2.0, 0.5) for t in range(100)]
    assert values[0] == 1
    assert values[50] == pytest.approx(math.cos(math.pi / 4))
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 0.02
    assert alpha(50, 100, 5.0, 0.5) == pytest.approx(math.cos(math.pi / 10))
    assert {alpha(t, 100, None, 0.3) for t in range(100)} == {0.3}
    with pytest.raises(UsageError, match=r"algorithm\.cycle"):
        build("dp_md", cycle=1.5)


def test_the_direction_is_noisy_private_and_public_gradient_mixed():
    v = view(patterns(20, 3))
    algorithm = build("dp_md", clip_norm=0.5, public_batch=20, cycle=2)
    mech = algorithm.mechanism(v, 4)
    of_public = gradient_of(v)
    noisy = torch.randn(v.gradients.size)
    a = math.cos(math.pi * 4 / 20)
    torch.testing.assert_close(mech.decode(noisy), a * 0.5 * noisy + (1 - a) * of_public)
    rows = DenseGradients(torch.randn(5, v.gradients.size))
    exact = DPSGD("dp_sgd", 0.5).mechanism(v, 4).clipped_sum(rows)
    assert torch.equal(mech.clipped_sum(rows), exact)
    assert mech.sensitivity == 1


def test_fresh_public_batches_differ_and_fixed_ones_do_not():
    def shifts(fresh):
        algorithm = build("dp_md", public_batch=5, cycle=None, alpha=0.5, fresh=fresh)
        v = view(patterns(40, 3))
        return [algorithm.mechanism(v, t).decode(torch.zeros(v.gradients.size)) for t in range(2)]

    assert not torch.equal(*shifts(True))
    assert torch.equal(*shifts(False))


def test_labels_are_given_where_they_are_of_the_private_task_alone():
    public = patterns(30, 3)
    assert torch.equal(view(public).labels(Labels.auto, 0, "x"), public.y)
    other = view(public, same_task=False).labels(Labels.auto, 0, "x")
    assert not torch.equal(other, public.y)
    assert torch.equal(other, view(public, same_task=False).labels(Labels.random, 0, "x"))
    assert set(other.tolist()) == {0, 1, 2}
    with pytest.raises(UsageError, match="public labels"):
        view(patterns(30, 6)).labels(Labels.given, 0, "x")


def test_labels_of_a_known_set_of_other_classes_are_no_labels_of_the_task():
    """Fewer classes than the private task has would pass for its own."""
    task = view(patterns(30, 2))
    assert task.labelled("x").y.max() == 1
    with pytest.raises(UsageError, match="public labels"):
        task._replace(same_classes=False).labelled("x")


# DOPE-SGD


def test_differences_from_the_public_gradient_are_clipped_and_it_is_added_once():
    """Algorithm 2, Lines 7 to 11, with a clip norm that some differences reach; rows of zeros add nothing."""
    v = view(patterns(20, 3))
    mech, origin = build("dope_sgd", clip_norm=0.5, public_batch=20).mechanism(v, 4), gradient_of(v)
    away = torch.randn(300, v.gradients.size) * torch.logspace(-3, 1, 300)[:, None]
    rows = torch.cat([origin + away, torch.zeros(2, v.gradients.size)])
    want = (away * (0.5 / away.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    total = mech.clipped_sum(DenseGradients(rows))
    torch.testing.assert_close(total, want.double() / 0.5, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mech.decode(total / 100), want.double() / 100 + origin, rtol=1e-4, atol=1e-5)
    again = mech.clipped_sum(DenseGradients(rows), total.clone())
    torch.testing.assert_close(again, 2 * total)


def test_without_clipping_and_noise_the_direction_is_unbiased():
    """Over Poisson samples of 5 of 20 examples, whatever the public gradient is."""
    v = view(patterns(20, 3))
    mech = build("dope_sgd", clip_norm=1e4).mechanism(v, 0)
    rows = torch.randn(20, v.gradients.size)
    samples = torch.rand(1500, 20) < 0.25
    mean = sum(mech.decode(mech.clipped_sum(DenseGradients(rows[sample])) / 5) for sample in samples) / len(samples)
    assert (mean - rows.mean(0)).norm() < 0.1 * rows.mean(0).norm()


@pytest.mark.attack
@pytest.mark.parametrize("length", [1.0, 1e4, 1e8])
def test_a_row_near_a_long_public_gradient_adds_at_most_one(length, monkeypatch):
    """|g|^2 - 2 g.o + |o|^2 has no digit of the difference then."""
    origin = length * nn.functional.normalize(torch.randn(1, 4 * 13), dim=1)[0]
    monkeypatch.setattr("pubsel.algorithms.dope_sgd.mean_public_gradient", lambda *_: origin)
    v = view(patterns(20, 3))
    mech = build("dope_sgd", clip_norm=1e-3).mechanism(v, 0)
    for step in torch.logspace(-8, 1, 40):
        row = DenseGradients(origin[None] + length * step * torch.randn(1, len(origin)))
        assert mech.clipped_sum(row).norm() <= 1


def test_rows_of_a_linear_classifier_are_those_written_out(monkeypatch):
    r, x = torch.randn(600, 3), torch.randn(600, 12)
    factored = FactoredGradients(r, x, bias=True)
    origin = torch.randn(3 * 13)
    monkeypatch.setattr("pubsel.algorithms.dope_sgd.mean_public_gradient", lambda *_: origin)
    mech = build("dope_sgd", clip_norm=3).mechanism(view(patterns(20, 3)), 0)
    dense = DenseGradients(factored.written_out())
    assert torch.equal(mech.clipped_sum(factored), mech.clipped_sum(dense))
    assert torch.equal(mech.contributions(factored), mech.contributions(dense))


def test_dope_sgd_needs_labels_of_the_task():
    with pytest.raises(UsageError, match="algorithm=dope_sgd needs public labels of the private task"):
        build("dope_sgd").mechanism(view(patterns(20, 3))._replace(same_classes=False), 0)
    with pytest.raises(UsageError, match="algorithm=dope_sgd needs public data"):
        build("dope_sgd").mechanism(view(None), 0)


# Second phase


def accuracy(model, split):
    return float((model(split.x).argmax(1) == split.y).float().mean())


def test_public_data_of_the_private_task_train_the_whole_network():
    v = view(patterns(200, 3))
    before = accuracy(v.model, patterns(100, 3, seed=1))
    build("second_phase", public_rate=0.01, public_epochs=20).pretrain(v)
    assert accuracy(v.model, patterns(100, 3, seed=1)) > max(0.9, before + 0.3)
    assert all(p.grad is None for p in v.model.parameters())


def test_a_temporary_head_learns_the_public_classes_and_is_thrown_away():
    """The head of the private task stays as it was; what lies below learns: a new linear head separates better."""
    v = view(patterns(300, 5), same_task=False)
    own = v.model[3]
    kept, below = own.weight.clone(), v.model[1].weight.clone()
    build("second_phase", public_rate=0.01, public_epochs=20).pretrain(v)
    assert v.model[3] is own
    assert torch.equal(own.weight, kept)
    assert not torch.equal(v.model[1].weight, below)
    assert head(v.model) == "3"
    again = view(patterns(300, 5), same_task=False)
    build("second_phase", public_rate=0.01, public_epochs=20).pretrain(again)
    assert torch.equal(again.model[1].weight, v.model[1].weight)  # drawn alike in every run


@pytest.mark.parametrize("stopped_at", [0, 3])
def test_a_run_that_goes_on_does_not_repeat_the_public_phase(tmp_path, monkeypatch, stopped_at):
    """Stopped before its first private step, or later: it ends as if it had not been, without a second public phase."""
    training = Training(3, None, 20, 0.1, 0.9, 0.0, [], 1.0, None, 0)
    task = Task(patterns(60, 3, seed=2), patterns(40, 3), patterns(9, 3), 3, "accuracy", (), (), (), None, True)
    starts = []

    class Watched(SecondPhase):
        def mechanism(self, view, step):
            starts.append(view.start)
            return interrupted() if step == halt else super().mechanism(view, step)

    algorithm = Watched(**vars(build("second_phase", public_rate=0.01, public_epochs=2)))

    def train(name):
        model = view(None).model
        (tmp_path / name).mkdir(exist_ok=True)
        job = Job(algorithm, schedule(60, training), 1.0, training, "name", tmp_path / name / "checkpoint.pt")
        fit(model, task, job, secret_named())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    halt = None
    want = train("whole")
    halt = stopped_at
    with pytest.raises(KeyboardInterrupt):
        train("parts")
    halt = None
    monkeypatch.setattr(SecondPhase, "pretrain", lambda *_: pytest.fail("the public phase is repeated"))
    assert torch.equal(train("parts"), want)
    assert all(torch.equal(start, starts[0]) for start in starts)


def test_frozen_parameters_stay_frozen():
    v = view(patterns(100, 3))
    v.model[1].requires_grad_(False)
    before = v.model[1].weight.clone()
    build("second_phase", public_rate=0.01).pretrain(v)
    assert torch.equal(v.model[1].weight, before)


@pytest.mark.parametrize(
    ("changes", "public", "error", "says"),
    [
        ({}, None, UsageError, "needs public data"),
        ({"head": "own"}, patterns(20, 6), UsageError, "public labels"),
        (
            {"head": "temporary"},
            Split(torch.randn(20, 36), torch.zeros(20, dtype=torch.int64)),
            UsageError,
            "views of images",
        ),
        ({"public_rate": 3e37, "public_epochs": 30}, patterns(20, 3), UserError, "public_rate"),
    ],
)
def test_public_data_that_cannot_serve_is_named(changes, public, error, says):
    with pytest.raises(error, match=says):
        build("second_phase", **changes).pretrain(view(public))


def test_after_it_comes_dp_sgd():
    v = view(patterns(20, 3))
    mech, plain = build("second_phase", clip_norm=0.1).mechanism(v, 0), DPSGD("x", 0.1).mechanism(v, 0)
    rows = DenseGradients(torch.randn(5, v.gradients.size))
    assert torch.equal(mech.clipped_sum(rows), plain.clipped_sum(rows))
    assert torch.equal(mech.decode(rows.rows[0]), plain.decode(rows.rows[0]))


# DP-RandP


def test_alignment_and_uniformity_written_out():
    """Wang and Isola, Section 4.2, with t = 2, of the two views that the seed draws; mirrored images align at once."""
    x, model = torch.rand(7, 1, 6, 6), nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    found = by_views(model, Split(x, torch.zeros(7)), stream("a", "views"))
    source = stream("a", "views")
    u, v = (nn.functional.normalize(model(augmented(x, list(Augment), source)), dim=1) for _ in range(2))
    pairs = [(i, j) for i in range(7) for j in range(i)]
    spread = [
        np.log(np.mean([math.exp(-2 * float((z[i] - z[j]).detach().square().sum())) for i, j in pairs])) for z in (u, v)
    ]
    want = float((u - v).detach().square().sum(1).mean()) + np.mean(spread)
    assert found.item() == pytest.approx(want, rel=1e-5)
    alone = by_views(model, Split(x[:1], torch.zeros(1)), stream("a", "views"))
    assert 0 <= alone.item() <= 4
    assert by_views(model, Split(torch.ones(2, 1, 6, 6), torch.zeros(2)), source).abs() < 1e-6
    found.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("label", [0, NO_CLASS])
def test_images_without_labels_train_what_is_below_the_head_by_their_views(label):
    """Also those of several sets whose classes differ; and a last batch of one image."""
    v = view(patterns(65, 3), same_task=False)
    v = v._replace(public=Split(v.public.x, torch.full((65,), label)))
    net = v.model
    head_before, below = net[3].weight.clone(), nn.Sequential(*net[:3])

    def loss():
        torch.manual_seed(1)
        with torch.no_grad():
            return float(by_views(below, v.public, stream("b", "views")))

    before = loss()
    build("second_phase", public_rate=0.01, public_epochs=20).pretrain(v)
    assert loss() < before - 0.3
    assert torch.equal(net[3].weight, head_before)


@pytest.mark.attack
def test_the_first_steps_train_the_head_alone():
    v = view(patterns(20, 3))
    mechs = [build("second_phase", clip_norm=0.1, head_share=0.4).mechanism(v, step) for step in range(5)]
    of_head = torch.zeros(v.gradients.size)
    of_head[v.gradients.offsets["3.weight"]] = of_head[v.gradients.offsets["3.bias"]] = 1
    rows, plain = hurtful(v.gradients.size), DPSGD("x", 0.1).mechanism(v, 0)
    some = torch.randn(30, v.gradients.size)
    for step, mech in enumerate(mechs):
        assert mech.sensitivity == 1
        assert max(mech.clipped_sum(DenseGradients(row.clone())).norm() for row in rows.split(1)) <= 1
        mask = of_head if step < 4 else torch.ones_like(of_head)
        want = plain.clipped_sum(DenseGradients(some * mask))
        torch.testing.assert_close(mech.clipped_sum(DenseGradients(some.clone())), want)
        noisy = torch.randn(v.gradients.size)
        torch.testing.assert_close(mech.decode(noisy), 0.1 * noisy * mask)

    # a linear classifier is its own head
    linear = nn.Linear(36, 3)
    whole = build("second_phase", head_share=1).mechanism(
        v._replace(model=linear, gradients=LinearGradients(linear)), 0
    )
    assert whole.decode(torch.ones(3 * 37)).all()
    gradients = PerExampleGradients(v.model, 16, names=["1.weight"])
    with pytest.raises(UsageError, match="the head does not train"):
        build("second_phase", head_share=1).mechanism(v._replace(gradients=gradients), 0)
    with pytest.raises(UsageError, match="the head does not train"):
        build("second_phase", head_share=1).check(v._replace(gradients=gradients))


# From the command line


@pytest.fixture
def few_leaves(folder, monkeypatch):
    """Fifty images of dead leaves, and a private set of three classes."""
    monkeypatch.setattr("pubsel.data.processes.TRAIN", 30)
    monkeypatch.setattr("pubsel.data.processes.TEST", 20)
    parts = patterns(150, 3), patterns(80, 3, seed=1)
    write_npz("own.npz", *(((split.x[:, 0] * 100).byte().numpy(), split.y.numpy()) for split in parts))
    return ["pair.private=own.npz", "pair.public=dead_leaves", "threads=1", "data_root=."]


TINY = ["run", "model=linear", "distance=none", "training.steps=3", "training.batch_size=150", "epsilon=2"]
ON_FEATURES = [*TINY, "model=scattering", "pair.m=30", "training=pillar"]


@pytest.mark.parametrize(
    "words",
    [
        [*TINY, "algorithm=gep", "algorithm.k=10", "pair.m=40"],
        [*TINY, "algorithm=dp_md", "pair.m=20"],
        [*TINY, "algorithm=second_phase", "pair.m=40"],
        [*TINY, "algorithm=dp_randp", "algorithm.public_epochs=2", "pair.m=40", "model=digits_cnn"],
        [*ON_FEATURES, "algorithm=pillar", "algorithm.k=5"],
        [*ON_FEATURES, "algorithm=whitened_head"],
    ],
)
def test_a_random_process_is_public_data(words, few_leaves, capsys):
    assert main([*words, *few_leaves]) == 0, capsys.readouterr().err
    (record,) = read_records(Path("results"))
    assert record["public"] == "dead_leaves"
    assert record["public_labels"] == "of another set"
    assert record["privacy"]["valid"]
    assert record["utility"] >= 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*TINY, "algorithm=dope_sgd", "pair.m=40"], "algorithm=dope_sgd needs public labels of the private task"),
        ([*ON_FEATURES, "algorithm=adamix", "algorithm.rank=null"], "algorithm=adamix needs public labels"),
        (
            [*TINY, "algorithm=second_phase", "algorithm.head=own", "pair.m=40"],
            "needs public labels of the private task",
        ),
        ([*ON_FEATURES, "algorithm=second_phase"], "trained on by views of images"),
    ],
)
def test_what_needs_labels_refuses_a_random_process(words, says, few_leaves, capsys):
    assert main([*words, *few_leaves]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not list(Path("results").glob("ledger/*.jsonl"))


@pytest.mark.parametrize("distance", ["gsd", "mmd", "frechet", "otdd", "task2vec"])
def test_distances_to_a_random_process(distance, few_leaves, capsys):
    words = ["rank", "private=own.npz", "public=[dead_leaves]", "model=linear", f"distance={distance}"]
    words += ["distance.m=40", "distance.initialisations=1", "threads=1", "data_root=."]
    code = main([*words, *(["distance.k=4"] if distance == "gsd" else [])])
    said = capsys.readouterr()
    if distance in ("otdd", "task2vec"):
        assert code == 2
        assert f"distance={distance} needs labels, and dead_leaves has none" in said.err.splitlines()[-1]
    else:
        assert code == 0, said.err
        assert "dead_leaves" in said.out


@pytest.mark.parametrize("name", ["dp_md", "second_phase"])
@pytest.mark.parametrize("public", ["own", "other"])
def test_a_run_records_whose_labels_the_public_ones_are(name, public, folder, capsys):
    for file, classes in (("own.npz", 3), ("other.npz", 4)):
        parts = patterns(150, classes), patterns(80, classes, seed=1)
        write_npz(file, *(((split.x[:, 0] * 100).byte().numpy(), split.y.numpy()) for split in parts))
    words = ["model=linear", f"algorithm={name}", "pair.private=own.npz", "pair.m=20", "threads=1"]
    words += [f"pair.public={public}.npz", "training.batch_size=150", "training.epochs=3", "epsilon=2", "distance=none"]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    (record,) = read_records(Path("results"))
    assert record["public_labels"] == f"of {'the private' if public == 'own' else 'another'} set"
    assert record["privacy"]["valid"]


def test_settings_are_selected_by_public_labels_of_the_task_alone():
    """Fewer classes than the private task has would pass for its own."""
    model = view(None).model
    task = Task(patterns(20, 3), patterns(20, 2), patterns(20, 3), 3, "accuracy", (0.5,), (0.5,), ())
    assert set(other_utilities(model, task)) == {"public"}
    assert other_utilities(model, task._replace(same_classes=False)) == {}


def test_no_held_out_example_ends_a_run_that_measures_with_noise():
    """Its output may not be finite, or its class may be the only other one: that it ends a run, no noise would hide."""
    model = view(None).model
    held = patterns(20, 3)
    held.x[0] = math.inf
    task = Task(patterns(20, 3), None, patterns(20, 3), 3, "balanced_accuracy", (0.5,), (0.5,), (), held)
    assert other_utilities(model, task) == {}
    one = task._replace(validation=patterns(20, 1))
    assert other_utilities(model, one) == {}

    cell = Cell.of(canonical(checked("run", "pair.validation=0.2", "privacy.measure=true", "epsilon=1")))
    check_sides(cell, one)
    with pytest.raises(UserError, match=r"pair.validation=0.2 has one"):
        check_sides(cell._replace(budget=cell.budget._replace(measure=False)), one)
