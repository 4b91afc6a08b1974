"""Views of images in training: the mean of their gradients as one row, what they follow from, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pubsel import algorithms
from pubsel.algorithms import View
from pubsel.algorithms.dp_sgd import DPSGD
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.data.augment import NUMBERS, Views, placed
from pubsel.gradients.people import PeopleGradients
from pubsel.privacy import accountant
from pubsel.privacy.randomness import KEY, by_place, stream
from pubsel.privacy.sampling import poisson_sample, schedule
from pubsel.rules import canonical
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import Augment
from pubsel.settings.methods import option
from pubsel.training import loop
from pubsel.training.loop import Job, clipped_sum, fit
from tests.made import Scaled, checked, done, failed, only_record, picture, training
from tests.synthetic import secret_named
from tests.test_people import ENGINES, conv, each_row, examples, npz

BOTH = [Augment.flip, Augment.crop]
KEYED = bytes(range(KEY))
NETWORKS = ["conv", "a chunk that fits no person", "wide"]


def by_hand(batch, sizes, units, number, key=KEYED):
    """All views of the examples of units, one at a time: images, and how many each unit has."""
    x, y = [], []
    for unit, images, labels in zip(units, batch.x.split(sizes), batch.y.split(sizes), strict=True):
        for j in range(number * len(images)):
            uniform = by_place(key, np.array([[unit, j]]))[:, :NUMBERS]
            x.append(placed(images[j // number][None], BOTH, uniform))
            y.append(labels[j // number])
    return Split(torch.cat(x), torch.stack(y)), [number * size for size in sizes]


# The row


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("sizes", "units"), [([1] * 12, range(12)), ([1, 4, 2, 1, 30], [7, 3, 0, 40, 6])])
def test_a_row_is_the_mean_over_the_views_of_all_examples_of_a_unit(name, number, sizes, units):
    batch, engine = examples(name, sum(sizes)), ENGINES[name]()
    views = Views(number, BOTH, KEYED, torch.tensor([*units]))
    rows = each_row(PeopleGradients(engine, torch.tensor(sizes), views), batch)
    every, counts = by_hand(batch, sizes, units, number)
    want = torch.stack([part.double().mean(0) for part in each_row(engine, every).split(counts)])
    torch.testing.assert_close(rows.double(), want, atol=2e-6, rtol=1e-4)
    assert (rows - each_row(PeopleGradients(engine, torch.tensor(sizes)), batch)).abs().max() > 0.01


def test_views_are_made_a_pass_at_a_time(monkeypatch):
    seen, inner = [], Views.of
    monkeypatch.setattr(Views, "of", lambda self, x, *rest: seen.append(len(x)) or inner(self, x, *rest))
    engine, views = ENGINES["conv"](), Views(50, BOTH, KEYED, torch.arange(20))
    blocks = PeopleGradients(engine, torch.ones(20, dtype=torch.int64), views).blocks(*examples("conv", 20))
    assert [len(block) for block in blocks] == [16, 4]
    assert sum(seen) == 20 * 50
    assert max(seen) == engine.chunk(torch.zeros(1, 1, 8, 8)) == 16
    assert len(engine._scratch) == 16


def test_views_of_a_unit_are_the_same_whoever_else_is_there():
    """Of the batch, and of a person with more examples; and others of another unit, number or key."""
    image = examples("conv", 1).x

    def views(units, sizes, key=KEYED):
        made, recorder = [], SimpleNamespace()
        recorder.of = lambda x, owners, numbers: made.append(whole.of(x, owners, numbers)) or made[-1]
        whole = Views(4, BOTH, key, torch.tensor(units))
        recorder.number = whole.number
        batch = Split(image.expand(sum(sizes), -1, -1, -1), torch.zeros(sum(sizes), dtype=torch.int64))
        list(PeopleGradients(ENGINES["conv"](), torch.tensor(sizes), recorder).blocks(*batch))
        return torch.cat(made).split([4 * size for size in sizes])

    both, alone, larger = views([3, 9], [1, 1]), views([9], [1]), views([2, 3, 9], [2, 5, 1])
    assert torch.equal(both[1], alone[0])
    assert torch.equal(both[1], larger[2])
    assert torch.equal(both[0], larger[1][:4])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(larger[1][:4], larger[1][4:8])
    assert not torch.equal(views([9], [1], KEYED[::-1])[0], alone[0])


# The sensitivity, attacked


def moved(mechanism, rows, others, image):
    """By how much an example moves the sum over others, which have the same views with it and without it. rows: what
    makes G of units."""
    places = torch.tensor([0, 1, 2, 30, 4, 5, 6])  # of all units; the fourth is the attacker
    there = Split(torch.cat([others.x[:3], image, others.x[3:]]), torch.cat([others.y[:3], others.y[:1], others.y[3:]]))
    sums = [
        clipped_sum(mechanism, rows(units), split)[0]
        for units, split in ((places[places != 30], others), (places, there))
    ]
    assert all(torch.isfinite(total).all() for total in sums)
    return float((sums[1] - sums[0]).norm())


def mechanism_of(name, engine, method):
    torch.manual_seed(3)
    smaller = {"k": 10} if "gep" in method else {}
    algorithm = algorithms.build(option("algorithm", method) | smaller)
    view = View(engine.model, engine, examples(name, 40, seed=9), 3, False, lambda *what: stream("test", *what))
    return algorithm.mechanism(view, 0)


def attackers(name):
    """Images made to hurt; of some only part shows in a view, or one view cancels another."""
    image = examples(name, 1, seed=1).x
    edge = torch.zeros_like(image)
    edge[..., 0] = 1e6
    odd = torch.cat([image[..., :4], -image[..., :4].flip(3)], 3)
    spoilt = image.clone()
    spoilt[..., 0, 0] = torch.nan
    return [image, 1e4 * image, edge, 1e3 * odd, spoilt, 1e17 * image, torch.full_like(image, torch.inf)]


@pytest.mark.attack
@pytest.mark.parametrize("name", ["conv", "wide"])
@pytest.mark.parametrize("method", ["dp_sgd", "gep_digits", "adadps"])
def test_an_example_with_views_moves_the_sum_by_at_most_the_sensitivity(name, method):
    engine, others = ENGINES[name](), examples(name, 6)
    mechanism = mechanism_of(name, engine, method)

    def rows(units):
        return PeopleGradients(engine, torch.ones_like(units), Views(8, BOTH, KEYED, units))

    reached = [moved(mechanism, rows, others, image) for image in attackers(name)]
    assert max(reached) <= mechanism.sensitivity * (1 + accountant.ROUNDING)
    assert max(reached) > 0.6 * mechanism.sensitivity


class ByPosition(Views):
    """The planted fault: views that follow from the place in the batch."""

    def of(self, x, owners, numbers):
        return Views(*self._replace(units=torch.arange(len(self.units)))).of(x, owners, numbers)


class Apart(PeopleGradients):
    """The planted fault: views that are clipped one by one, as units of their own."""

    def blocks(self, x, y, rows=1, dtype=None):
        number, many = self.views.number, len(x)
        owners, numbers = torch.arange(many).repeat_interleave(number), torch.arange(number).repeat(many)
        every = Split(self.views.of(x[owners], owners, numbers), y[owners])
        yield from self.inner.blocks(*every, rows, dtype)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kind", "views", "number"), [(PeopleGradients, ByPosition, 1), (Apart, Views, 8)], ids=["position", "apart"]
)
def test_the_attack_finds_views_that_follow_others_or_are_clipped_one_by_one(kind, views, number):
    engine, others = ENGINES["conv"](), examples("conv", 6)
    others = others._replace(x=1e4 * others.x)
    mechanism = mechanism_of("conv", engine, "dp_sgd")

    def rows(units):
        return kind(engine, torch.ones_like(units), views(number, BOTH, KEYED, units))

    assert moved(mechanism, rows, others, 1e4 * examples("conv", 1).x) > 1.2 * mechanism.sensitivity


# Training


def task(n=50, people=None):
    torch.manual_seed(0)
    x, y = torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8), torch.randint(3, (n,))
    return Task(Split(x, y), None, Split(x, y), 3, "accuracy", (0.5,), (0.5,), (), people=people)


def train(folder, problem=None, algorithm=None, report=lambda now: None, secure=False, device="cpu", **changes):
    model = torch.nn.Sequential(Scaled(), conv()).eval().to(device)
    settings = training(**({"views": 3, "augment": BOTH, "momentum": 0.0, "milestones": []} | changes))
    folder.mkdir(exist_ok=True)
    problem = problem or task()
    plan = schedule(problem.units, settings)
    job = Job(algorithm or DPSGD("dp_sgd", 1.0), plan, 0.5, settings, "name", folder / "checkpoint.pt")
    fit(model, problem, job, secret_named(secure=secure), report)
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("people", [None, [1, 4, 2, 1, 1, 3] * 6])
@pytest.mark.parametrize("batch_size", [10, 1000])
def test_each_step_takes_new_views_from_its_own_stream(tmp_path, people, batch_size):
    """Weights written out: the sample, its views, their mean gradients, clipped once, noise, fixed denominator, SGD."""
    problem = task(72, torch.tensor(people)) if people else task()
    weights = train(tmp_path, problem, batch_size=batch_size, steps=4)

    model = torch.nn.Sequential(Scaled(), conv()).eval()
    engine, n = loop.engine(model, 4), problem.units
    sizes = problem.people if people else torch.ones(n, dtype=torch.int64)
    starts = (sizes.cumsum(0) - sizes).tolist()
    for step in range(4):
        streams = secret_named()
        units = poisson_sample(streams("sample", step), n, 10 / n) if batch_size == 10 else torch.arange(n)
        total = torch.zeros(engine.size, dtype=torch.float64)
        for unit in units.tolist():
            here = slice(starts[unit], starts[unit] + int(sizes[unit]))
            mine, key = Split(problem.private.x[here], problem.private.y[here]), streams("views", step).bytes(KEY)
            every, _ = by_hand(mine, [len(mine.x)], [unit], 3, key)
            row = each_row(engine, every)[:, 1:].double().mean(0)
            total += row / max(1.0, float(row.norm()))
        total += 0.5 * 1.001 * torch.from_numpy(streams("noise", step).standard_normal(len(total)))
        with torch.no_grad():
            for parameter, columns in zip(model.parameters(), engine.offsets.values(), strict=True):
                parameter -= (0.1 * total[columns].view_as(parameter) / min(n, batch_size)).float()
    want = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-5)


def stop_at_5(progress):
    if progress.step == 5:
        raise KeyboardInterrupt


@pytest.mark.parametrize("average", [False, "ema"])
def test_a_run_on_views_that_was_stopped_ends_bit_for_bit_alike(tmp_path, average):
    how = {"checkpoint_seconds": 0, "average": average}
    want = train(tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", report=stop_at_5, **how)
    assert torch.load(tmp_path / "parts" / "checkpoint.pt")["step"] == 5
    assert torch.equal(train(tmp_path / "parts", **how), want)


def test_chunks_do_not_change_the_views(tmp_path):
    torch.testing.assert_close(*(train(tmp_path / f"{chunk}", chunk=chunk) for chunk in (1, 7)))


def test_one_view_is_an_augmentation_and_more_are_others(tmp_path):
    one, two, none = (
        train(tmp_path / f"{i}", views=views, augment=augment)
        for i, (views, augment) in enumerate([(1, BOTH), (2, BOTH), (1, None)])
    )
    assert (one - two).norm() > 1e-3
    assert (one - none).norm() > 1e-3


def test_views_of_the_operating_system_are_new_ones(tmp_path):
    keys = [secret_named(secure=True)("views", 0).bytes(KEY) for _ in range(2)]
    assert keys[0] != keys[1]
    assert torch.isfinite(train(tmp_path, secure=True)).all()


def test_what_an_algorithm_sees_are_public_gradients_without_views(tmp_path):
    seen = []

    class Watching(DPSGD):
        def mechanism(self, view, step):
            seen.append(type(view.gradients))
            return super().mechanism(view, step)

    train(tmp_path, algorithm=Watching("dp_sgd", 1.0))
    assert PeopleGradients not in seen
    assert len(seen) == 10


@pytest.mark.gpu
def test_a_gpu_trains_on_the_views_of_a_cpu(tmp_path):
    torch.testing.assert_close(*(train(tmp_path / at, device=at) for at in ("cpu", "cuda")), rtol=1e-4, atol=1e-5)


# Settings


def test_settings_without_views_are_the_cells_that_they_were():
    settings = checked("run", "algorithm=dp_sgd", "pair.private=digits", "training=digits", "model=digits_cnn")
    assert not {"views", "augment", "average"} & as_json(canonical(settings))["training"].keys()
    words = ["algorithm=dp_sgd", "pair.private=digits", "training=digits", "model=digits_cnn"]
    spelled = [
        identity_of(canonical(checked("run", *words, f"training.augment={augment}")))
        for augment in ("[flip,crop]", "[crop,flip,crop]", "[]", "null", "[flip]")
    ]
    assert spelled[0] == spelled[1] != spelled[2] == spelled[3] == identity_of(canonical(settings))
    assert len(set(spelled)) == 3


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["training.views=4"], "training.views=4: without training.augment all views are the image itself"),
        (["training.views=0"], "training.views=0: must be at least 1"),
        (["training.augment=[turn]"], "training.augment[0]: Invalid value 'turn'"),
        (["training.average=mean"], "training.average=mean: give true, false or ema"),
        (["training.average=1"], "training.average=1: give true, false or ema"),
        (["training.augment=[flip]", "model=pixels"], "training.augment: model.backbone computes features of each"),
        (
            ["training.augment=[flip]", "model=pixels", "algorithm=whitened_head"],
            "training.augment: model.backbone computes features of each",
        ),
        (
            ["training.augment=[flip]", "model=timm", "model.architecture=resnet10t", "model.once=true"],
            "training.augment: model.once=true computes features of each",
        ),
    ],
)
def test_views_of_what_is_no_image_are_refused(cli, words, why):
    run = ["run", "pair=digits_digits", "training=digits", "model=digits_cnn", "algorithm=dp_sgd", "distance=none"]
    assert why in failed(cli, *run, *words)


def test_tables_have_no_views(tmp_path, cli):
    (tmp_path / "t.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(200)))
    words = ["pair.public=null", "training=digits", "model=digits_cnn", "algorithm=dp_sgd", "training.augment=[flip]"]
    err = failed(cli, "run", f"pair.private={tmp_path / 't.csv'}", *words)
    assert "training.augment: views are of images, and " in err


# Commands


QUICK = """
+experiment=quickstart distance=none threads=1 training.steps=4 training.batch_size=40 pair.private_share=0.3
privacy.delta=0.001 training.views=2 training.augment=[flip,crop] training.average=ema
""".split()


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=dp_sgd"],
        ["algorithm=gep_digits"],
        ["algorithm=dp_md"],
        ["algorithm=second_phase", "algorithm.public_epochs=1"],
        ["algorithm=non_private"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_trains_on_views_and_is_repeated_bit_for_bit(tmp_path, cli, words):
    done(cli, "run", *QUICK, *words)
    record = only_record(tmp_path / "results")
    wanted = {"views": 2, "augment": ["flip", "crop"], "average": "ema"}
    assert wanted.items() <= record["settings"]["training"].items()
    assert "the same, bit for bit" in done(cli, "run", f"replay={record['identity']}")[0]
    (path,) = (tmp_path / "results" / "runs").iterdir()
    assert json.loads((path / "result.json").read_text())["weights"] == record["weights"]


def test_a_person_with_views_is_one_row_of_a_run(tmp_path, cli):
    npz(tmp_path / "a.npz", train=80)
    words = [f"pair.private={tmp_path / 'a.npz'}", "pair.public=null", "pair.unit=patient", "model=digits_cnn"]
    words += ["training=digits", "algorithm=dp_sgd", *QUICK[1:5], *QUICK[6:], "epsilon=3"]
    done(cli, "run", *words)
    assert only_record(tmp_path / "results")["private_units"] == 80


@pytest.mark.parametrize("kind", ["white_box", "per_instance"])
def test_an_audit_that_follows_single_gradients_is_refused(cli, kind):
    err = failed(cli, "audit", *QUICK, "algorithm=dp_sgd", f"audit.kind={kind}")
    assert f"training.augment: audit.kind={kind} follows the gradients of images, and not of views" in err


def test_a_black_box_audit_trains_on_views_of_its_canaries(tmp_path, cli):
    words = [word.replace("batch_size=40", "batch_size=1000") for word in QUICK]  # of all: quick to account for
    done(cli, "audit", *words, "algorithm=dp_sgd", "audit.kind=black_box", "audit.canaries=30")
    assert only_record(tmp_path / "results", "audits")["canaries"] == 30


def test_several_processes_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("pubsel.training.torchrun.place", lambda: (0, 2))
    monkeypatch.setattr("pubsel.training.parallel._start", lambda: None)
    assert main(["run", *QUICK, "algorithm=dp_sgd"]) == 2
    assert "training.augment: views are made in one process: run without torchrun" in capsys.readouterr().err


def test_the_preset_for_a_folder_trains_a_transformer_on_views_and_averages(cli):
    for place, value in (("a/1.png", 20), ("a/2.png", 30), ("b/1.png", 200), ("b/2.png", 220)):
        for part, lighter in (("train", 0), ("test", 3)):
            picture(Path(f"images/{part}/{place}"), value + lighter)
    # without its weights, which cannot be fetched here, and smaller
    small = [
        "model.architecture=vit_tiny_patch16_224",
        "model.pretrained=false",
        "model.input_size=32",
        "+model.options={img_size: 32, depth: 2}",
        "training.steps=2",
        "privacy.weak=true",
        "privacy.delta=0.1",
    ]
    done(cli, "run", "+experiment=finetune_vit", "pair.private=./images", *small)
    settings = only_record()["settings"]
    assert settings["training"]["augment"] == ["flip", "crop"]
    assert (settings["training"]["views"], settings["training"]["average"]) == (4, "ema")
    assert settings["model"]["lora"]["layers"] == ["qkv"]
