"""PILLAR and the projections that it is compared with; every algorithm on features, from command line to record."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import pubsel.release.run
import pubsel.training.once
from pubsel import algorithms
from pubsel.algorithms import FirstRelease, Frozen, map_of
from pubsel.algorithms.noisy_sgd import NoisySGD
from pubsel.algorithms.pillar import noisy_covariance, public_pca, random_projection
from pubsel.cell import Cell
from pubsel.cli import main
from pubsel.data import Split, Task
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.randomness import stream
from pubsel.rules import Budget, Inputs
from pubsel.settings import CONF
from pubsel.settings.identity import as_json
from pubsel.settings.keys import Accounting, Pair, Training
from pubsel.settings.methods import option
from pubsel.training.loop import noisy_sum
from pubsel.training.once import freeze
from tests.made import build, checked, hurtful, interrupted, only_record, secret, write_npz
from tests.synthetic import secret_named

CLASSES = 3


def features(n, d=12, seed=0, rank=None):
    """Features of differing means and deviations, correlated."""
    draw = np.random.RandomState(seed)
    mixing = np.random.RandomState(99).standard_normal((rank or d, d)) * np.logspace(0, -1, rank or d)[:, None]
    x = draw.standard_normal((n, rank or d)) @ mixing * np.linspace(0.1, 3, d) + np.linspace(-5, 5, d)
    return torch.from_numpy(x).float()


# Public PCA, and none


def test_public_pca_is_standardisation_and_pca():
    public, private = features(40), features(100, seed=1)
    pipeline = make_pipeline(StandardScaler(), PCA(5)).fit(public.double().numpy())
    want = pipeline.transform(private.double().numpy())
    found = public_pca(public, 5)(private).numpy()
    signs = np.sign((found * want).sum(0))
    np.testing.assert_allclose(found * signs, want, rtol=1e-4, atol=1e-4)
    own = public_pca(public, 5)(public)
    np.testing.assert_allclose(own.mean(0), 0, atol=1e-4)
    assert (own.var(0).diff() < 0).all()  # the largest first


def test_a_constant_feature_does_no_harm():
    public = features(40)
    public[:, 3] = 7
    found = public_pca(public, 5)(features(9, seed=1))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("public", "k", "says"),
    [
        (features(40), 13, r"algorithm\.k=13: 40 public examples with 12 features have no 13"),
        (features(4), 5, r"algorithm\.k=5: 4 public examples"),
        (features(4), 4, r"algorithm\.k=4: the public features have rank 3: lower algorithm\.k or raise pair\.m"),
        (features(40, rank=6), 8, r"algorithm\.k=8: the public features have rank [67]"),
        (features(1).repeat(40, 1), 1, r"algorithm\.k=1: the public features have rank 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_rank_that_public_data_have_not_is_refused(public, k, says):
    with pytest.raises(UsageError, match=says):
        public_pca(public, k)


def test_random_projection_keeps_lengths_and_reads_no_data():
    found = build("jl", k=300).frozen(None, 400, secret)
    x = torch.randn(50, 400)
    ratio = found(x).norm(dim=1) / x.norm(dim=1)
    assert 0.9 < float(ratio.mean()) < 1.1
    same, other = random_projection(400, 300, 1), random_projection(400, 300, 2)
    assert torch.equal(same.projection, random_projection(400, 300, 1).projection)
    assert not torch.equal(same.projection, other.projection)
    assert build("jl").uses_public is False


def test_k_must_be_at_most_the_number_of_features():
    for name in ("pillar", "jl", "dp_pca"):
        with pytest.raises(UsageError, match=r"algorithm\.k=13 is more than the 12 features"):
            build(name, k=13).frozen(Split(features(40), torch.zeros(40)), 12, secret)
    for name in ("pillar", "dp_pca"):
        with pytest.raises(UsageError, match=rf"algorithm={name} needs public data"):
            build(name, k=3).frozen(None, 12, secret)


def test_public_features_standardise_private_ones_and_project_nothing():
    """Against the formula; a feature that is constant in the public data is only shifted. k is of no effect."""
    public, x = features(40), features(9, seed=1)
    public[:, 3] = 2.0
    frozen = build("dp_sgd_standardised", k=500).frozen(Split(public, torch.zeros(40)), 12, secret)
    deviation = public.std(0, correction=0)
    deviation[3] = 1.0
    assert torch.allclose(frozen(x), (x - public.mean(0)) / deviation, atol=1e-5)
    with pytest.raises(UsageError, match="algorithm=dp_sgd_standardised needs public data"):
        build("dp_sgd_standardised").frozen(None, 12, secret)


@pytest.mark.parametrize("name", ["pillar", "jl", "dp_pca", "dp_sgd_standardised", "dp_sgd_clip1"])
def test_presets_for_features_make_rows_of_norm_one(name):
    """After the method's own map; without `unit` the rows are what they were, and so is the identity."""
    changes = {"k": 5} if "k" in option("algorithm", name) else {}
    public, x = Split(features(40), torch.zeros(40)), features(9, seed=1)

    def made(**more):
        frozen = map_of(algorithms.build(option("algorithm", name) | changes | more), public, 12, secret)
        return frozen.decode(frozen.clipped_sum(features(50))) if isinstance(frozen, FirstRelease) else frozen

    rows, before = made()(x), made(unit=False)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(9))
    before = x if before is None else before(x)
    torch.testing.assert_close(rows, before / before.norm(dim=1, keepdim=True))
    assert "unit" not in as_json(algorithms.build(option("algorithm", name) | {"unit": False}))


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("pillar_*.yaml")), ids=lambda path: path.stem)
def test_experiments_of_the_paper_leave_rows_as_they_are(path):
    assert checked("run", f"+experiment={path.stem}").algorithm["unit"] is False


