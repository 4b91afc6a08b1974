"""Measurements while a network trains, against gradients taken one by one; and runs that are stopped and resume."""

import numpy as np
import pandas
import pytest
import torch
from scipy.linalg import subspace_angles

from pubsel.cell import Cell, weights_digest
from pubsel.data import Reader, public_examples
from pubsel.gradients.matrix import random_labels
from pubsel.messages import UsageError
from pubsel.papers import draw
from pubsel.papers.theory import during_training
from pubsel.privacy.sampling import Schedule, poisson_sample
from pubsel.release import run
from pubsel.rules import canonical
from pubsel.settings.identity import identity_of
from pubsel.training.loop import public_stream
from pubsel.training.once import training_secret
from tests.made import checked

WORDS = """+experiment=quickstart algorithm=non_private training.steps=6 training.batch_size=60 pair.m=50
    threads=1""".split()
MEASURED = ["distance.labels=given", "distance.normalise_rows=false"]
SETS = ["sets=[digits,noise]"]


def measured(tmp_path, name, *options):
    draw.run(checked("figure", f"figure={name}", *WORDS, *MEASURED, f"results={tmp_path}", *options))
    (path,) = (tmp_path / "figures").glob(f"{name}-*.csv")
    return pandas.read_csv(path, comment="#")


