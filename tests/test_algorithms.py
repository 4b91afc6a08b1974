"""Mechanisms against the algorithms written out in float64; and attacks on every declared sensitivity."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pubsel.algorithms import Solves, View, dp_sgd, gep
from pubsel.data import Split
from pubsel.gradients.matrix import Basis, DenseGradients, PerExampleGradients, random_labels
from pubsel.gradients.subspace import orthonormal, power_basis
from pubsel.messages import UsageError
from pubsel.models.small import linear
from pubsel.privacy import accountant
from pubsel.settings import CONF
from pubsel.settings.methods import option
from tests.made import build, hurtful, secret

SMALL = {"k": 20, "rank": 45}  # of 40 public examples, and 64 features


def small(name):
    """The settings of conf/algorithm/NAME.yaml, in so far as these few examples allow."""
    values = option("algorithm", name)
    return {key: most for key, most in SMALL.items() if values.get(key)}


def takes_private_steps(name):
    """Whether an option is the one that a method is named after, and its steps are of a `Mechanism` and private."""
    algorithm = build(name)
    stepping = algorithm.private and not isinstance(algorithm, Solves) and algorithm.sensitivity() > 0
    return stepping and algorithm.name == name


CONFIGS = [
    name for name in sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml")) if takes_private_steps(name)
]

AUTOMATIC = [(name, "automatic") for name in ("dp_sgd", "gep", "b_gep")]


def view(m=40, dtype=torch.float32):
    torch.manual_seed(0)
    model = linear(1, 8, 8, 10).to(dtype).eval()
    public = Split(torch.randn(m, 1, 8, 8, dtype=dtype), torch.randint(10, (m,)))
    return View(model, PerExampleGradients(model, 16), public, 10, False, secret)


def mechanism(name, dtype=torch.float32, m=40, **changes):
    return build(name, **(small(name) | changes)).mechanism(view(m, dtype), step=0)


def rows_near(basis, p):
    """Rows in the span of a basis, and at a small step t away from it: there |g|^2 - |w|^2 loses its digits."""
    torch.manual_seed(2)
    b = basis.expand
    inside = torch.stack([b(torch.randn(basis.size)) for _ in range(2)])
    inside /= inside.norm(dim=1, keepdim=True)
    away = torch.randn(2, p)
    for _ in range(2):
        away -= torch.stack([b(row) for row in DenseGradients(away.clone()).project(basis)])
    away /= away.norm(dim=1, keepdim=True)
    return torch.cat([scale * (inside + t * away) for t in (0, 1e-4, 1e-3, 4e-3, 1e-2, 0.1) for scale in (1, 1e6)])


@pytest.mark.parametrize(("name", "clip"), [(name, None) for name in CONFIGS] + AUTOMATIC)
@pytest.mark.parametrize("bound", [0.01, 1.0, 10.0])
def test_one_row_moves_the_sum_by_at_most_the_sensitivity(name, clip, bound):
    """Add each attacking row to a batch, alone and among others; remove it again. bound: of all clip norms that the
    method has as settings; others are of public data."""
    clips = {key: bound for key in option("algorithm", name) if key.startswith("clip_")}
    clips |= {"clip": clip} if clip else {}
    if "gep" in name:
        clips["clip_residual"] = bound / 5
    mech = mechanism(name, **clips)
    batch = torch.randn(12, 650)
    rows = hurtful(650)
    if "gep" in name:
        rows = torch.cat([rows, rows_near(build(name, k=20, **clips).basis(view(), 0), 650)])
    for row in rows.split(1):
        alone = mech.clipped_sum(DenseGradients(row.clone())).double()
        assert torch.isfinite(alone).all()
        assert alone.norm() <= mech.sensitivity
        without = mech.clipped_sum(DenseGradients(batch.clone())).double()
        with_row = mech.clipped_sum(DenseGradients(torch.cat([batch, row]))).double()
        assert (with_row - without).norm() <= mech.sensitivity * (1 + accountant.ROUNDING)


@pytest.mark.parametrize(("name", "clip"), [(name, None) for name in CONFIGS] + AUTOMATIC)
def test_the_declared_sensitivity_is_reached(name, clip):
    """A declared bound that no row comes near would waste noise, and the attack above could not fail."""
    mech = mechanism(name, **({"clip": clip} if clip else {}))
    reached = max(mech.clipped_sum(DenseGradients(row.clone())).norm() for row in hurtful(650).split(1))
    assert reached > 0.99 * mech.sensitivity


def basis_of(p, k):
    """A float32 basis of p parameters from a decaying spectrum, as gradients have."""
    torch.manual_seed(0)
    rows = DenseGradients(torch.randn(2 * k, p) * torch.logspace(0, -5, 2 * k)[:, None])
    return power_basis(lambda: [rows], [slice(0, p)], [torch.randn(p, k)], 1)


@pytest.mark.parametrize(("p", "k"), [(30_000, 100), (90_000, 60), (200_000, 40)])
def test_a_basis_that_is_orthonormal_only_in_float32_does_not_widen_the_sum(p, k):
    """The attack: a row along the direction in which the basis errs most, a little outside its span."""
    basis, error = orthonormal(basis_of(p, k))
    q = basis.blocks[0].double()
    values, vectors = torch.linalg.eigh(q.T @ q - torch.eye(k))
    assert values[-1] <= error <= 1e-3
    worst = (q @ vectors[:, -1]).float()
    for row in (worst / worst.norm() + rows_near(basis, p)[2::4]).split(1):
        for clip in (1e-3, 1.0):
            g = DenseGradients(row.clone())
            w, embedding = gep.embed_and_clip(g, basis, clip)
            residual = gep.residual_sum(g, basis, w, clip / 5, error)
            assert torch.cat([embedding, residual]).double().norm() <= math.sqrt(2)


def longer(basis, by):
    """The same directions, B^T B = (1 + by) I."""
    return Basis(basis.slices, [b * (1 + by) ** 0.5 for b in basis.blocks])


def hidden_by(basis, d):
    """A row g = a b + c r [1, p], b in the span of an orthonormal basis and r outside. With one that is `longer` by d,
    |g|^2 - |w|^2 is c^2 - d a^2, and the square of the residual's norm c^2 + d^2 a^2."""
    p = basis.slices[-1].stop
    inside, away = basis.expand(torch.randn(basis.size)), torch.randn(p)
    away -= basis.expand(DenseGradients(away[None].clone()).project(basis)[0])
    c = (d + 1.1 * gep.NEAR) ** 0.5
    return ((1 - c * c) ** 0.5 * inside / inside.norm() + c * away / away.norm())[None]