TRAINING = Training(2, None, 1000, 0.1, 0.0, 0.0, [], 1.0, None, 60.0)
BUDGET = Budget(2.0, 1e-5)
NAMED = SimpleNamespace(secret=lambda what, *_: secret_named(what))


def cell_of(algorithm, folder=None, budget=BUDGET, batch=1000, streams=NAMED):
    training = dataclasses.replace(TRAINING, batch_size=batch)
    unread = dict.fromkeys(("model", "seed", "select", "epsilon_select", "distance"))
    inputs = Inputs(Pair(private="x", public="y"), None, ".", False, True)
    parts = {"algorithm": algorithm, "budget": budget, "training": training, "streams": streams, "inputs": inputs}
    return Cell(name="a run", folder=folder, device=torch.device("cpu"), **parts, **unread)


def problem(private, public):
    y = [torch.arange(len(x)) % CLASSES for x in (private, public)]
    return Task(Split(private, y[0]), Split(public, y[1]), Split(private, y[0]), CLASSES, "accuracy", (), (), ())


@pytest.mark.parametrize("name", ["pillar", "jl"])
def test_a_projection_that_costs_nothing_never_reads_private_data(name, tmp_path):
    """The private features are poison: what is frozen is the same, and finite."""
    public, found = features(40), []
    for private in (features(60, seed=1), torch.full((60, 12), math.nan)):
        cell = cell_of(build(name, k=4), tmp_path, streams=None)
        frozen = freeze(cell, problem(private, public), None)
        found.append(frozen)
    assert torch.equal(found[0].projection, found[1].projection)
    assert torch.isfinite(found[0].projection).all()
    assert list(tmp_path.iterdir()) == []


# Private PCA


