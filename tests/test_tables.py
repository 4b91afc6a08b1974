import copy
import json
import math

import numpy as np
import pandas
import pytest
from scipy import stats

from pubsel import records
from pubsel.messages import UsageError, UserError
from pubsel.papers import join, report, typeset
from pubsel.settings.keys import TableConfig
from tests.synthetic import record, save, table

ROWS = """
    gsd_table1=7 gsd_table2=12 gsd_table3=5 gsd_table4=4 gsd_table8=8 gsd_table9=2 gsd_table10=6 gsd_table11a=4
    gsd_table11b=4 gsd_table12=4 gsd_table13a=5 gsd_table13b=5 gsd_table14=31 gsd_table15=7 gsd_table16=9
    gep_table1=36 gep_table3=13 gep_table5=4 gep_table6=6 workshop_table2=4 pillar_table2=126 pillar_table3=8
    pillar_table4=12 pillar_table6=12 pillar_table7=16 pillar_table8=16 pillar_table9=12 adamix_table1=48
    published=3
"""  # of each table as counted in the papers
PAPER_ROWS = {name: int(rows) for name, rows in (table.split("=") for table in ROWS.split())}
DATASETS = """cifar10 cifar100 svhn svhn_extra mnist fashion_mnist flowers102 mnist_m imagenet chestxray14 stylegan
    sprxray chexpert kagchest kneeos ham10000 kagskin flower16 gtsrb dermnet pcam pneumonia cifar10_1
    openml_riccardo openml_guillermo oxford_flowers cub200 stanford_dogs mit67 oxford_pets caltech256""".split()
MODELS = [
    None,
    *"""fmnist_cnn resnet20 resnet152 resnet152_simclr densenet121 vit mnist_cnn probe
    resnet50_sl resnet50_byol resnet50_ssl resnet50_im32 convnext_xl logistic wrn_16_4 wrn_40_4""".split(),
]
ALGORITHMS = [
    None,
    *"""gep b_gep dp_sgd dp_md second_phase non_private pate dp_pca jl adadps pillar dp_raft
    dp_raft_pillar de_et_al only_public fully_private ppgd adamix paragon dp_randp dope_sgd""".split(),
]
COMMON = "private public model algorithm epsilon delta metric utility utility_std distance".split()
EXTRA = """m labels task2vec otdd improvement attack gsd_values features private_examples known_members
    success_rate k public_percent public_share public_data inferred test_error_percent shots""".split()


def ranks_of(name, folder):
    return join.make(name, records.read_records(folder)).ranks


def fashion(frame, **where):
    """Return the rows of Fashion-MNIST where the columns have these values (None: empty)."""
    rows = frame[frame["private"] == "fashion_mnist"]
    for column, value in where.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return rows


# Cells