def test_a_residual_has_room_for_what_the_basis_errs_by():
    basis, d = basis_of(3000, 50), 0.01
    g, wrong = DenseGradients(hidden_by(basis, d)), longer(basis, d)
    assert gep.residual_sum(g, wrong, g.project(wrong), 1e-3, d).norm() <= 1
    assert gep.residual_sum(g, wrong, g.project(wrong), 1e-3, 0.0).norm() > 1.3  # the attack is one


def test_gep_makes_its_basis_orthonormal(monkeypatch):
    """Also if the power method leaves one that is 1 % too long."""
    row = hidden_by(build("gep", k=20).basis(view(), 0), 0.02)
    monkeypatch.setattr(gep, "power_basis", lambda *how: longer(power_basis(*how), 0.02))
    mech = mechanism("gep", clip_embedding=0.01, clip_residual=0.002)
    assert mech.clipped_sum(DenseGradients(row)).norm() <= mech.sensitivity


def test_rows_near_the_basis_among_many_of_their_kind():
    """Their large weights cancel in two sums; one row more moves the total by no more than declared."""
    basis = basis_of(3000, 50)
    near = torch.cat([rows_near(basis, 3000) for _ in range(40)])  # 960 rows
    without, with_row = (
        gep.residual_sum(DenseGradients(rows.clone()), basis, DenseGradients(rows).project(basis), 1.0, 0.0)
        for rows in (near[:-1], near)
    )
    assert (with_row - without).double().norm() <= 1.0