@pytest.mark.parametrize("d", [3, 12, 600])
def test_one_row_moves_the_release_by_at_most_its_sensitivity(d):
    public = features(50, d)
    release = noisy_covariance(public, 2)
    others = torch.cat([features(30, d, seed=2), hurtful(d)[:6]])
    without, reached = release.clipped_sum(others).double(), 0.0
    assert without.shape == (release.size,) == (d * (d + 1) // 2,)
    for row in torch.cat([hurtful(d), features(20, d, seed=3)]).split(1):
        alone = release.clipped_sum(row).double()
        assert torch.isfinite(alone).all()
        assert alone.norm() <= release.sensitivity
        moved = release.clipped_sum(torch.cat([others, row])).double() - without
        assert moved.norm() <= release.sensitivity + 1e-5 * float(without.norm())
        assert torch.equal(release.clipped_sum(torch.cat([others, row])[:-1]).double(), without)
        reached = max(reached, float(alone.norm()))
    assert reached > 0.999 * release.sensitivity == 0.999


def test_a_release_without_the_root_of_two_or_with_a_wider_clip_would_be_found():
    """The vector's norm is the Frobenius norm of x x^T, which is |x|^2: neither less nor more."""
    public = features(51)
    release, scaler = noisy_covariance(public, 2), StandardScaler().fit(public.double().numpy())
    x = features(1, seed=4)
    z = scaler.transform(x.double().numpy())
    bound = np.median(np.linalg.norm(scaler.transform(public.double().numpy()), axis=1))
    inside = torch.from_numpy(scaler.mean_ + (z * 0.5 * bound / np.linalg.norm(z)) * scaler.scale_).float()
    assert float(release.clipped_sum(inside).norm()) == pytest.approx(0.25, rel=1e-3)
    assert float((1.001 * release.clipped_sum(torch.full((1, 12), 1e6))).norm()) > 1
    rows, columns = np.triu_indices(12)
    outer = np.outer(z, z) / np.linalg.norm(z) ** 2  # clipped, where it is longer than the bound
    weights = np.where(rows == columns, 1, np.sqrt(2))
    long = torch.from_numpy(scaler.mean_ + 10 * bound * z / np.linalg.norm(z) * scaler.scale_).float()
    np.testing.assert_allclose(release.clipped_sum(long), (outer[rows, columns] * weights).ravel(), atol=1e-4)
    assert np.linalg.norm(outer[rows, columns]) < 0.95  # without the root a row would move it by less than declared


@pytest.mark.parametrize("scale", [1.0, 1.02, 0.98])
def test_noise_has_the_declared_scale(scale):
    """std = noise multiplier * sensitivity on each number; the same test rejects 2 % more or less."""
    size = 1000
    release = FirstRelease(lambda x: torch.zeros(size), lambda noisy: noisy, 3.0 * scale, size)
    draws = [noisy_sum(release, torch.zeros(5, 2), 2.0, stream("test", "release", i)) for i in range(60)]
    total = float((torch.cat(draws) / 6).square().sum())
    p = 2 * min(stats.chi2.cdf(total, 60 * size), stats.chi2.sf(total, 60 * size))
    assert (p > 1e-6) == (scale == 1.0)


def test_the_sum_may_be_cut_into_parts():
    release = noisy_covariance(features(50), 2)._replace(decode=lambda noisy: noisy)
    x = features(100, seed=1)
    whole, parts = (noisy_sum(release, x, 0.5, stream("test", "release"), rows) for rows in (1000, 7))
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-4)
    assert (noisy_sum(release, x[:0], 0.0, stream("test", "release")) == 0).all()


def top_eigenvectors(x, public, k):
    """In float64: of the second moments of the standardised and clipped rows."""
    scaler = StandardScaler().fit(public.double().numpy())
    bound = np.median(np.linalg.norm(scaler.transform(public.double().numpy()), axis=1))
    z = scaler.transform(x.double().numpy())
    z = z * np.minimum(1, bound / np.linalg.norm(z, axis=1, keepdims=True))
    values, vectors = np.linalg.eigh(z.T @ z)
    assert (np.diff(values[-k - 1 :]) > 0.05 * values[-1]).all()  # distinct, so that the vectors are determined
    return scaler, vectors[:, ::-1][:, :k]


def test_without_noise_it_is_the_pca_of_the_clipped_private_features():
    public, x = features(61), features(400, seed=1)
    frozen = noisy_sum(noisy_covariance(public, 3), x, 0.0, stream("test", "release"))
    scaler, top = top_eigenvectors(x, public, 3)
    want = scaler.transform(x.double().numpy()) @ top
    found = frozen(x).numpy()
    np.testing.assert_allclose(found * np.sign((found * want).sum(0)), want, rtol=1e-3, atol=1e-3)


