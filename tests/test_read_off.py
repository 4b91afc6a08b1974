"""Figures that are read off the cells of curves: which k, which drop, which start, as many examples of which kind."""

import pytest
from test_figures import drawn, swept

from pubsel.papers import figures, read_off


def of_test(*words, public=None, pair=None, **more):
    """A run of `swept` that a curve selects by test utility, with a public set and a pair."""
    made = swept(*words, **more)
    made["settings"]["pair"] = {"public": public} | (pair or {})
    made["selection"]["test"] = made["utility"]
    return made | {"public": public}


def by_k(epsilon, best, **more):
    """Runs of PILLAR with three k, of which `best` has the best utility."""
    return [swept("pillar", epsilon, utility=0.8 if k == best else 0.5, k=k, **more) for k in (10, 40, 160)]


def test_the_best_k_is_that_of_the_selection():
    records = [*by_k(0.1, 10), *by_k(0.7, 40), *by_k(None, 160), *by_k(0.1, 40, private="kagchest")]
    records += by_k(0.7, 40, private="kagchest")
    records += [swept("pillar", epsilon, private="mnist", k=10) for epsilon in (0.1, 0.7)]  # nothing was chosen
    frame = read_off.best_k(records)
    assert list(zip(frame["private"], frame["k"], strict=True)) == [
        ("flowers5", 10),
        ("flowers5", 40),
        ("flowers5", 160),
        ("kagchest", 40),
        ("kagchest", 40),
    ]


def test_the_drop_is_the_share_of_the_accuracy_without_a_guarantee_seed_by_seed():
    records = [swept("pillar", None, seed, utility=u, k=5) for seed, u in enumerate((0.8, 0.5, 0.9))]
    records += [swept("pillar", 0.1, seed, utility=u, k=5) for seed, u in enumerate((0.4, 0.4))]
    records += [swept("pillar", 0.1, utility=0.5, private="kagchest", k=5)]  # nothing to compare with
    frame = read_off.drop(records)
    assert frame[["private", "epsilon", "seeds"]].to_numpy().tolist() == [["flowers5", 0.1, 2]]
    assert frame["drop"][0] == pytest.approx((50 + 20) / 2)
    assert frame["std"][0] == pytest.approx(30 / 2**0.5)


def test_the_drop_has_a_bar_for_each_model():
    records = []
    for private, model, utility in (("a", "m", 0.4), ("a", "n", 0.6), ("b", "m", 0.3), ("b", "n", 0.7)):
        runs = [
            swept("pillar", None, private=private, utility=0.8),
            swept("pillar", 0.1, private=private, utility=utility),
        ]
        records += [run | {"model": model} for run in runs]
    (axis,) = read_off.draw_drop(read_off.drop(records)).axes
    assert sorted(bar.get_height() for bar in axis.patches) == pytest.approx([12.5, 25, 50, 62.5])


def test_examples_a_class_are_public_shots_or_the_share_of_private_ones():
    public = [
        of_test("only_public", None, pair={"shots": n}, public="mnist", private="mnist", utility=n / 50)
        for n in (5, 20)
    ]
    runs = [(epsilon, n) for epsilon in (1.0, 3.0) for n in (500, 1000)]
    private = [
        of_test("fully_private", epsilon, pair={"private_share": n / 60000}, private="mnist") | {"private_examples": n}
        for epsilon, n in runs
    ]
    others = [*public, *private]  # of the table, not of the study
    public, private = ([run | {"label": "shots"} for run in runs] for runs in (public, private))
    assert read_off.samples(others).empty
    frame = read_off.samples([*public, *private, *others])
    assert list(zip(frame["line"], frame["x"], strict=True)) == [
        ("public", 5),
        ("public", 20),
        ("private, ε = 1", 50),
        ("private, ε = 1", 100),
        ("private, ε = 3", 50),
        ("private, ε = 3", 100),
    ]
    assert read_off.samples([*public, *private[:1]]).empty
    assert read_off.samples(public).empty


def boosted(utility, algorithm="adamix", epsilon=3.0, shots=5, seed=0):
    """A run of the study of public examples; the paragon has none, and so no draw of them."""
    public = {"public": "mit67", "pair": {"shots": shots, "seed": seed}} if algorithm != "paragon" else {}
    of = of_test(algorithm, epsilon, private="mit67", utility=utility, **public)
    return of | {"label": "shots", "seed": seed, "identity": f"{algorithm}-{epsilon}-{shots}-{seed}"}


