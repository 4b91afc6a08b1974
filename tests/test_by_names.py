"""Public examples that the names of the classes label: made-up embeddings around those of the names, since no weights
of CLIP can be had here."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pubsel.algorithms import Facts, View
from pubsel.algorithms.dp_sgd import NOISE
from pubsel.cell import derived
from pubsel.data import Split, Task
from pubsel.gradients.factored import LinearGradients, OffsetLinear
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant
from pubsel.rules import Budget
from tests.made import build, done, failed, only_record, secret

D, C = 32, 6
NAMES = ("ant", "bee", "cat", "dog", "elk", "fox")
TEXT = torch.nn.functional.normalize(torch.from_numpy(np.random.RandomState(0).randn(C, D)).float(), dim=1)
WORDS = """model=rows distance=none download=false threads=1 epsilon=0.1 privacy.delta=1e-3 algorithm=whitened_head
    pair.private=mine.npz pair.public=public.npz pair.m=null""".split()
BY_NAMES = "algorithm.public_labels=names"


def embeddings(n, seed):
    """Embeddings around those of the names, of any length, and their classes: of 100, some 85 are nearest to theirs."""
    draw = np.random.RandomState(seed)
    y = draw.randint(C, size=n)
    x = TEXT.numpy()[y] + 0.6 * TEXT.numpy()[0] + 0.22 * draw.randn(n, D)
    return (x * draw.uniform(5, 20, (n, 1))).astype(np.float32), y


def nearest(x):
    return (torch.nn.functional.normalize(torch.as_tensor(x), dim=1) @ TEXT.T).argmax(1)


@pytest.fixture
def clip(monkeypatch):
    """The text encoder; returns what it was asked for."""
    asked = []

    def text_weights(class_names, model, pretrained, scale):
        asked.append((tuple(class_names), model, pretrained))
        return scale * TEXT[[NAMES.index(name.removeprefix("a photo of a ")) for name in class_names]]

    monkeypatch.setattr("pubsel.models.class_names.text_weights", text_weights)
    return asked


@pytest.fixture
def sets(folder, clip):
    """Private embeddings of named classes, and public ones whose classes mean nothing here."""
    words = np.array(NAMES)
    parts = [embeddings(n, seed) for seed, n in enumerate((150, 600, 400, 60))]
    np.savez("mine.npz", X=parts[0][0], y=words[parts[0][1]], x_test=parts[1][0], y_test=words[parts[1][1]])
    np.savez("public.npz", X=parts[2][0], y=np.arange(400) % 2, x_test=parts[3][0], y_test=np.arange(60) % 2)
    return clip


def task_of(private=None, **more):
    x, y = embeddings(100, 1) if private is None else private
    public = torch.from_numpy(embeddings(80, 2)[0])
    split = Split(torch.from_numpy(x), torch.from_numpy(y))
    facts = {"same_classes": False, "shape": (3, 9, 9), "names": NAMES}
    return Task(split, Split(public, torch.full((80,), -1)), split, C, "accuracy", (), (), (), **(facts | more))


def labelled_by_names(task, **settings):
    return derived(build("whitened_head", public_labels="names", **settings), Budget(1.0, 1e-5), task)


def test_public_examples_get_the_class_of_the_nearest_name(clip):
    task = task_of()
    algorithm = labelled_by_names(task)
    want = nearest(task.public.x)
    assert torch.equal(algorithm.named_classes, want)
    assert (algorithm.offsets, algorithm.values(30)["public_labels"], algorithm.deviation) == (C, True, NOISE)
    assert clip == [(NAMES, "RN50", "openai")]
    frozen = algorithm.frozen(task.public, D, secret)
    labelled = build("whitened_head", public_labels="given").derived(algorithm.facts)
    torch.testing.assert_close(frozen.weight, labelled.frozen(Split(task.public.x, want), D, secret).weight)

    # features of earlier layers come last, and are no part of the embedding
    def stages(split):
        return Split(torch.cat([split.x, 100 * torch.randn(len(split.x), 5)], 1), split.y)

    assert torch.equal(labelled_by_names(task.each(stages)._replace(stages=5)).named_classes, want)

    # other words for the same classes; names of folders are words
    names, clip[:] = [f"a photo of a {name}" for name in NAMES], []
    assert torch.equal(labelled_by_names(task, class_names=names, text_model="A", text_weights="b").named_classes, want)
    labelled_by_names(task._replace(names=tuple(name.replace(" ", "_") for name in names)))
    assert clip == [(tuple(names), "A", "b"), (tuple(names), "RN50", "openai")]


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({}, {"names": ()}, r"^classes of the private data have no names: give algorithm\.class_names=\[A,B,"),
        ({}, {"names": NAMES[:5]}, r"class_names: 5 names, embeddings of 32 dimensions; the task has 6 classes and 32"),
        (
            {},
            {"stages": 2},
            "class_names: 6 names, embeddings of 32 dimensions; the task has 6 classes and 30 features",
        ),
        ({"class_names": ["ant"]}, {}, "class_names: 1 names"),
    ],
)
def test_names_that_do_not_fit_are_refused(settings, changes, says, clip):
    with pytest.raises(UsageError, match=says):
        labelled_by_names(task_of(**changes), **settings)


def test_examples_with_several_labels_are_refused(clip):
    x, y = embeddings(100, 1)
    with pytest.raises(UsageError, match="gives an example one class, and private ones have several labels"):
        labelled_by_names(task_of((x, np.eye(C, dtype=np.float32)[y])))


def test_without_names_the_keys_of_the_text_encoder_are_refused():
    for key, value in (("class_names", ["ant"]), ("text_model", "A"), ("text_weights", None)):
        with pytest.raises(UsageError, match=rf"algorithm\.{key}: is for algorithm\.public_labels=names"):
            build("whitened_head", **{key: value})


def test_weights_that_are_not_here_are_one_line_before_anything_is_drawn(sets, cli, monkeypatch):
    def absent(*_):
        raise UserError("algorithm.text_weights=openai: no weights here")

    monkeypatch.setattr("pubsel.models.class_names.text_weights", absent)
    candidates = ["pair.public=auto", "pair.candidates=[public.npz]", "epsilon_select=1"]
    assert "text_weights=openai" in failed(cli, "run", *WORDS, BY_NAMES, *candidates, code=1)
    assert not list(Path("results").glob("runs/*/selection.pt"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["pair.public=null"],
            "algorithm.public_labels=names: it is public examples that get labels: give pair.public",
        ),
        (
            ["model=scattering"],
            "algorithm.public_labels=names: compares features of CLIP with names: take model=clip_r",
        ),
    ],
)
def test_settings_with_which_names_label_nothing_are_refused(words, says, sets, cli):
    assert says in failed(cli, "run", *WORDS, BY_NAMES, *words)


def test_adamix_starts_from_the_same_weights(clip):
    algorithm = build("adamix_clip", pretrain_epochs=0).derived(Facts(names=NAMES))
    from_zero = build("adamix_clip", pretrain_epochs=0, text_model=None)
    for classes, features in ((C, D), (C, D + 1), (C - 1, D)):
        model = torch.nn.Linear(features, classes, bias=False).requires_grad_(False)
        view = View(model, LinearGradients(model), None, classes, False, secret)
        if (classes, features) == (C, D):
            algorithm.pretrain(view)
            torch.testing.assert_close(model.weight, 100 * TEXT)
            from_zero.pretrain(view)
            torch.testing.assert_close(model.weight, 100 * TEXT)
            other = build("adamix_clip", pretrain_epochs=0, class_names=list(NAMES[::-1]))
            other.derived(algorithm.facts).pretrain(view)
            torch.testing.assert_close(model.weight, 100 * TEXT.flip(0))
        else:
            with pytest.raises(UsageError, match="6 names, embeddings of 32 dimensions; the task has"):
                algorithm.pretrain(view)


@pytest.mark.attack
def test_the_start_is_the_same_whatever_the_private_examples_are(clip):
    """And one of them moves the sum of a step by at most 1."""
    torch.manual_seed(0)
    x, y = embeddings(100, 3)
    maps, others = [], (-1e3 * x, (y + 1) % C)
    for private in ((x, y), others):
        task = task_of(private)
        algorithm = labelled_by_names(task)
        maps.append(algorithm.frozen(task.public, D, secret))
    for name, tensor in maps[0].state_dict().items():
        assert torch.equal(tensor, maps[1].state_dict()[name])

    rows, labels, width = torch.from_numpy(x), torch.from_numpy(y), algorithm.width(D) - C
    for scale in (0.0, 1e3):
        model = OffsetLinear(width, C)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=scale)
        gradients = LinearGradients(model)
        view = View(model, gradients, task.public, C, False, secret, 100, steps=30)
        mechanism = algorithm.mechanism(view, 0)
        assert mechanism.sensitivity == algorithm.sensitivity() == 1.0
        without = mechanism.clipped_sum(gradients.matrix(maps[0](rows), labels))
        for row in torch.cat([rows[:3] * size for size in (1e-30, 1e3, 3e38, math.nan)]).split(1):
            every = gradients.matrix(maps[0](torch.cat([rows, row])), torch.cat([labels, labels[:1]]))
            assert float((mechanism.clipped_sum(every) - without).norm()) <= 1 + accountant.ROUNDING


def test_classes_that_count_alike_have_the_shares_of_the_names(clip):
    """The logarithms of the shares of the labels, not of those that public data has, leave the biases."""
    public = torch.from_numpy(embeddings(80, 2)[0])
    facts = Facts(n=100, d=D, m=80, classes=C, public=public, balanced=True, names=NAMES)
    algorithm = build("whitened_head", public_labels="names").derived(facts)
    model = torch.nn.Linear(4, C)
    torch.nn.init.zeros_(model.bias)
    algorithm.finish(View(model, LinearGradients(model), Split(public, torch.zeros(80)), C, False, secret))
    assert algorithm.counts == 0
    shares = nearest(public).bincount(minlength=C) + 1.0
    torch.testing.assert_close(model.bias.detach(), -(shares / shares.sum()).log())


def test_a_small_budget_starts_from_what_the_names_know(sets, cli):
    def reached(*words):
        done(cli, "run", *WORDS, *words, f"results={len(words)}-{words[0]}")
        return only_record(f"{len(words)}-{words[0]}")

    x, y = embeddings(600, 1)
    teacher = float((nearest(x).numpy() == y).mean())
    assert 0.6 < teacher < 0.95
    without, names = reached("seed=0"), reached(BY_NAMES)
    assert names["utility"] > without["utility"] + 0.3
    assert names["privacy"]["epsilon"] == without["privacy"]["epsilon"] == pytest.approx(0.1)
    assert names["derived"]["public_labels"] is not without["derived"]["public_labels"]

    # the start alone reads no private example
    start = reached(BY_NAMES, "algorithm=whitened_head_start")
    assert start["utility"] > teacher - 0.08
    assert start["privacy"]["epsilon"] == 0
    assert start["settings"]["algorithm"]["public_labels"] == "names"


def test_a_fit_says_that_it_starts_from_the_names(sets, cli):
    words = "fit mine.npz public=[public.npz] epsilon=4 delta=1e-3 public_labels=names download=false threads=1".split()
    plan = done(cli, *words, "dry=true")[0]
    says = (
        "public labels: by CLIP, from the names of your classes, which costs no privacy: ant, bee, cat, dog, elk, fox"
    )
    assert says in plan
    assert "public data, chosen privately: public.npz" in done(cli, *words)[0]
    record = only_record()
    assert (record["derived"]["public_labels"], record["settings"]["algorithm"]["public_labels"]) == (True, "names")
    card = Path("release/README.md").read_text()
    assert "It starts from the names of the classes, by which the text encoder of CLIP labelled the public data" in card
    assert "What the initial weights were trained on: pubsel treats weights that it is given as public" in card
    assert failed(cli, *words[:2], *words[3:]).endswith(
        "public_labels=names: it is public examples that get labels: give public=NAME\n"
    )