def test_with_little_noise_it_is_near_and_with_much_it_is_not():
    public, x = features(61), features(400, seed=1)
    release, top = noisy_covariance(public, 3), top_eigenvectors(x, public, 3)[1]
    scale = StandardScaler().fit(public.double().numpy()).scale_

    def cosines(noise):
        found = noisy_sum(release, x, noise, stream("test", "release")).projection.double().numpy() * scale[:, None]
        np.testing.assert_allclose(found.T @ found, np.eye(3), atol=1e-5)
        return np.linalg.svd(found.T @ top)[1]

    assert cosines(0.1).min() > 0.99
    assert cosines(1000).min() < 0.9


@pytest.mark.parametrize("broken", [features(1).repeat(40, 1), torch.full((40, 12), 1e30)])
def test_public_features_that_give_no_clip_norm_are_refused(broken):
    """A norm of zero would divide by zero, and what one private row adds would have no bound."""
    broken[::3, 0] += 1e-30
    with pytest.raises(UsageError, match="median norm"):
        noisy_covariance(broken, 2)


# Budget


@pytest.mark.parametrize(("share", "batch"), [(0.01, 200), (0.25, 200), (0.5, 200), (0.25, 25)])
def test_the_shares_of_the_budget_add_up(share, batch):
    """Poisson batches and full ones: what is released first, and training, cost what was asked for and no more."""
    plan, spend, first = cell_of(build("dp_pca", share=share), batch=batch).guarantee(200)
    assert first.epsilon <= share * 2.0
    assert spend.epsilon <= (1 - share) * 2.0
    assert first.epsilon + spend.epsilon > 0.998 * 2.0
    assert first.delta + spend.delta == pytest.approx(1e-5)
    assert first.delta == pytest.approx(share * 1e-5)
    assert accountant.gaussian_delta(first.epsilon, 1 / first.noise_multiplier) <= first.delta * (1 + 1e-9)
    assert accountant.spent(spend.noise_multiplier, plan.rate, plan.steps, spend.delta) <= (1 - share) * 2.0 * 1.01
    said = accountant.statement(spend, 1.0, False, False, [("before training", first)], examples=100)
    assert said["epsilon"] == first.epsilon + spend.epsilon <= 2.0
    assert said["delta"] == pytest.approx(1e-5)
    assert f"({said['epsilon']:.4g}, {said['delta']:g})" in said["statement"]
    assert [part["what"] for part in said["parts"]] == ["before training", "training"]
    assert said["parts"][0]["noise_multiplier"] == first.noise_multiplier
    assert said["composition"] == "basic"


def test_no_share_is_taken_where_nothing_is_released_first():
    whole = cell_of(build("dp_sgd")).guarantee(200)
    for name in ("pillar", "jl"):
        assert cell_of(build(name, share=0.5)).guarantee(200) == whole
    assert whole[2] is None
    assert "parts" not in accountant.statement(whole[1], 1.0, False, False, None, examples=100)


def test_the_papers_accounting_is_of_the_algorithms_own_sensitivity():
    """sqrt(2) for the two sums of GEP."""
    budget = BUDGET._replace(accounting=Accounting.paper)
    plan, spend, _ = cell_of(build("gep"), budget=budget).guarantee(200)
    assert spend == accountant.plan(2.0, 1e-5, plan.rate, plan.steps, math.sqrt(2), Accounting.paper)


def test_more_examples_than_the_rounding_of_sums_is_derived_for_are_refused():
    cell = cell_of(build("dp_sgd"), budget=BUDGET._replace(delta=1e-8))
    many = accountant.MOST_EXAMPLES + 1
    with pytest.raises(UsageError, match=rf"{many} examples: the rounding of sums is bounded for"):
        cell.guarantee(many)


def test_a_first_release_of_more_examples_than_that_is_refused(tmp_path, monkeypatch):
    """However few people they are of."""
    monkeypatch.setattr(accountant, "MOST_EXAMPLES", 30)
    cell = cell_of(build("dp_pca", k=2), tmp_path)
    _, _, first = cell.guarantee(20)
    task = problem(features(31), features(40))._replace(people=torch.tensor([2] * 15 + [1]))
    with pytest.raises(UsageError, match="31 examples: the rounding of sums is bounded for 30"):
        freeze(cell, task, first)