@pytest.mark.parametrize("t", [1e-3, 1e-2, 0.09, 0.11, 0.5])
def test_residuals_on_both_sides_of_the_border_are_those_of_float64(t):
    """At |r| = 0.1 |g| the residual stops being written out; the slack then costs at most 5 %, and clips more."""
    torch.manual_seed(3)
    basis = basis_of(3000, 50)
    exact = Basis(basis.slices, [torch.linalg.qr(b.double()).Q for b in basis.blocks])
    inside, away = basis.expand(torch.randn(20, 50)).double(), torch.randn(20, 3000, dtype=torch.float64)
    away -= exact.expand(DenseGradients(away.clone()).project(exact))
    scale = inside.norm(dim=1, keepdim=True) * t / away.norm(dim=1, keepdim=True)
    rows = inside + scale * away
    residuals = rows - exact.expand(DenseGradients(rows.clone()).project(exact))
    g = DenseGradients(rows.float())
    for clip in (float(residuals.norm(dim=1).max()) / 10, float(residuals.norm(dim=1).max()) * 10):
        want = dp_sgd.clipped_sum(DenseGradients(residuals.clone()), clip)
        found = gep.residual_sum(g, basis, g.project(basis), clip, 0.0).double()
        assert (found - want).norm() <= (0.055 if t > 0.1 else 2e-3) * want.norm()
        assert found.norm() <= want.norm() * (1 + 1e-3)


def test_an_attack_finds_a_mechanism_that_clips_too_little(monkeypatch):
    """Without slack and border, or with a clip bound 0.1 % too wide, the attacks above exceed what is declared."""
    basis = basis_of(3000, 50)
    monkeypatch.setattr(gep, "SLACK", 0.0)
    monkeypatch.setattr(gep, "NEAR", 0.0)
    worst = 0.0
    for row in rows_near(basis, 3000).split(1):
        g = DenseGradients(row.clone())
        worst = max(worst, float(gep.residual_sum(g, basis, g.project(basis), 1.0, 0.0).double().norm()))
    assert worst > 1.0
    wide = dp_sgd.clipped_sum(DenseGradients(torch.ones(1, 650)), 1.0) * 1.001
    assert wide.norm() > 1.0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sum_may_be_cut_into_blocks(name):
    mech = mechanism(name, torch.float64)
    rows = torch.randn(30, 650, dtype=torch.float64)
    whole = mech.clipped_sum(DenseGradients(rows.clone()))
    parts = sum(mech.clipped_sum(DenseGradients(part.clone())) for part in rows.split(7))
    torch.testing.assert_close(whole, parts)
    assert whole.shape == (mech.size,)


def test_automatic_clipping_divides_each_row_by_its_norm():
    """Bu et al., AUTO-S: g / (|g| + 0.01), of any length; decoded to a mean of rows near the clip norm. GEP: both
    parts."""
    rows = torch.randn(7, 650, dtype=torch.float64) * torch.logspace(-6, 3, 7, dtype=torch.float64)[:, None]
    mech = mechanism("dp_sgd", torch.float64, clip="automatic", clip_norm=5)
    found = mech.clipped_sum(DenseGradients(rows.clone()))
    want = (rows / (rows.norm(dim=1, keepdim=True) + 0.01)).sum(0)
    torch.testing.assert_close(found, want, rtol=2e-5, atol=1e-8)
    torch.testing.assert_close(mech.decode(found), 5 * found)

    v, algorithm = view(dtype=torch.float64), build("gep", k=20, clip="automatic", clip_embedding=4, clip_residual=2)
    basis, found = algorithm.basis(v, 0), algorithm.mechanism(v, 0).clipped_sum(DenseGradients(rows.clone()))
    w = DenseGradients(rows.clone()).project(basis)
    residuals = rows - basis.expand(w)
    parts = [part / (part.norm(dim=1, keepdim=True) + 0.01) for part in (w, residuals)]
    torch.testing.assert_close(found, torch.cat(parts, 1).sum(0), rtol=1e-3, atol=1e-3)  # the slack of a residual