def test_seeds_of_one_cell_are_averaged_with_the_sample_deviation(tmp_path):
    save(tmp_path, record(0, 0.80, (0.3, 0.4)), record(1, 0.82, (0.5, 0.6)), record(2, 0.87, (0.7, 0.8)))
    row = fashion(table("gsd_table2", tmp_path), public="fashion_mnist").iloc[0]
    assert (row["seeds"], row["utility"], row["distance"]) == (3, 83.0, 0.55)
    assert row["utility_std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2), abs=0.005)
    assert row["distance_std"] == pytest.approx(math.sqrt(2 * (0.25**2 + 0.15**2 + 0.05**2) / 5), abs=5e-5)
    assert row["difference"] == pytest.approx(83 - 85.25)


OTHERS = {"algorithm__k": 250, "pair__m": 1000, "label": "tuned", "public": "mnist", "algorithm": "dp_sgd"}


@pytest.mark.parametrize(("key", "value"), [*OTHERS.items(), ("algorithm__new_key", None)])
def test_records_that_differ_in_more_than_the_seed_are_never_averaged(tmp_path, key, value):
    save(tmp_path, record(0, 0.6), record(1, 0.8, **{key: value}))
    frame = table("gsd_table2", tmp_path)
    ours = fashion(frame).dropna(subset="utility")
    assert sorted(ours["utility"]) == [60, 80]
    assert list(ours["seeds"]) == [1, 1]
    telling = ["public", "algorithm", "label", "setting"]
    assert len(ours[telling].drop_duplicates()) == 2


def test_the_setting_column_names_what_differs_and_nothing_else(tmp_path):
    save(tmp_path, record(0, algorithm__k=250), record(0, algorithm__k=1000), record(0, public="mnist"))
    frame = table("gsd_table2", tmp_path)
    assert sorted(fashion(frame)["setting"].dropna()) == ["algorithm.k=1000", "algorithm.k=1000", "algorithm.k=250"]
    alone = table("gsd_table2", save(tmp_path / "alone", record(0), record(1)))
    assert alone["setting"].isna().all()


def test_two_copies_of_one_run_are_refused_and_both_named(tmp_path):
    one, two = record(), copy.deepcopy(record()) | {"identity": "synthetic-copy"}
    with pytest.raises(UserError, match="synthetic-copy") as caught:
        table("gsd_table2", save(tmp_path, one, two))
    assert one["identity"] in str(caught.value)


@pytest.mark.parametrize("privacy", [{"valid": False}, {}, None])
def test_one_record_without_a_guarantee_makes_the_cell_invalid(tmp_path, privacy):
    save(tmp_path, record(0), record(1) | {"privacy": privacy, "commit": "b"})
    row = fashion(table("gsd_table2", tmp_path), public="fashion_mnist").iloc[0]
    assert row["valid"] == False  # noqa: E712  (pandas.NA would be neither)
    assert row["commits"] == 2


@pytest.mark.parametrize("said", [{"weak": True, "delta": 1e-5}, {"delta": 1e-3}], ids=["said", "older record"])
def test_a_delta_above_one_in_n_is_nowhere_called_valid_without_the_word_weak(tmp_path, said):
    weak = record(1) | {"privacy": {"valid": True, **said}, "private_examples": 2000}
    right = record(0) | {"privacy": {"valid": True, "delta": 1e-5}, "private_examples": 2000}
    save(tmp_path, right, weak)
    row = fashion(table("gsd_table2", tmp_path), public="fashion_mnist").iloc[0]
    assert row["valid"] == "weak"
    for one, kind in ((right, "valid"), (weak, "weak"), (record(2) | {"privacy": None}, "none")):
        assert records.guarantee_kind(one) == kind
    made = join.make("gsd_table2", records.read_records(tmp_path))
    shown, constant = typeset.columns(made.frame)
    (column,) = (column for column in shown if column.key == "valid")
    assert "weak" in column.texts()
    assert not any("valid" in text for text in constant)
    assert any("1 rows of ours have a weak privacy guarantee" in note for note in typeset.notes(made))
    assert ",weak," in records.as_csv(made.frame)
    page = report.page([right, weak])
    assert "weak guarantee, delta above 1/n</dt><dd>1</dd>" in page


# Joins


def test_records_kept_with_the_code_count_unless_the_cell_was_run_again(tmp_path):
    records.write_record(tmp_path / "records" / "a.json", record(utility=0.1))
    records.write_record(tmp_path / "records" / "b.json", record(seed=1, utility=0.3))
    assert [one["utility"] for one in records.read_records(tmp_path)] == [0.1, 0.3]
    save(tmp_path, record(utility=0.2))
    assert [one["utility"] for one in records.read_records(tmp_path)] == [0.2, 0.3]


def test_without_records_a_table_is_the_papers_and_ours_is_empty(tmp_path):
    frame = table("gsd_table2", tmp_path)
    paper = frame[frame["label"] == "paper"]
    assert len(paper) == 12
    assert list(paper["paper_utility"])[:4] == [58.63, 57.64, 56.75, 52.16]
    assert frame[["utility", "utility_std", "seeds", "distance", "difference", "valid", "commits"]].isna().all().all()
    assert len(frame[frame["label"] == "tuned"]) == 3
    assert set(frame[frame["label"] == "tuned"]["algorithm"]) == {"dp_sgd"}


def ranked(private, model="probe", seed=0, distance=None, **values):
    """A synthetic record of `pubsel rank`."""
    by = {"name": distance} if distance else {"k": 16}
    settings = {"seed": seed, "private": private, "public": list(values), "distance": by}
    of = {"identity": f"{private}-{seed}", "private": private, "model": model, "values": values}
    return of | {"settings": settings, "order": [], "privacy": "not private"}


def test_distances_of_rank_stand_beside_the_papers_where_nothing_trains(tmp_path):
    """Table 14's probe column: by `pubsel rank`, on images that the paper knows by another name."""
    of_lesions = ranked("ham10000_224", ham10000_224=[0.4, 0.5], kagskin=[0.6, 0.8])
    for one in (ranked("chestxray14", kagchest=[0.5]), of_lesions, ranked("mnist", kagchest=[0.1])):
        records.write_record(tmp_path / "ranks" / one["identity"] / "result.json", one)
    trained = record(public="kagskin", algorithm="second_phase", utility=0.86, values=(0.7,))
    save(tmp_path, trained | {"private": "ham10000_224", "model": "densenet121"})
    frame = table("gsd_table14", tmp_path)
    assert len(frame) == 31
    ours = frame.dropna(subset="distance").set_index(["private", "public", "model"])
    assert dict(ours["distance"]) == {
        ("chestxray14", "kagchest", "probe"): 0.5,
        ("ham10000", "ham10000", "probe"): 0.45,
        ("ham10000", "kagskin", "probe"): 0.7,
        ("ham10000", "kagskin", "densenet121"): 0.7,
    }
    probe = ours.loc[("ham10000", "ham10000", "probe")]
    assert (probe["paper_distance"], probe["distance_std"]) == (0.42, pytest.approx(0.0707, abs=1e-4))
    assert probe[["utility", "algorithm", "difference"]].isna().all()
    assert ours.loc[("ham10000", "kagskin", "densenet121"), "difference"] == pytest.approx(86 - 85.53)
    text = typeset.run(TableConfig(table="gsd_table14", results=str(tmp_path), debug=False))
    assert "0.450 ± 0.071" in text
    cells = join.table_cells("gsd_table14", records.read_records(tmp_path))
    assert [cell["algorithm"] for cell in cells] == ["second_phase"]
    assert table("gsd_table2", tmp_path)["distance"].isna().all()  # ranks belong where conf/tables says so


def test_a_table_shows_further_distances_of_rank_next_to_the_papers(tmp_path):
    """Table 4: Task2Vec in a column of its own, by the network of the row."""
    one = ranked("chestxray14", "resnet152", 0, "task2vec", chestxray14=[0.1, 0.2], kagchest=[0.3, 0.5])
    otdd = ranked("chestxray14", "resnet152", 1, "otdd", kagchest=[9.0, 9.0])
    other = ranked("chestxray14", "probe", 2, "task2vec", kagchest=[7.0])
    for rank in (one, otdd, other):
        records.write_record(tmp_path / "ranks" / rank["identity"] / "result.json", rank)
    trained = record(public="kagchest", utility=0.66, values=(0.4,))
    trained["settings"]["model"] = {"trained": ["fc"]}
    save(tmp_path, trained | {"private": "chestxray14", "model": "resnet152"})

    frame = table("gsd_table4", tmp_path).set_index("public")
    assert len(frame) == 4
    row = frame.loc["kagchest"]
    assert list(row[["utility", "distance", "distance_task2vec"]]) == [66, 0.4, 0.4]
    assert row["distance_task2vec_std"] == pytest.approx(0.1414, abs=1e-4)
    assert (row["paper_distance"], row["paper_distance_task2vec"]) == (0.36, 0.16)
    assert frame.loc["chestxray14", "paper_distance_task2vec"] == 0.052
    text = typeset.run(TableConfig(table="gsd_table4", results=str(tmp_path), debug=False))
    assert "Paper's distance, task2vec" in text

    # two records of one distance: none is taken silently
    records.write_record(tmp_path / "ranks" / "again" / "result.json", one | {"identity": "again"})
    with pytest.raises(UserError, match="both are task2vec: say which under further"):
        table("gsd_table4", tmp_path)


def cifar(m=2000, **changes):
    of = {"private": "cifar10", "public": "imagenet", "model": "resnet20", "epsilon": 8.0}
    return record(0, 0.75, pair__m=m) | of | changes


def test_table6_joins_on_m_and_table1_takes_m_2000_alone(tmp_path):
    save(tmp_path, cifar(m=1000), cifar(m=2000), cifar(m=4000, utility=0.70))
    frame = table("gep_table6", tmp_path)
    assert len(frame) == 6
    gep = frame[frame["algorithm"] == "gep"]
    assert list(gep["m"]) == [1000, 2000, 4000]
    assert list(gep["difference"]) == pytest.approx([0.4, 0.2, -5.2])
    assert gep["setting"].isna().all()
    first = table("gep_table1", tmp_path)
    assert len(first) == 36
    assert list(first["utility"].dropna()) == [75]


def test_pate_is_the_papers_own_number_only(tmp_path):
    frame = table("gep_table1", save(tmp_path, cifar(algorithm="pate")))
    pate = frame[frame["algorithm"] == "pate"]
    assert len(pate) == 9
    assert pate["utility"].isna().all()
    assert pate["paper_utility"].notna().all()


def test_an_unknown_table_lists_the_known(tmp_path):
    for name in ("nosuch", "../run", ""):
        with pytest.raises(UsageError, match="gep_table1, gep_table3, gep_table5"):
            table(name, tmp_path)


# Correlations


def test_correlations_by_hand_and_against_scipy(tmp_path):
    points = {"fashion_mnist": (0.1, 0.9), "flowers5": (0.2, 0.7), "mnist": (0.3, 0.8), "cifar100": (0.4, 0.6)}
    save(tmp_path, *(record(0, utility, (distance,), public) for public, (distance, utility) in points.items()))
    assert list(fashion(table("gsd_table2", tmp_path), public="cifar100")["utility"]) == [60]  # the paper has no row
    row = fashion(ranks_of("gsd_table2", tmp_path)).iloc[0]
    assert (row["pairs"], row["paper_pairs"]) == (4, 3)
    assert row["spearman"] == pytest.approx(1 - 6 * (9 + 0 + 0 + 9) / (4 * 15))  # rank differences 3, 0, 0, 3
    assert row["kendall"] == pytest.approx((1 - 5) / 6, abs=5e-5)
    distances, utilities = zip(*points.values(), strict=True)
    assert row["spearman"] == pytest.approx(stats.spearmanr(distances, utilities).statistic)
    assert (row["paper_spearman"], row["paper_kendall"]) == (-1, -1)


def test_uncertainty_of_a_rank_correlation(tmp_path):
    """Orders that every seed and initialisation agree on are certain; those that they do not are not."""

    def interval(name, noise):
        draw, publics = np.random.RandomState(0), ["fashion_mnist", "flowers5", "mnist", "cifar100"]
        made = []
        for place, public in enumerate(publics):
            values = tuple(0.1 * place + noise * draw.standard_normal(5))
            for seed in range(3):
                made.append(record(seed, 0.9 - 0.1 * place + noise * draw.standard_normal(), values, public))
        row = fashion(ranks_of("gsd_table2", save(tmp_path / name, *made))).iloc[0]
        return row["spearman_low"], row["spearman_high"]

    assert interval("certain", 1e-3) == (-1, -1)
    low, high = interval("uncertain", 0.3)
    assert -1 <= low < high <= 1
    assert high - low > 0.5
    publics = enumerate(["mnist", "flowers5", "cifar100"])
    one_seed = [record(0, 0.9 - 0.1 * i, (0.1 * i, 0.2 * i + 0.01), public) for i, public in publics]
    row = fashion(ranks_of("gsd_table2", save(tmp_path / "alone", *one_seed))).iloc[0]
    assert row["spearman"] == pytest.approx(-1)
    assert pandas.isna(row["spearman_low"])


# Files and text


def test_a_single_seed_shows_its_interval_and_several_their_deviation(tmp_path):
    one = record(public="mnist", utility=0.8) | {"utility_interval": [0.78, 0.825]}
    two = [record(seed, 0.8) | {"utility_interval": [0.7, 0.9]} for seed in (0, 1)]
    save(tmp_path, one, *two, record(public="flowers5"))  # the last is older
    frame = table("gsd_table2", tmp_path)
    rows = fashion(frame).dropna(subset="seeds").set_index("public")
    assert list(rows.loc["mnist", ["utility", "utility_low", "utility_high"]]) == [80, 78, 82.5]
    assert rows.loc[["fashion_mnist", "flowers5"], ["utility_low", "utility_high"]].isna().all(axis=None)
    text = typeset.run(TableConfig(table="gsd_table2", results=str(tmp_path), debug=False))
    assert "80.00 [78.00, 82.50]" in text
    assert "80.00 ± 0.00" in text
    assert "utility_low" not in text
    assert "bootstrap interval" in text


# The papers' numbers


def test_every_results_table_of_the_papers_is_there():
    assert {path.stem for path in join.PAPER.glob("*.csv")} == set(PAPER_ROWS)


@pytest.mark.parametrize("name", PAPER_ROWS)
def test_paper_tables_parse_and_hold_sensible_values(name):
    rows = join.paper_rows(f"{name}.csv")
    assert len(rows) == PAPER_ROWS[name]
    assert set(rows[0]) <= {*COMMON, *EXTRA}
    assert len({json.dumps(row) for row in rows}) == len(rows)
    for row in rows:
        assert None not in row  # a field too many
        assert row["private"] in DATASETS
        assert all(public in DATASETS for public in (row.get("public") or "cifar10").split("+"))
        assert row.get("model") in MODELS
        assert row.get("algorithm") in ALGORITHMS
        for column in ("utility", "success_rate"):
            assert row.get(column) is None or 3 < row[column] < 100
        assert row.get("distance") is None or 0 < row["distance"] < 1
        assert row.get("utility_std") is None or 0 < row["utility_std"] < 0.5
        assert row.get("metric") in (None, "accuracy", "auc")
        if row.get("algorithm") == "dp_sgd":
            assert row["public"] is None
            assert row["distance"] is None


@pytest.mark.parametrize(
    ("name", "where", "expected"),
    [
        ("gsd_table1", {"public": "sprxray"}, {"utility": 67.22, "utility_std": 0.21, "distance": 0.32}),
        ("gsd_table2", {"private": "svhn", "public": "mnist_m"}, {"utility": 89.08, "distance": 0.39}),
        ("gsd_table2", {"private": "fashion_mnist", "public": None}, {"utility": 79.77, "distance": None}),
        ("gsd_table3", {"public": "kagskin"}, {"utility": 85.53, "distance": 0.68, "model": "densenet121"}),
        ("gsd_table4", {"public": "kagchest"}, {"utility": 66.62, "task2vec": 0.16, "distance": 0.36}),
        ("gsd_table10", {"public": "cifar100"}, {"utility": 50.21, "algorithm": "dp_md"}),
        ("gsd_table13b", {"public": "kagchest"}, {"utility": 78.65, "distance": 0.93}),
        ("gsd_table14", {"public": "kagskin", "model": "vit"}, {"utility": 81.23, "distance": 0.76}),
        ("gsd_table15", {"public": "chexpert"}, {"otdd": 135292, "distance": 0.32}),
        ("gsd_table16", {"public": "chexpert+cifar100"}, {"utility": 67.12, "distance": 0.33}),
        ("gsd_table8", {"gsd_values": "with", "features": "gradients", "known_members": 1800}, {"success_rate": 50.31}),
        ("gsd_table9", {"known_members": 1800}, {"success_rate": 52.19}),
        ("gep_table1", {"private": "cifar10", "algorithm": "gep", "epsilon": 8}, {"utility": 74.9, "delta": 1e-5}),
        ("gep_table1", {"private": "svhn_extra", "algorithm": "pate", "epsilon": 2}, {"utility": 80.7, "delta": 1e-6}),
        ("gep_table3", {"algorithm": "b_gep", "epsilon": 0.1}, {"utility": 91.0, "utility_std": 0.07}),
        ("gep_table5", {"labels": "given"}, {"utility": 72.9, "utility_std": 0.31}),
        ("gep_table6", {"algorithm": "gep", "m": 4000}, {"utility": 75.2, "utility_std": 0.34}),
        ("pillar_table2", {"private": "cifar100", "algorithm": "pillar", "epsilon": 0.1}, {"utility": 28.3}),
        ("pillar_table9", {"model": "convnext_xl", "algorithm": "dp_raft_pillar", "epsilon": 1}, {"utility": 85.12}),
        ("adamix_table1", {"private": "mit67", "algorithm": "adamix", "epsilon": 3}, {"test_error_percent": 33.03}),
        ("workshop_table2", {"public": "kagchest"}, {"utility": 66.62, "distance": 0.36}),
    ],
)
def test_spot_values_retyped_from_the_papers(name, where, expected):
    rows = [r for r in join.paper_rows(f"{name}.csv") if all(r[key] == value for key, value in where.items())]
    assert len(rows) == 1
    assert {key: rows[0][key] for key in expected} == expected


def test_the_papers_gains_over_dp_sgd_are_their_own_differences():
    rows = join.paper_rows("gep_table1.csv")
    base = {(row["private"], row["epsilon"]): row["utility"] for row in rows if row["algorithm"] == "dp_sgd"}
    for row in rows:
        assert row["improvement"] == pytest.approx(row["utility"] - base[row["private"], row["epsilon"]], abs=0.01), row


def test_tables_that_repeat_each_other_agree():
    def cells(name):
        return {
            (r["private"], r["public"], r["model"], r["algorithm"]): (r["utility"], r["distance"])
            for r in join.paper_rows(f"{name}.csv")
        }

    everything = cells("gsd_table14")
    for name in ("gsd_table3", "gsd_table11a", "gsd_table11b", "gsd_table12", "gsd_table13a", "gsd_table13b"):
        common = {key: value for key, value in cells(name).items() if key[3] == "second_phase"}
        assert common.items() <= everything.items(), name


@pytest.mark.parametrize("name", join.table_names())
def test_each_table_of_conf_covers_its_papers_rows(name, tmp_path):
    spec = join.spec(name)
    frame = table(name, tmp_path)
    rows = join.paper_rows(spec.paper)
    assert len(frame[frame["label"] == "paper"]) == len(rows)
    for row in rows:
        if row["algorithm"] != "pate":  # a record of every other paper row would belong
            for key in ("private", "public", "model", "algorithm", "epsilon"):
                assert row[key] in spec.records.get(key, [row[key]]), (key, row)


def test_a_sixth_of_epsilon_protects_six_images_as_the_table_of_people_says() -> None:
    """Six steps between neighbours: six times epsilon, and delta times 1 + e^epsilon + ... + e^(5 epsilon)."""
    allowed = {0.05: 0.3, 0.1666: 1.0, 0.3333: 2.0}
    runs = [line.split() for line in join.spec("people").runs if "label=sixth" in line]
    given = [{key: float(value) for key, _, value in (word.partition("=") for word in words[2:])} for words in runs]
    assert {one["epsilon"] for one in given} == set(allowed)
    for one in given:
        assert 6 * one["epsilon"] <= allowed[one["epsilon"]] + 1e-12
        assert one["privacy.delta"] * sum(math.exp(i * one["epsilon"]) for i in range(6)) <= 1e-5