def test_a_private_pca_without_a_share_is_refused(tmp_path):
    """It would release private features without noise under a guarantee that leaves them out."""
    cell = cell_of(build("dp_pca", share=0, k=2), tmp_path)
    _, _, first = cell.guarantee(60)
    with pytest.raises(UsageError, match=r"algorithm\.share"):
        freeze(cell, problem(features(60), features(40)), first)
    assert list(tmp_path.iterdir()) == []


def test_the_noise_that_is_accounted_for_is_added(tmp_path, monkeypatch):
    asked = []
    noted = lambda made, x, noise, source, **_: asked.append(noise) or Frozen()  # noqa: E731
    monkeypatch.setattr(pubsel.training.once, "noisy_sum", noted)
    cell = cell_of(build("dp_pca", k=2), tmp_path)
    _, _, first = cell.guarantee(60)
    freeze(cell, problem(features(60), features(40)), first, in_ledger=False)
    assert asked == [first.noise_multiplier]


# From the command line to the record

TINY = """
model=pixels distance=none download=false threads=1 epsilon=2 pair.m=30 pair.take=train
pair.private=tiny.npz pair.public=tiny.npz training.steps=3 training.batch_size=1000
training.learning_rate=0.1
""".split()
WAYS = {
    "pillar": ["algorithm.k=5"],
    "jl": ["algorithm.k=5"],
    "whitened_head": [],
    "whitened_head_once": ["algorithm.k=5"],
    "whitened_head_start": [],
    "dp_pca": ["algorithm.k=5"],
    "dp_sgd_standardised": [],
    "dp_fc": [],
    "adassp": [],
    "public_second_moment": [],
    "dppl_public": [],
    "adadps": [],
    "gep": ["algorithm.k=20"],
    "dp_sgd": ["algorithm.clip_norm=1"],
    "dope_sgd": ["algorithm.public_batch=20"],
    "adamix": ["algorithm.rank=10", "algorithm.pretrain_epochs=5"],
    "adamix_theory": ["training=adamix_theory"],
    "ppgd": ["algorithm.finish_epochs=5"],
    "fully_private": [],
    "only_public": ["algorithm.pretrain_epochs=20", "training=adamix_theory"],
}


@pytest.fixture
def folder(tmp_path, folder):
    """A folder with images of three classes, which differ in where they are bright."""
    draw = np.random.RandomState(0)
    labels, images = draw.randint(3, size=260), draw.randint(0, 60, (260, 6, 6)).astype(np.uint8)
    images[np.arange(260), 2 * labels, :] += 180
    write_npz("tiny.npz", (images[60:], labels[60:]), (images[:60], labels[:60]))
    return tmp_path


@pytest.mark.parametrize("name", WAYS)
def test_a_run_on_features(name, folder, capsys):
    words = [f"algorithm={name}", *TINY, *WAYS[name]]
    if "training=adamix_theory" not in words:
        words = ["training=pillar", *words]
    assert main(["run", *words]) == 0, capsys.readouterr().err
    record = only_record()
    said = capsys.readouterr()
    private = record["privacy"]
    assert private["valid"]
    assert private["epsilon"] <= 2
    assert private["delta"] <= 1e-5 * (1 + 1e-12)
    reads_none = name in ("only_public", "whitened_head_start")
    assert (private["delta"] == 0) == (reads_none or name == "dppl_public")
    uses_public = name not in ("jl", "dp_sgd", "fully_private", "dp_fc", "adassp")
    assert (record["public"], record["private_examples"]) == (("tiny.npz", 170) if uses_public else (None, 200))
    assert record["test_examples"] == 60
    widths = {
        "pillar": 5,
        "jl": 5,
        "dp_pca": 5,
        "whitened_head": 16 + 36,  # all features too: public ones vary in more than a tenth of them
        "whitened_head_once": 5,
        "whitened_head_start": 25,
    }
    classifier = (widths | {"public_second_moment": 30}).get(name, 36)
    assert record["parameters"] == 3 * (classifier + 1)
    if reads_none:
        assert (private["epsilon"], private["delta"], record["epsilon"], private["steps"]) == (0, 0, 0, 0)
        assert private["accountant"] == "none: private examples are not read"
        assert record["utility"] > 0.9
        assert "(0, 0)-differentially private" in said.out
    else:
        assert private["epsilon"] > 1.9
        several = {"gep": 2, "adassp": 3, "public_second_moment": 3}
        assert private["sensitivity"] == math.sqrt(several.get(name, 1))