@pytest.mark.parametrize(("name", "clip"), [(name, None) for name in CONFIGS] + AUTOMATIC)
def test_contributions_add_up_to_the_sum(name, clip):
    """Also one row at a time, through the sum itself; with AdaMix's projection: to what decode keeps of it."""
    clips = {"clip": clip} if clip else {}
    mech, algorithm = mechanism(name, **clips), build(name)
    assert mech.contributions is not None
    rows = torch.randn(7, 650) * torch.logspace(-3, 3, 7)[:, None]
    found = mech.contributions(DenseGradients(rows.clone()))
    assert found.shape == (7, mech.size)
    assert found.double().norm(dim=1).max() <= mech.sensitivity
    kept = (lambda s: mech.decode(s) - mech.decode(0 * s)) if getattr(algorithm, "rank", None) else None
    for part in (rows, *rows.split(1)):
        total = mech.clipped_sum(DenseGradients(part.clone())).to(found.dtype)  # as the loop gives it to decode
        own = mech.contributions(DenseGradients(part.clone())).sum(0)
        if kept is not None:
            total, own = kept(total), kept(own)
        torch.testing.assert_close(own, total, rtol=1e-3, atol=1e-3)  # GEP's residuals have a slack of 5e-4
    if kept is not None:  # projected already
        alone = mech.clipped_sum(DenseGradients(rows[:1].clone())).to(found.dtype)
        torch.testing.assert_close(kept(found[0]), kept(alone))
        assert found.norm(dim=1).min() < 0.999 * mech.sensitivity


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("groups", ["layers", "slices"])
def test_gep_is_the_written_out_algorithm(residual, groups):
    """GEP, Algorithm 1, lines 9 to 15, with every residual row held; rows in the span of the basis included."""
    v = view(dtype=torch.float64)
    algorithm = build("gep", k=20, clip_embedding=4.0, clip_residual=1.5, residual=residual, groups=groups)
    mech, basis = algorithm.mechanism(v, 0), algorithm.basis(v, 0)
    b = torch.zeros(650, basis.size, dtype=torch.float64)
    column = 0
    for s, block in zip(basis.slices, basis.blocks, strict=True):
        b[s, column : column + block.shape[1]] = block
        column += block.shape[1]
    torch.testing.assert_close(b.T @ b, torch.eye(basis.size, dtype=torch.float64))

    rows = torch.randn(9, 650, dtype=torch.float64) * torch.logspace(-2, 1, 9, dtype=torch.float64)[:, None]
    w = rows @ b
    r = rows - w @ b.T
    w_sum = (w * (4.0 / w.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    r_sum = (r * (1.5 / r.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    want = torch.cat([w_sum / 4.0, r_sum / 1.5]) if residual else w_sum / 4.0
    found = mech.clipped_sum(DenseGradients(rows.clone()))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)  # the slack of a residual's norm is 5e-4
    direction = b @ w_sum + r_sum if residual else b @ w_sum
    torch.testing.assert_close(mech.decode(found), direction, rtol=1e-3, atol=1e-3)
    assert mech.sensitivity == (math.sqrt(2) if residual else 1.0)


def test_gep_without_clipping_is_unbiased():
    """Embedding and residual put together again are the gradient (GEP, Remark 1); the embedding alone is not."""
    rows = torch.randn(5, 650, dtype=torch.float64)
    wide = {"clip_embedding": 1e6, "clip_residual": 1e6}
    full, biased = (mechanism(name, torch.float64, **wide) for name in ("gep", "b_gep"))
    found, part = (mech.decode(mech.clipped_sum(DenseGradients(rows.clone()))) for mech in (full, biased))
    torch.testing.assert_close(found, rows.sum(0), rtol=1e-4, atol=1e-4)
    assert (part - rows.sum(0)).norm() > 1


def test_labels_are_drawn_anew_at_each_step_or_once():
    fresh, once = build("gep", k=20), build("gep", k=20, redraw=False)

    def labels_of(algorithm, step):
        seen = []
        v = view()
        spy = lambda x, y, *how: seen.append(y) or v.gradients.blocks(x, y, *how)  # noqa: E731
        algorithm.basis(v._replace(gradients=SimpleNamespace(blocks=spy, offsets=v.gradients.offsets, size=650)), step)
        return seen[0]

    assert not torch.equal(labels_of(fresh, 0), labels_of(fresh, 1))
    assert torch.equal(labels_of(once, 0), labels_of(once, 1))
    labels = random_labels(np.random.default_rng(0), 5000, 10, multi_label=False)
    assert np.abs(np.bincount(labels, minlength=10) / 5000 - 0.1).max() < 0.02
    rows = random_labels(np.random.default_rng(0), 50, 10, multi_label=True)
    assert torch.equal(rows.argmax(1), labels[:50])
    assert torch.equal(rows.sum(1), torch.ones(50))


def test_bfloat16_public_gradients_leave_the_basis_orthonormal():
    basis = build("gep", k=20, public_precision="bfloat16").basis(view(), 0)
    for block in basis.blocks:
        assert block.dtype == torch.float32
        torch.testing.assert_close(block.T @ block, torch.eye(block.shape[1]), atol=1e-5, rtol=0)


def test_what_follows_a_row_of_gradients_in_memory_is_zero():
    """Some processors multiply it, in bfloat16, by zero: a NaN that is left in memory would spoil the basis."""
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        rows = view().gradients._memory(40, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    whole = rows.as_strided((40, rows.stride(0)), (rows.stride(0), 1))
    assert whole.shape[1] > rows.shape[1]
    assert (whole[:, rows.shape[1] :] == 0).all()


def test_basis_of_few_public_examples_is_capped():
    assert build("gep", k=8).basis(view(m=8), 0).size <= 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"k": 41}, "algorithm.k=41 is more than the 40 public"),
        ({"k": 0}, "algorithm.k=0"),
        ({"_target_": "pubsel.nothing.Here"}, "algorithm._target_"),
    ],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(UsageError, match=says):
        build("gep", **({"k": 20} | changes)).check(view())


def test_every_algorithm_file_builds_and_each_method_has_one_of_its_name():
    files = [path.stem for path in (CONF / "algorithm").glob("*.yaml")]
    assert {build(name).name for name in files} <= set(files)
    assert {"dp_sgd", "gep", "dp_md", "second_phase", "adamix", "ppgd", "pillar", "adadps"} <= set(CONFIGS)


def test_given_labels_are_used_and_must_fit():
    """GEP, Table 5: the public images' own labels; refused where they are not of the private task."""
    v = view()
    algorithm = build("gep", k=20, labels="given")
    first, second = algorithm.basis(v, 0), algorithm.basis(v, 0)
    assert all(torch.equal(a, b) for a, b in zip(first.blocks, second.blocks, strict=True))
    with pytest.raises(UsageError, match="needs public labels of the private task"):
        algorithm.basis(v._replace(public=Split(v.public.x, v.public.y + 10)), 0)


def test_no_attribute_of_an_algorithm_is_read_by_name():
    """What the program needs of one is in `Algorithm` or a protocol."""
    texts = [path.read_text() for path in (CONF.parent / "pubsel").rglob("*.py")]
    assert len(texts) > 100
    assert not [found for text in texts if (found := re.search(r"(get|has)attr\(\w*\.?algorithm\b.*", text))]