class First:
    """Weights before the first step and its batch, and gradients at them taken one by one, float64."""

    def __init__(self):
        self.settings = canonical(checked("run", *WORDS))
        torch.set_num_threads(self.settings.threads)  # part of the key of the batch
        cell = Cell.of(self.settings)
        self.task = cell.load_task()
        self.model = cell.network(self.task)
        plan, spend, _ = cell.guarantee(len(self.task.private.x))
        secret = training_secret(cell, self.task, self.model, plan, spend)
        chosen = poisson_sample(secret("sample", 0), plan.n, plan.rate)
        self.model = self.model.double()
        self.batch = self.rows(self.task.private.x[chosen], self.task.private.y[chosen])

    def rows(self, x, y):
        rows = []
        for one, label in zip(x, y, strict=True):
            loss = torch.nn.functional.cross_entropy(self.model(one[None]), label[None])
            parts = torch.autograd.grad(loss, list(self.model.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)

    def public(self, name):
        """With the random labels of the step."""
        pair = self.settings.pair
        split, _ = public_examples(name, 50, self.task.private, Reader("nowhere"), pair.convert, "digits")
        return self.rows(split.x, random_labels(public_stream(identity_of(self.settings))("labels", 0), 50, 10, False))


@pytest.fixture(scope="module")
def first():
    return First()


def test_singular_values_are_those_of_gradients_taken_one_by_one(first, tmp_path):
    frame = measured(tmp_path, "gsd_figure3", *SETS, "points=2")
    assert sorted(set(frame["step"])) == [0, 5]
    for name, rows in {"digits (private batch)": first.batch, "noise": first.public("noise")}.items():
        found = frame[(frame["step"] == 0) & (frame["examples"] == name)]
        want = torch.linalg.svdvals(rows)
        large = int((want > 1e-3 * want[0]).sum())
        assert len(found) == len(rows)
        np.testing.assert_allclose(found["singular_value"][:large], want[:large], rtol=1e-3)
        np.testing.assert_allclose(found["energy"], want.square().cumsum(0) / want.square().sum(), rtol=1e-4)


def test_stable_ranks_of_groups_are_those_of_their_columns(first, tmp_path):
    frame = measured(tmp_path, "gep_figure2", "points=1").set_index("group")
    sizes = frame["p"].drop("all")
    assert frame.loc["all", "p"] == sizes.sum() == first.batch.shape[1]
    parts = dict(zip(sizes.index, first.batch.split(list(sizes), dim=1), strict=True)) | {"all": first.batch}
    for group, part in parts.items():
        want = float(part.square().sum() / torch.linalg.matrix_norm(part, 2) ** 2)
        assert frame.loc[group, "stable_rank"] == pytest.approx(want, rel=1e-4)


def test_lemma_4_1_is_measured_as_it_is_stated(first, tmp_path):
    frame = measured(tmp_path, "gsd_lemma41", *SETS, "k=[1,4]", "points=1")
    assert len(frame) == 4
    _, s, vt = torch.linalg.svd(first.batch, full_matrices=False)
    for row in frame.itertuples():
        v = torch.linalg.svd(first.public(row.public), full_matrices=False).Vh[: row.k].T
        angles = subspace_angles(vt[: row.k].T.numpy(), v.numpy())
        metric, left = np.sqrt(np.sum(np.sin(angles) ** 2)), float(s[row.k] / s[0])
        error = torch.linalg.matrix_norm(first.batch - first.batch @ v @ v.T, 2) / s[0]
        assert (row.s_1, row.s_next, row.gsd, row.error) == pytest.approx(
            (float(s[0]), left, metric, float(error)), rel=1e-3
        )
        assert row.stated == pytest.approx(np.sqrt(2) * metric + left, rel=1e-3)
        assert row.reported == pytest.approx(np.sqrt(2 / row.k) * metric + left, rel=1e-3)
        assert row.largest_row <= row.error <= min(row.sharp, row.trivial) <= row.stated


def test_gsd_is_that_of_algorithm_1_on_batch_and_public_images(first, tmp_path):
    """With given labels, rows as they are, and as many public images as the batch holds, nothing is drawn at random."""
    n = len(first.batch)
    words = ["sets=[digits]", "k=[3]", "points=1", f"pair.m={n}", "distance.parameters=all"]
    frame = measured(tmp_path, "gsd_figure1", *words)
    convert = first.settings.pair.convert
    split, _ = public_examples("digits", n, first.task.private, Reader("nowhere"), convert, "digits")
    public = first.rows(split.x, split.y)
    bases = [torch.linalg.svd(rows, full_matrices=False).Vh[:3].T.numpy() for rows in (first.batch, public)]
    want = np.sqrt(np.sum(np.sin(subspace_angles(*bases)) ** 2) / 3)
    assert frame["gsd"][0] == pytest.approx(want, rel=1e-3)


def test_projection_error_falls_with_k_and_is_that_of_the_mean_gradient(tmp_path):
    frame = measured(tmp_path, "gep_figure4", *SETS, "k=[5,50]", "points=2")
    assert set(zip(frame["public"], frame["labels"], strict=True)) == {
        ("digits", "random labels"),
        ("digits", "own labels"),
        ("noise", "random labels"),
    }
    whole = frame[frame["group"] == "all"].pivot(
        index=["step", "public", "labels"], columns="k", values="projection_error"
    )
    assert (whole[50] < whole[5]).all()
    assert whole.to_numpy().max() <= 1
    random = measured(tmp_path, "gep_figure7", "k=[5]", "points=2")
    assert (random[random["group"] == "all"]["projection_error"] > 0.97).all()  # 5 of 14,000 dimensions


def test_residuals_of_a_far_set_are_the_gradients_nearly(tmp_path):
    frame = measured(tmp_path, "gep_figure5", *SETS, "k=[30]", "points=1")
    ranks = frame.pivot(index="group", columns="matrix", values="stable_rank")
    assert (ranks["residuals, digits"] != ranks["gradients"]).all()
    near, far = (abs(ranks[f"residuals, {name}"] / ranks["gradients"] - 1) for name in ("digits", "noise"))
    assert far.mean() < near.mean()
    assert frame.groupby("matrix")["vectors"].sum().to_dict()["residuals, digits"] <= 30


def test_what_trains_is_what_pubsel_run_trains(tmp_path, monkeypatch):
    built, network = [], Cell.network
    monkeypatch.setattr(Cell, "network", lambda *words: built.append(network(*words)) or built[-1])
    measured(tmp_path, "gep_figure2", "points=3")
    record = run.run(checked("run", *WORDS, f"results={tmp_path}", "distance=none"))
    assert weights_digest(built[0]) == record["weights"]


def test_what_was_stopped_goes_on_and_ends_alike_and_what_is_finished_is_not_trained_again(tmp_path, monkeypatch):
    words = ["gsd_figure1", *SETS, "k=[3]", "points=3", "training.checkpoint_seconds=0"]
    whole = measured(tmp_path / "whole", *words)
    real, calls = during_training.FIGURES["gsd_figure1"], []

    def dies(at):
        calls.append(at.step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real.measure(at)

    monkeypatch.setitem(during_training.FIGURES, "gsd_figure1", real._replace(measure=dies))
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "stopped", *words)
    assert not (tmp_path / "stopped" / "figures").exists()
    pandas.testing.assert_frame_equal(measured(tmp_path / "stopped", *words), whole)
    assert len(calls) == len(set(whole["step"])) + 1  # the third moment twice, no other
    paths = sorted((tmp_path / "stopped" / "figures").iterdir())
    assert [path.suffix for path in paths] == [".csv", ".pdf", ".svg"]
    before = [path.read_bytes() for path in paths]
    assert before[0].startswith(b"# Not differentially private")
    monkeypatch.setattr(during_training, "fit", None)
    measured(tmp_path / "stopped", *words)
    assert [path.read_bytes() for path in paths] == before


def test_moments_are_even_and_more_in_the_first_epoch():
    plan = Schedule(1000, 0.1, 100, 100)
    assert during_training.moments(plan, 4, False) == {0, 33, 66, 99}
    assert during_training.moments(plan, 4, True) == {0, 3, 6, 9, 33, 66, 99}
    assert during_training.moments(plan._replace(steps=5), 10, True) == {0, 1, 2, 3, 4}


def test_order_kept_counts_moments_in_the_order_of_the_first():
    values = {0: (1, 2, 3), 7: (1, 3, 2), 8: (2, 3, 4), 9: (3, 2, 4)}  # of a, b and c at each step
    rows = [(step, name, value) for step, at in values.items() for name, value in zip("abc", at, strict=True)]
    frame = pandas.DataFrame(rows, columns=["step", "public", "gsd"]).assign(k=16)
    assert during_training.order_kept(frame) == (2, 3, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsd_figure1", "pair.public=null"], "sets="),
        (["gep_figure4", *SETS, "k=[51]"], "pair.m=50"),
        (["gep_figure7", "k=[0]"], "k=0"),
        (["gep_figure7", "k=[many]"], "k"),
        (["gsd_figure1", "sets=[[digits,noise]]"], "single sets"),
        (["gep_figure2", "privacy.secure_noise=true"], "secure_noise"),
        (["gep_figure2", "model=pixels"], "model.backbone"),
        (["gsd_lemma41", *SETS, "k=[40]", "training.batch_size=20"], "k=40"),
        (["gsd_figure1", "sets=[nowhere_at_all]"], "nowhere_at_all"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(tmp_path, words, said):
    with pytest.raises(UsageError, match=said) as error:
        measured(tmp_path, *words)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "figures").exists()