def test_the_release_is_made_once(folder, capsys, monkeypatch):
    """A run that is killed after it goes on with what it released: noise of the system would be other noise."""
    words = ["run", "algorithm=dp_pca", "training=pillar", *TINY, "algorithm.k=5", "privacy.secure_noise=true"]
    fit, made = pubsel.release.run.fit, []
    monkeypatch.setattr(pubsel.release.run, "fit", interrupted)
    assert main(words) == 130
    (path,) = Path("results").glob("runs/*/release.pt")
    released = torch.load(path, weights_only=True)["drawn"]["projection"]
    monkeypatch.setattr(pubsel.release.run, "fit", fit)
    monkeypatch.setattr(pubsel.training.once, "noisy_sum", lambda *_: made.append(1))
    assert main(words) == 0, capsys.readouterr().err
    assert made == []
    weights = torch.load(path.with_name("model.pt"), weights_only=True)
    assert torch.equal(weights["frozen.projection"], released)
    assert {"frozen.shift", "linear.weight", "linear.bias"} < set(weights)


def test_weights_of_a_loop_of_its_own_are_drawn_once(folder, capsys, monkeypatch):
    """noisy_sgd in a run that is killed between its last draw and its record."""
    two = dict(np.load("tiny.npz"))
    np.savez("tiny.npz", **{key: value % 2 if "labels" in key else value for key, value in two.items()})
    words = ["run", "algorithm=noisy_sgd", "algorithm.steps=200", *TINY, "privacy.secure_noise=true"]
    with monkeypatch.context() as patch:
        patch.setattr(pubsel.release.run, "utility", interrupted)
        assert main(words) == 130
    (path,) = Path("results").glob("runs/*/solution.pt")
    drawn = torch.load(path, weights_only=True)["drawn"]
    monkeypatch.setattr(NoisySGD, "solve", interrupted)
    assert main(words) == 0, capsys.readouterr().err
    assert torch.equal(torch.load(path.with_name("model.pt"), weights_only=True)["linear.weight"], drawn["weight"])
    record = json.loads(path.with_name("result.json").read_text())
    assert record["privacy"]["epsilon"] == drawn["spend"]["epsilon"] <= 2


def test_a_broken_release_is_named(folder, capsys, monkeypatch):
    words = ["run", "algorithm=dp_pca", "training=pillar", *TINY, "algorithm.k=5"]
    monkeypatch.setattr(pubsel.release.run, "fit", interrupted)
    assert main(words) == 130
    (path,) = Path("results").glob("runs/*/release.pt")
    path.write_bytes(path.read_bytes()[:50])
    capsys.readouterr()
    assert main(words) == 1
    assert "release.pt cannot be read" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["algorithm=pillar", "algorithm.projection=dp_pca", "algorithm.k=5"], 2, "algorithm.share"),
        (["algorithm=dp_pca", "algorithm.share=1"], 2, "algorithm.share=1"),
        (["algorithm=pillar", "pair.public=null"], 2, "give pair.public=NAME"),
        (["algorithm=pillar", "model.backbone=null"], 2, "takes features: set model.backbone"),
        (["algorithm=adamix", "privacy=adamix", "training.batch_size=10"], 2, "set training.batch_size to 170"),
        (["algorithm=ppgd", "algorithm.finish_rate=1e38"], 1, "algorithm.finish_rate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_in_one_line(folder, capsys, words, code, says):
    assert main(["run", "training=pillar", *TINY, *words]) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("pubsel: ")] == lines[-1:]
    assert says in lines[-1]
    assert not list(Path("results").glob("runs/*/result.json"))


def test_components_of_wide_features_are_the_same(monkeypatch):
    x = torch.randn(60, 90, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, 90)
    want = public_pca(x, 7)
    monkeypatch.setattr(pubsel.algorithms.pillar, "WIDE", 80)
    got = public_pca(x, 7)
    torch.testing.assert_close(got.shift, want.shift)
    signs = (got.projection * want.projection).sum(0).sign()
    torch.testing.assert_close(got.projection * signs, want.projection, rtol=1e-4, atol=1e-5)