def test_the_boost_is_what_private_data_add_of_what_they_could():
    ends = [
        boosted(u, "only_public", None, n, seed)
        for n, pair in ((5, (0.3, 0.5)), (20, (0.7, 0.7)))
        for seed, u in enumerate(pair)
    ]
    ends += [boosted(0.8, "paragon", None, None, seed) for seed in (0, 1)]
    mixed = [
        boosted(u, shots=n, seed=seed) for n, pair in ((5, (0.6, 0.7)), (20, (0.7, 0.7))) for seed, u in enumerate(pair)
    ]
    alone = [boosted(0.9, "ppgd"), boosted(0.9, shots=40)]  # one number of public examples; no run on public data alone
    third = [boosted(0.1, shots=5, seed=2)]  # a seed that nothing else has
    frame = read_off.boost([*ends, *mixed, *alone, *third])
    assert frame[["line", "x", "seeds"]].to_numpy().tolist() == [["adamix, ε = 3", 5, 2], ["adamix, ε = 3", 20, 2]]
    assert list(frame["boost"]) == pytest.approx([0.4 / 0.15, 1])
    # without the one seed 0.3 / 0.1, without the other 0.5 / 0.2
    assert frame["std"][0] == pytest.approx(abs(3 - 2.5) / 2)
    assert read_off.boost(mixed).empty


def test_a_boost_is_infinite_where_a_private_method_learns_as_much_as_without_privacy(tmp_path):
    ends = [boosted(0.3, "only_public", None, n) for n in (5, 20)] + [boosted(0.8, "paragon", None, None)]
    frame = read_off.boost([*ends, boosted(0.8), boosted(0.7, shots=20)])
    assert list(frame["boost"]) == pytest.approx([float("inf"), 5])
    drawn(read_off.draw_boost(frame), tmp_path)


def started(algorithm="adamix_clip", model="clip_rn50", utility=0.5, rate=0.1, shots=5, **more):
    pretrained = {"pretrain_epochs": 200} | more
    made = of_test(
        algorithm, 3.0, utility=utility, rate=rate, pair={"shots": shots}, public="mit67", private="mit67", **pretrained
    )
    return made | {"model": model, "identity": f"{made['identity']}-{model}-{pretrained}-{rate}-{shots}"}


def test_clip_is_named_by_what_it_starts_from_next_to_adamix_on_the_same_data():
    records = [
        started("adamix", "resnet50_sl", 0.6),
        started("adamix", "resnet50_sl", 0.5, rate=0.2),
        started("adamix", "resnet50_sl", 0.9, shots=40),  # other data
        started(utility=0.8),
        started(utility=0.3, pretrain_epochs=0),
        started(utility=0.7, pretrain_epochs=0, text_model="RN50"),
    ]
    frame = read_off.initialisation(records)
    bars = zip(frame["model"], frame["start"], frame["utility"].round(6), strict=True)
    assert list(bars) == [
        ("clip_rn50", "zero", 30),
        ("clip_rn50", "language", 70),
        ("clip_rn50", "public", 80),
        ("resnet50_sl", "public", 60),
    ]
    assert not frame["setting"].any()
    assert read_off.initialisation(records[:3]).empty


def test_another_domain_is_a_line_of_its_own_of_its_study():
    domains = ("domainnet_painting", "domainnet_real")
    runs = [of_test("adamix", e, public=p, private=domains[0], utility=e / 10) for p in domains for e in (1.0, 3.0)]
    runs += [of_test("only_public", None, public=p, private=domains[0], utility=0.1) for p in domains]
    runs += [of_test("adamix", e, public="mit67", private="mit67") for e in (1.0, 3.0)]
    for i, run in enumerate(runs):
        run |= {"identity": str(i), "label": "domains" if run["private"] == domains[0] else "paper"}
    curve = figures.CURVES["adamix_domains"]
    frame, _ = figures.points(curve, runs)
    assert set(frame["private"]) == {"domainnet_painting"}
    named = [f"{algorithm}\npublic={public}" for algorithm in ("adamix", "only_public") for public in domains]
    assert list(dict.fromkeys(frame["line"])) == named


def test_gep_and_b_gep_are_lines_against_k():
    runs = [
        of_test(a, 8.0, public="imagenet", private="cifar10", k=k, utility=0.6)
        for a in ("b_gep", "gep")
        for k in (500, 1000)
    ]
    for run in runs:
        run["settings"]["model"] = {}
    curve = figures.CURVES["gep_k"]
    frame, _ = figures.points(curve, runs)
    assert list(zip(frame["line"], frame["x"], strict=True)) == [
        ("gep", 500),
        ("gep", 1000),
        ("b_gep", 500),
        ("b_gep", 1000),
    ]
