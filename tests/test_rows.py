"""Rows of numbers as data: how tables and arrays are read, columns in one scale, and a release that reads the same."""

import dataclasses
import json
import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer

import pubsel
import pubsel.release.run
import pubsel.training.once
from pubsel import files
from pubsel.algorithms import Facts, Frozen, columns
from pubsel.data import load, memory, open_dataset, texts, vectors
from pubsel.data.given import Takes, at_path
from pubsel.data.vectors import Field, as_rows
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant
from pubsel.settings.keys import Pair, Read, Scale
from pubsel.training.loop import noisy_sum
from tests.made import build, done, failed, hurtful, interrupted, only_record, secret

ROWS = "model=rows algorithm=whitened_head pair.public=null".split()


def table(path, frame):
    """Write a table, and return its path."""
    frame.to_csv(path, index=False)
    return str(path)


def people(n, seed=0):
    """A table of n people whose columns differ by orders."""
    draw = np.random.RandomState(seed)
    frame = pd.DataFrame({"age": draw.randint(18, 90, n), "income": np.exp(draw.randn(n) + 10).round()})
    frame["tiny"] = 1e-4 * draw.randn(n)
    frame["label"] = np.where(frame["age"] + 20 * (frame["income"] > 22000) + 1e5 * frame["tiny"] > 64, "yes", "no")
    return frame


def read(path, unit=None, **rules):
    return open_dataset(path, "", False, unit, read=Read(**rules))


# Columns


@pytest.mark.attack
def test_no_row_moves_the_histogram_by_more_than_it_declares():
    release = columns.released(5, 7, 100, 0.1, 1.0)
    rows = torch.cat([hurtful(7), torch.full((1, 7), 2.0**0.5), torch.zeros(1, 7)])
    whole = release.clipped_sum(rows)
    assert release.sensitivity == math.sqrt(5)
    for i in range(len(rows)):
        others = release.clipped_sum(torch.cat([rows[:i], rows[i + 1 :]]))
        assert float((whole - others).norm()) <= release.sensitivity
    assert float((whole - release.clipped_sum(rows[:-1])).norm()) == release.sensitivity  # it is reached
    assert release.size == whole.numel()


def test_the_scale_of_a_column_is_found_whatever_its_unit():
    draw = np.random.RandomState(0)
    x = torch.from_numpy(np.stack([1e5 + 1e4 * draw.randn(5000), 1e-3 * draw.rand(5000), -7 * np.ones(5000)], axis=1))
    x[:20, 0] = 1e12  # a few that are wrong
    x[20:2000, 1] = math.nan
    centre, scale, limit = columns.scaling_of(columns.counts_in_bins(x))
    assert limit == columns.LIMIT
    torch.testing.assert_close(centre[:2], torch.tensor([1e5, 5e-4]), rtol=0.1, atol=0)
    torch.testing.assert_close(scale[:2], torch.tensor([1e4, 2.9e-4]), rtol=1, atol=0)
    assert abs(float(centre[2]) + 7) < 1.5
    scaled = Frozen().scaled((centre, scale, limit))(x.float())
    assert scaled.abs().max() <= columns.LIMIT
    assert (scaled[20:2000, 1] == 0).all()


@pytest.mark.attack
def test_counts_of_noise_alone_are_no_scale():
    """With the noise of the plan, the scale of 1,000 rows is that without noise, to a factor of two."""
    x = torch.from_numpy(np.random.RandomState(1).randn(1000, 4) * [1e-3, 1.0, 1e3, 1e6])
    release = columns.released(4, 4, 1000, 0.2, 1.0)
    exact = columns.by_public(x, 4)[1]
    for i in range(5):
        noisy = noisy_sum(release, x, 1 / 0.2, secret("x", i))
        assert ((noisy.scale / exact).log2().abs() < 1.5).all()


@pytest.mark.parametrize("missing", [0.0, 0.6])
def test_columns_that_are_lost_in_the_noise_have_the_likeliest_scale(missing):
    """Few counts of 1,000 rows are above what this noise may reach. At times, noise alone is above it."""
    draw = np.random.RandomState(2)
    x = torch.from_numpy(draw.randn(1000, 5) * [1.0, 1.0, 20.0, 1e-2, 300.0] + [0, 3, -100, 0, 500])
    x[: round(missing * 1000), 2] = math.nan
    exact_centre, exact_scale, _ = columns.by_public(x, 5)
    counts, noise = columns.counts_in_bins(x), 30.0
    wrong = []
    for i in range(20):
        noisy = counts + noise * torch.from_numpy(np.random.RandomState(i).randn(*counts.shape))
        centre, scale, _ = columns.scaling_of(noisy, noise, 1000)
        wrong.append(((scale / exact_scale).log2().abs() > 2) | ((centre - exact_centre).abs() > 2 * exact_scale))
    assert (torch.stack(wrong).sum(0) <= 4).all()


def test_columns_in_one_unit_help_each_other():
    """Of 60 columns hardly one of which says its scale alone, most have the common one; of two of them they have
    not."""
    counts = columns.counts_in_bins(300 * torch.from_numpy(np.random.RandomState(3).randn(150, 60)))
    noisy = counts + 17 * torch.from_numpy(np.random.RandomState(4).randn(*counts.shape))

    def near(some):
        return ((columns.scaling_of(some, 17, 150)[1] / 300).log2().abs() <= 1).float()

    together, alone = near(noisy), torch.cat([near(some) for some in noisy.split(2)])
    assert together.mean() > 0.8
    assert together.mean() > alone.mean() + 0.2


def test_a_column_without_a_number_is_as_it_is():
    x = torch.stack([torch.full((50,), math.nan), torch.arange(50.0)], dim=1)
    centre, scale, _ = columns.by_public(x, 2)
    assert (centre[0], scale[0]) == (0.0, 1.0)


def test_one_plan_pays_for_the_histogram_and_the_steps(tmp_path, cli):
    path = table(tmp_path / "t.csv", people(400))
    done(cli, "run", *ROWS, f"pair.private={path}", "epsilon=1", "privacy.secure_noise=true")
    record = pubsel.load(next((tmp_path / "results" / "runs").iterdir()))
    privacy, derived = record["privacy"], record["derived"]
    steps, first = derived["steps"], derived["steps_of_histogram"]
    assert first == round(steps * 0.3 / 0.7)
    assert privacy["steps"] == steps + first
    assert "parts" not in privacy
    mu = math.sqrt(steps + first) / privacy["noise_multiplier"]
    assert accountant.gaussian_epsilon(mu, 1e-5) == pytest.approx(privacy["epsilon"])
    assert privacy["epsilon"] <= 1

    # the ledger has it once
    (ledger,) = (tmp_path / "results" / "ledger").glob("*.jsonl")
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["epsilon"] for line in lines if line["state"] == "begun"] == [privacy["epsilon"]]

    # the page to give away says what the steps are for
    pubsel.export(record, tmp_path / "release")
    page = (tmp_path / "release" / "privacy.html").read_text()
    assert f"{steps + first} steps ({first} of them for a noisy histogram of each column), sampling rate 1" in page


def test_a_stopped_run_keeps_its_histogram(tmp_path, cli, monkeypatch):
    """It is drawn once, and in the ledger once: noise of the system would be other noise."""
    words = ["run", *ROWS, f"pair.private={table(tmp_path / 't.csv', people(400))}", "epsilon=1"]
    words += ["privacy.secure_noise=true"]
    with monkeypatch.context() as patch:
        patch.setattr(pubsel.release.run, "fit", interrupted)
        assert cli(*words)[0] == 130
    (path,) = (tmp_path / "results" / "runs").glob("*/release.pt")
    centre, scale, _ = torch.load(path, weights_only=True)["drawn"]["scaling"]
    monkeypatch.setattr(pubsel.training.once, "noisy_sum", interrupted)
    done(cli, *words)
    weights = torch.load(path.with_name("model.pt"), weights_only=True)
    assert torch.equal(weights["frozen.centre"], centre)
    assert torch.equal(weights["frozen.scale"], scale)
    (ledger,) = (tmp_path / "results" / "ledger").glob("*.jsonl")
    assert [json.loads(line)["state"] for line in ledger.read_text().splitlines()].count("begun") == 1


def test_an_audit_claims_what_the_run_states(tmp_path, cli):
    path = table(tmp_path / "t.csv", people(400))
    words = [*ROWS, f"pair.private={path}", "epsilon=1"]
    done(cli, "audit", *words, "audit.canaries=50", "audit.kind=black_box")
    (record,) = (tmp_path / "results" / "audits").glob("*/result.json")
    assert json.loads(record.read_text())["claimed"] == pytest.approx(1)
    err = failed(cli, "audit", *words, "audit.kind=per_instance")
    assert "audit.kind=per_instance: a release before training is within the plan of training" in err


def test_steps_of_a_noise_leave_room_for_the_histogram(tmp_path, cli):
    path = table(tmp_path / "t.csv", people(400))
    done(cli, "run", *ROWS, f"pair.private={path}", "epsilon=1", "privacy.noise_multiplier=30")
    privacy = pubsel.load(next((tmp_path / "results" / "runs").iterdir()))["privacy"]
    assert privacy["noise_multiplier"] == 30
    assert 0.9 < privacy["epsilon"] <= 1
    assert privacy["steps"] > 20


def test_the_histogram_has_the_noise_of_its_share():
    algorithm = build("whitened_head").derived(Facts(n=5000, d=3, mu=0.3, raw=3))
    assert algorithm.scales
    share = algorithm.first_steps / (algorithm.first_steps + algorithm.steps)
    assert share == pytest.approx(columns.SHARE, abs=0.02)
    assert algorithm.mu == pytest.approx(0.3 * math.sqrt(0.7))
    assert not build("whitened_head").derived(Facts(n=5000, d=3, mu=0.3, raw=0)).scales  # all have bounds
    assert not build("whitened_head").derived(Facts(n=5000, d=3, mu=0.3)).scales  # features
    assert not build("whitened_head").derived(Facts(n=20, d=3, mu=0.3, raw=3)).scales  # too few for the noise
    assert not build("whitened_head").derived(Facts(n=5000, d=3, m=100, mu=0.3, raw=3)).scales  # public rows


def test_public_rows_give_the_scale():
    x = torch.from_numpy(np.random.RandomState(0).randn(200, 3) * [1e-3, 1.0, 1e6]).float()
    algorithm = build("whitened_head", k=3).derived(Facts(n=5000, d=3, m=200, mu=0.3, raw=2))
    frozen = algorithm.frozen(pubsel.data.Split(x, torch.zeros(200).long()), 3, lambda *_: None)
    assert not frozen.root
    torch.testing.assert_close(frozen.scale[:2], torch.tensor([1e-3, 1.0]), rtol=0.3, atol=0)
    assert frozen.scale[2] == 1  # it has one already
    assert frozen(x).norm(dim=1).allclose(torch.tensor(frozen.length))


# Reading


def test_a_table_of_numbers_is_read_by_its_columns(tmp_path):
    frame = people(300)
    frame.insert(0, "id", range(300))
    frame.insert(1, "sex", ["f", "M", " m"] * 100)
    frame.loc[:59, "income"] = math.nan
    path, bounds = table(tmp_path / "t.csv", frame), tmp_path / "bounds.json"
    with pytest.raises(UserError, match=r"1 columns have words: sex .such as 'f, M, ...'"):
        load(Pair(private=path, public=None, m=1), "", False)

    bounds.write_text(json.dumps({"sex": ["f", "m"], "age": [0, 100]}))
    source = read(path, bounds=str(bounds))
    kinds = [(f.name, f.word, f.missing, f.least) for f in source.columns]
    assert kinds == [
        ("income", None, False, None),
        ("tiny", None, False, None),
        ("age", None, False, 0.0),
        ("sex", "f", False, None),
        ("sex", "m", False, None),
        ("income", None, True, None),
    ]
    assert source.raw == 2
    assert source.names == ("no", "yes")
    x = torch.cat([source.train.x, source.test.x])
    assert int(x[:, 5].sum()) == int(x[:, 0].isnan().sum()) == 60
    assert float(x[:, 3].sum()) == 100
    assert float(x[:, 4].sum()) == 200  # in any case, with blanks
    assert sorted(x[:, 2].tolist()) == pytest.approx(sorted(frame["age"] / 50 - 1), abs=1e-6)


def test_no_single_value_makes_a_column_one_of_words(tmp_path):
    frame = people(100).astype({"age": object})
    frame.loc[7, "age"] = "about 40"
    path = table(tmp_path / "t.csv", frame)
    with pytest.raises(UserError, match="1 values in columns of numbers are none, or too large, such as 'about 40'"):
        load(Pair(private=path, public=None, m=1), "", False)
    accepted = load(Pair(private=path, public=None, m=1, read=Read(accept=["missing"])), "", False)
    assert [field.name for field in accepted.columns] == ["age", "income", "tiny"]
    x = torch.cat([accepted.private.x, accepted.test.x])
    assert int(x.isnan().sum()) == 1


def test_what_names_people_is_no_feature(tmp_path):
    frame = people(200)
    frame["patient_id"] = np.arange(200) // 4
    path = table(tmp_path / "t.csv", frame)
    with pytest.raises(UserError, match=r"column patient_id names people, and is left out: set pair\.unit=patient_id"):
        load(Pair(private=path, public=None, m=1), "", False)
    assert [field.name for field in read(path).columns] == ["age", "income", "tiny"]
    source = read(path, "patient_id")
    assert [field.name for field in source.columns] == ["age", "income", "tiny"]
    assert not set(source.groups[0].tolist()) & set(source.groups[1].tolist())


@pytest.mark.parametrize(
    "name",
    "record_id recordID record.id Respondent-ID study_id case_id household_id hadm_id pid patid SUBJID USUBJID subject "
    "eid id anon_patient_key groups id_patient idpatient patient/id subject# Subject(ID) PATNO pat_no "
    "patienten_nr HHID num_patient speaker author chart_no Kunden-Nr. Fallnummer id_cliente user_name".split(),
)
@pytest.mark.parametrize("unit", [None, "who"])
def test_ids_that_repeat_may_name_people_in_tables_and_arrays(name, unit, tmp_path):
    frame = people(200).assign(**{name: [f"STUDY1-{i // 3:04}" for i in range(200)], "who": np.arange(200) // 4})
    for who in (frame[name], np.arange(200) // 3):
        rows = vectors.read_rows(Path(table(tmp_path / "t.csv", frame.assign(**{name: who}))), unit, Read())
        assert [column.name for column in rows.columns if column.name != "who"] == ["age", "income", "tiny"]
        x, y, texts = frame[["age", "tiny"]].to_numpy(), np.arange(200) % 2, np.array(who.tolist())
        np.savez(tmp_path / "t.npz", x=x, y=y, who=frame["who"], **{name: texts})
        arrays = vectors.read_rows(tmp_path / "t.npz", unit, Read())
        for findings, what in ((rows.findings, "column"), (arrays.findings, "array")):
            named = [finding for finding in findings if finding.name == "ids"]
            assert [f.remedy[: 9 + len(name)] for f in named] == ([] if unit else [f"set unit={name}"])
            assert any(f"{what}" in f.text and name in f.text for f in findings)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_that_begin_with_zeros_are_ids(suffix, tmp_path):
    """Whatever their column is called, unless they are a few codes."""
    frame = people(200).assign(policy=[f"{i // 3:05}" for i in range(200)], region=[f"{i % 9:02}" for i in range(200)])
    getattr(frame, f"to_{suffix}")(tmp_path / f"t.{suffix}", index=False)
    source = read(str(tmp_path / f"t.{suffix}"))
    assert [column.name for column in source.columns] == ["age", "income", "tiny", "region"]
    (named,) = [finding for finding in source.findings if finding.name == "ids"]
    late = people(1400).assign(policy=[f"{1400 - i // 3:05}" if i > 1200 else str(10**4 + i // 3) for i in range(1400)])
    getattr(late, f"to_{suffix}")(tmp_path / f"late.{suffix}", index=False)
    assert "policy" not in [column.name for column in read(str(tmp_path / f"late.{suffix}")).columns]
    assert named.line().startswith(f"t.{suffix}: column policy may name people, and is left out: set unit=policy")


@pytest.mark.parametrize(
    ("names", "count", "severity"),
    [
        ("id ID donor speaker volunteer case_id sample_id recording_id", 15, "error"),
        ("id speaker", 3, "error"),
        ("animal author group_id student", 15, "warning"),
        ("student employee household individual resident worker child pupil driver player", 40, "error"),
        ("sujet sujeto participante participantes codigo_paciente vp vpnr", 40, "error"),
        ("id donor student driver", 2, None),
        ("author group_id child study_id", 7, None),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_people_who_are_numbered_are_noticed_though_they_are_few(names, count, severity, suffix, tmp_path):
    frame = people(400)
    for name in names.split():
        table(tmp_path / "t.csv", frame.assign(**{name: np.arange(400) % count}))
        x, y = frame[["age", "tiny"]].to_numpy(), np.arange(400) % 2
        np.savez(tmp_path / "t.npz", x=x, y=y, **{name: np.arange(400) % count})
        findings = vectors.read_rows(tmp_path / f"t.{suffix}", None, Read()).findings
        assert [(name, f.severity) for f in findings if f.name == "ids"] == [(name, severity)] * (severity is not None)


@pytest.mark.parametrize("name", ["donor", "group_id", "index"])
@pytest.mark.parametrize("rows", [400, 15])
def test_no_single_value_decides_which_ids_are_features(name, rows, tmp_path):
    """Nor whether they are of people."""
    values = np.where(np.arange(400) < rows, np.arange(400) * 7, np.nan)
    left = []
    for same in (0, 1):
        values[:2] = values[0], values[1 - same]
        rows_read = vectors.read_rows(
            Path(table(tmp_path / "t.csv", people(400).assign(**{name: values}))), None, Read()
        )
        left.append(
            ([c.name for c in rows_read.columns], [f.name for f in rows_read.findings if f.severity == "error"])
        )
    assert left == [(["age", "income", "tiny"], [])] * 2


@pytest.mark.parametrize(
    "name",
    "grid acid humid covid paid rapid steroids ideal identity nr_of_visits category_id num_patients animal".split(),
)
def test_columns_that_end_like_ids_are_features(name, tmp_path):
    frame = people(200).assign(**{name: np.arange(200) % 7})
    rows = vectors.read_rows(Path(table(tmp_path / "t.csv", frame)), None, Read())
    assert name in [column.name for column in rows.columns]
    assert not [finding for finding in rows.findings if finding.name == "ids"]


@pytest.mark.parametrize("name", ["index", "row", "id", "record_id", "Unnamed: 0"])
def test_columns_that_number_rows_are_left_out_and_others_of_these_names_are_not(name, tmp_path):
    """A refractive index is a measurement."""
    frame = people(100)
    for values, left in ((np.arange(100), True), (frame["age"] / 7, False)):
        rows = vectors.read_rows(Path(table(tmp_path / "t.csv", frame.assign(**{name: values}))), None, Read())
        assert (name not in [column.name for column in rows.columns]) == left
        texts = [finding.text for finding in rows.findings]
        assert (f"t.csv: columns that number the rows are left out: '{name}'" in texts) == left
        read_too = f"t.csv: column {name} is read as numbers, since it does not number the rows" in texts
        assert read_too == (not left and name in ("index", "row"))
        nameless = any("column 'Unnamed: 0' has no name" in text for text in texts)
        assert nameless == (not left and name == "Unnamed: 0")


@pytest.mark.parametrize("code", [-9, -99, -999.0, 99, 9999, 77, 888])
def test_codes_of_missing_numbers_stop_a_command(code, tmp_path):
    frame = people(200).assign(score=np.linspace(0, 5, 200), age=np.arange(200) % 100, flag=np.arange(200) % 2)
    coded = frame.assign(score=np.where(np.arange(200) % 20 == 0, code, frame["score"]))

    def codes(frame):
        findings = vectors.read_rows(Path(table(tmp_path / "t.csv", frame)), None, Read()).findings
        return [finding.text for finding in findings if finding.name == "missing"]

    assert codes(frame) == []  # an age may be 99
    assert codes(coded) == [f"t.csv: columns have a number far from their others: score ({code:g})"]
    assert codes(frame.assign(score=coded["score"].where(frame.index != 7, code).where(frame.index % 20 != 0, 1))) == []
    for dtype in (np.float64, np.float32, np.int16):
        np.savez(tmp_path / "a.npz", x=coded[["age", "score"]].to_numpy(dtype), y=np.arange(200) % 2)
        texts = [finding.text for finding in vectors.read_rows(tmp_path / "a.npz", None, Read()).findings]
        assert texts == [f"a.npz: columns have a number far from their others: 1 ({code:g})"]


@pytest.mark.parametrize(
    ("codes", "scale", "named"),
    [
        ((97, 98, 99), 11, "97 98 99"),
        ((98, 99), 11, "98 99"),
        ((998, 999), 90, "998 999"),
        ((-9, -8, -1), 11, "-9 -8 -1"),
        ((-999, -998), 90, "-999 -998"),
        ((-99, -98), 11, "-99 -98"),
        ((-1,), 11, ""),
        ((97, 98, 99), 96, ""),
        ((7, 8, 9), 7, ""),
    ],
)
def test_no_code_of_missing_numbers_hides_another(codes, scale, named, tmp_path):
    score = np.arange(1000) % scale
    for i, code in enumerate(codes):
        score[i::33] = code
    np.savez(tmp_path / "a.npz", x=score[:, None], y=np.arange(1000) % 2)
    findings = vectors.read_rows(tmp_path / "a.npz", None, Read()).findings
    texts = [f.text for f in findings if f.name == "missing"]
    coded = ", ".join(f"0 ({code})" for code in named.split())
    assert texts == [f"a.npz: columns have a number far from their others: {coded}"] * (named != "")


def test_codes_of_missing_numbers_are_noticed_outside_of_bounds(tmp_path):
    frame = people(1000).assign(age=np.where(np.arange(1000) % 10 < 3, -999, np.arange(1000) % 90))
    (tmp_path / "b.json").write_text('{"age": [0, 120]}')
    np.savez(tmp_path / "a.npz", x=frame[["age"]], y=np.arange(1000) % 2)
    for path, bounds, column in (
        (table(tmp_path / "t.csv", frame), str(tmp_path / "b.json"), "age"),
        (str(tmp_path / "a.npz"), [0, 120], "0"),
    ):
        found = {f.name: f for f in read(path, bounds=bounds).findings}
        assert found["missing"].text.endswith(f"columns have a number far from their others: {column} (-999)")
        assert (found["missing"].severity, found["outside"].severity) == ("error", "warning")
    assert "missing" not in {f.name for f in read(str(tmp_path / "a.npz"), bounds=[-1000, 120]).findings}


def test_a_column_that_is_the_label_by_another_name_is_named(tmp_path):
    frame = people(200)
    code = pd.factorize(frame["label"])[0]
    for values, same in ((code, True), (-7.5 * code, True), (code * (np.arange(200) % 9 > 0), False)):
        path = table(tmp_path / "t.csv", frame.assign(target_code=values))
        findings = vectors.read_rows(Path(path), None, Read()).findings
        assert ("t.csv: columns have one number for each label: target_code" in [f.text for f in findings]) == same


def test_words_of_people_are_never_to_be_listed(tmp_path):
    """bounds=FILE would publish them in the folder that is given away."""
    frame = people(200).assign(sex=["m", "f"] * 100, code=[f"S-{i // 3:04}" for i in range(200)])
    findings = vectors.read_rows(Path(table(tmp_path / "t.csv", frame)), None, Read()).findings
    (ids,), (words,) = ([f for f in findings if f.name == name] for name in ("ids", "words"))
    assert ids.text == "t.csv: columns have more than 20 different words, as names have: code"
    assert ids.remedy.startswith("set unit=code if they are people")
    assert words.text == "t.csv: 1 columns have words: sex (such as 'm, f')"
    assert "bounds" in words.remedy
    assert "bounds" not in ids.remedy


def test_of_several_labels_none_is_chosen(tmp_path):
    frame = people(60)
    for name in ("class", "target", "y"):
        path = Path(table(tmp_path / "t.csv", frame.assign(**{name: [0, 1] * 30})))
        with pytest.raises(UserError, match=rf"columns label and {name} may be the label: give label=COLUMN"):
            vectors.read_rows(path, None, Read())
        rows = vectors.read_rows(path, None, Read(label=name))
        assert "t.csv: labels by the column " + name in [finding.text for finding in rows.findings]
        # a public table has it as a feature
        like = vectors.read_rows(
            Path(table(tmp_path / "p.csv", frame.assign(**{name: 1.0}))), None, Read(), (Field(name),)
        )
        assert (like.x == 1).all()
    place = Path(table(tmp_path / "t.csv", frame.assign(x=1.0, y=2.0)))
    assert {"x", "y"} < {column.name for column in vectors.read_rows(place, None, Read()).columns}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": np.arange(60) % 3}, "y_train and labels_train may be the labels"),
        ({"features": np.ones((60, 5))}, "x_train and features_train may be the rows of numbers"),
    ],
)
def test_of_several_arrays_none_is_chosen_and_those_that_are_not_read_are_named(more, message, tmp_path):
    arrays = {"x": np.random.RandomState(0).randn(60, 3), "y": np.arange(60) % 2}
    names = ["cat", "dog"]
    for part in ("", "_train"):
        np.savez(tmp_path / "a.npz", **{name + part: values for name, values in (arrays | more).items()})
        with pytest.raises(UserError, match=message if part else message.replace("_train", "")):
            vectors.read_rows(tmp_path / "a.npz", None, Read())
    np.savez(tmp_path / "a.npz", **arrays, labels=names, x_holdout=arrays["x"])
    (finding,) = vectors.read_rows(tmp_path / "a.npz", None, Read()).findings
    assert (finding.severity, finding.text) == ("note", "a.npz: arrays that are not read: labels, x_holdout")


@pytest.mark.parametrize("name", ["split", "is_train", "test_idx", "val_mask", "fold"])
def test_an_array_that_may_be_the_split_stops_a_command(name, tmp_path):
    """Otherwise the test part of its owner would be trained on without a word."""
    for shape in ((60, 3), (60, 4, 4)):
        arrays = {
            "x": np.ones(shape, np.uint8),
            "y": np.arange(60) % 2,
            "other": np.arange(60),
            name: np.arange(60) % 2,
        }
        np.savez(tmp_path / "a.npz", **arrays)
        (finding,) = (f for f in read(str(tmp_path / "a.npz")).findings if f.name == "split")
        assert finding.line().startswith(f"a.npz: array {name} may say train or test, and is not read: store x_train")
        parts = {"x_train": arrays["x"], "y_train": arrays["y"], "x_test": arrays["x"], "y_test": arrays["y"]}
        np.savez(tmp_path / "a.npz", **parts, **{name: arrays[name]})
        assert "split" not in {finding.name for finding in read(str(tmp_path / "a.npz")).findings}


@pytest.mark.parametrize(("name", "parts", "refused"), [("fold", 5, True), ("K-Fold", 10, True), ("fold", 40, False)])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_of_parts_are_no_feature(name, parts, refused, suffix, tmp_path):
    frame = pd.DataFrame({"a": np.linspace(0, 1.1, 200), name: np.arange(200) % parts, "label": np.arange(200) % 2})
    path = tmp_path / f"a.{suffix}"
    (frame.to_csv if suffix == "csv" else frame.to_parquet)(path, index=False)
    findings = [f.line() for f in read(str(path)).findings if f.name == "split"]
    assert [f"column {name} numbers parts, and none is named as the test part" in line for line in findings] == (
        [True] * refused
    )
    assert len(read(str(path), split="none").columns) == 2


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", "csv"), (";", "csv"), ("\t", "tsv")])
def test_missing_numbers_in_any_word_are_missing(tmp_path, delimiter, suffix):
    path = tmp_path / f"t.{suffix}"
    words = ["1.5", "?", "NA", "", "nan", "-", "inf", "2e3"]
    rows = [delimiter.join([word, str(i), "ab"[i % 2]]) for i, word in enumerate(words * 10)]
    path.write_text("\n".join([delimiter.join(["x", "n", "Class"]), *rows]) + "\n", encoding="utf-8-sig")
    source = read(str(path), scale=Scale.private)
    x = torch.cat([source.train.x, source.test.x])
    assert [field.name for field in source.columns] == ["x", "n", "x"]
    assert int(x[:, 0].isnan().sum()) == 60 == int(x[:, 2].sum())
    assert set(x[:, 0][~x[:, 0].isnan()].tolist()) == {1.5, 2000.0}


def test_a_number_that_float32_has_not_is_missing_with_a_word(tmp_path):
    frame = people(100)
    frame.loc[7, "income"] = 1e200
    path = table(tmp_path / "t.csv", frame)
    with pytest.raises(UserError, match=r"1 values in columns of numbers are none, or too large, such as '1e\+200'"):
        load(Pair(private=path, public=None, m=None), "", False)
    source = read(path, accept=["missing"])
    assert int(torch.cat([source.train.x, source.test.x]).isnan().sum()) == 1


def test_parquet_and_lists_of_numbers_are_read(tmp_path):
    pytest.importorskip("pyarrow")
    draw = np.random.RandomState(0)
    frame = pd.DataFrame({"embedding": list(draw.randn(60, 4).astype("float32")), "label": [0, 1] * 30})
    frame.to_parquet(tmp_path / "t.parquet")
    source = read(str(tmp_path / "t.parquet"))
    assert source.train.x.shape[1] == 4
    assert [field.name for field in source.columns] == [f"embedding[{i}]" for i in range(4)]
    frame.at[3, "embedding"] = np.zeros(3, "float32")
    frame.to_parquet(tmp_path / "u.parquet")
    with pytest.raises(UserError, match="lists in column embedding are not of equal length"):
        read(str(tmp_path / "u.parquet"))


def saved(folder, frame, lists=(), classes=None):
    """Write a table as `save_to_disk` of Hugging Face's datasets does, in two files."""
    import pyarrow

    folder.mkdir(parents=True)
    types = {name: pyarrow.list_(pyarrow.float32()) for name in lists}
    features = {name: {"dtype": "float32", "_type": "Value"} for name in frame}
    if classes:
        features["label"] = {"names": classes, "_type": "ClassLabel"}
    files = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for i, name in enumerate(files):
        part = frame.iloc[i::2]
        columns = {name: pyarrow.array(list(part[name]), types.get(name)) for name in frame}
        with pyarrow.OSFile(str(folder / name), "wb") as file:
            whole = pyarrow.table(columns)
            with pyarrow.ipc.new_stream(file, whole.schema) as stream:
                stream.write_table(whole, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def test_a_folder_of_hugging_face_is_a_table(tmp_path):
    pytest.importorskip("pyarrow")
    draw = np.random.RandomState(0)
    frame = pd.DataFrame({"embedding": list(draw.randn(60, 4).astype("float32")), "label": [1, 0, 1] * 20})
    source = read(str(saved(tmp_path / "one", frame, ["embedding"], ["no", "yes"])))
    assert source.names == ("no", "yes")
    assert len(source.train.x) + len(source.test.x) == 60
    rows = torch.cat([source.train.x, source.test.x]).tolist()
    assert sorted(rows) == sorted(np.stack(frame["embedding"]).tolist())
    assert int(torch.cat([source.train.y, source.test.y]).sum()) == 40

    # parts, with a label of -1, which means none
    parts = tmp_path / "several"
    for part, of in {"train": frame[:40], "test": frame[40:].assign(label=[-1] + [0, 1] * 9 + [0])}.items():
        saved(parts / part, of, ["embedding"], ["no", "yes"])
    (parts / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    source = read(str(parts), accept=["unlabelled"])
    assert (len(source.train.x), len(source.test.x)) == (40, 19)

    frame.at[5, "embedding"] = None
    with pytest.raises(UserError, match="lists in column embedding are not of equal length, or lack numbers"):
        read(str(saved(tmp_path / "null", frame, ["embedding"])))
    texts = frame.drop(columns="embedding").assign(text=["a small text", "another", "yes"] * 20)
    assert read(str(saved(tmp_path / "texts", texts, classes=["no", "yes"]))).texts.column == "text"
    state = tmp_path / "one" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(
        UserError, match="one: a selection of rows that an old version of datasets saved: save it again"
    ):
        read(str(tmp_path / "one"))
    (tmp_path / "texts" / "data-00001-of-00002.arrow").write_bytes(b"cut")
    with pytest.raises(UserError, match="texts cannot be read"):
        read(str(tmp_path / "texts"))


def test_a_parquet_file_of_hugging_face_names_its_classes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    about = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    whole = pyarrow.table({"a": list(range(60)), "label": [1, 0, 1] * 20})
    pytest.importorskip("pyarrow.parquet").write_table(
        whole.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "t.parquet"
    )
    source = read(str(tmp_path / "t.parquet"))
    assert source.names == ("no", "yes")
    assert int(torch.cat([source.train.y, source.test.y]).sum()) == 40


def test_rows_that_the_disk_has_no_room_for_are_an_error(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "AT_ONCE", 100)
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(UserError, match=r"cannot write .* which TMPDIR names: "):
        files.gathered(torch.randn(300, 5).split(10), 300)


def test_large_rows_are_mapped_and_are_the_same(tmp_path, monkeypatch):
    x, y = np.random.RandomState(0).randn(300, 5).astype("float16"), np.arange(300) % 3
    np.save(tmp_path / "a.npy", x)
    np.save(tmp_path / "a_labels.npy", y)
    frame = pd.DataFrame(x.astype("float32"), columns=list("abcde")).assign(label=y)
    table(tmp_path / "a.csv", frame)
    pair = Pair(private=str(tmp_path / "a.npy"), public=None, m=None, validation=0.2)
    small = [load(pair, "", False), load(dataclasses.replace(pair, private=str(tmp_path / "a.csv")), "", False)]
    monkeypatch.setattr(files, "AT_ONCE", 100)
    monkeypatch.setattr(vectors, "BLOCK", 16)
    large = [load(pair, "", False), load(dataclasses.replace(pair, private=str(tmp_path / "a.csv")), "", False)]
    for a, b in zip(small, large, strict=True):
        for part in ("private", "validation", "test"):
            assert torch.equal(getattr(a, part).x, getattr(b, part).x)
        assert b.private.x in files._maps()
        assert a.private.x not in files._maps()


X = np.random.RandomState(0).randn(50, 3).astype("float32")


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8"])
@pytest.mark.parametrize("names", [("x", "y"), ("features", "labels"), ("embeddings", "target"), ("X", "Y")])
def test_arrays_are_features_as_they_are(tmp_path, dtype, names):
    x, y = (10 * X).astype(dtype), np.arange(50) % 3
    np.savez(tmp_path / "a.npz", **dict(zip(names, (x, y), strict=True)))
    source = read(str(tmp_path / "a.npz"))
    assert (source.raw, source.columns, source.classes) == (None, (), 3)
    both = torch.cat([source.train.x, source.test.x])
    assert both.dtype == torch.float32
    np.testing.assert_array_equal(np.sort(both.numpy(), axis=0), np.sort(x.astype("float32"), axis=0))


def test_parts_of_arrays_are_those_of_their_owner(tmp_path):
    parts = {"x_train": X, "y_train": ["a", "b"] * 25, "X_val": X[:9] + 1, "y_val": ["a"] * 9}
    np.savez(tmp_path / "a.npz", **parts, x_test=X[:7] + 2, y_test=["b"] * 7)
    source = read(str(tmp_path / "a.npz"))
    assert (len(source.train.x), len(source.test.x), source.names) == (50, 16, ("a", "b"))
    assert source.test.y.sum() == 7


@pytest.mark.parametrize("parts", [[""], ["train", "test"]])
def test_people_of_arrays_are_on_one_side(tmp_path, parts):
    arrays = {}
    for i, part in enumerate(parts):
        who = np.array([f"{i} {j // 5}".encode() for j in range(50)])
        arrays |= {f"x_{part}".strip("_"): X, f"y_{part}".strip("_"): np.arange(50) % 2, f"who_{part}".strip("_"): who}
    np.savez(tmp_path / "a.npz", **arrays)
    train, test = (set(groups.tolist()) for groups in read(str(tmp_path / "a.npz"), "who").groups)
    assert len(train | test) == 10 * len(parts)
    assert not train & test
    np.savez(tmp_path / "a.npz", **arrays | {f"who_{parts[0]}".strip("_"): np.arange(7)})
    with pytest.raises(UserError, match="does not name the person of each example"):
        read(str(tmp_path / "a.npz"), "who")


def test_npy_files_and_folders_have_labels_next_to_them(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "labels.npy", np.arange(50) % 2)
    one = read(str(tmp_path / "x.npy"))
    assert len(one.train.x) + len(one.test.x) == 50

    folder = tmp_path / "laion"
    (folder / "img_emb").mkdir(parents=True)
    for i, part in enumerate(np.array_split(X, 3)):
        np.save(folder / "img_emb" / f"img_emb_{i}.npy", part.astype("float16"))
    np.save(folder / "labels.npy", np.arange(50) % 2)
    several = read(str(folder))
    assert len(several.train.x) + len(several.test.x) == 50
    assert several.train.x.dtype == torch.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": np.zeros(49, int)}, "y has 49 labels for 50 examples"),
        ({"x": X.astype(complex), "y": np.zeros(50, int)}, r"not rows of numbers \[n, d\]: write images by"),
        ({"x": X, "y": X[:, 0]}, r"labels are integers or texts"),
        (
            {"x_train": X, "y_train": np.zeros(50, int), "x_test": X[:, :2], "y_test": np.zeros(50, int)},
            "differ in how",
        ),
        ({"x": np.where(X > 2, math.nan, X), "y": np.arange(50) % 2}, "rows have numbers that are missing or infinite"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        load(Pair(private=str(tmp_path / "a.npz"), public=None, m=1), "", False)


def test_bounds_of_an_array_are_of_all_its_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", x=X * 100, y=np.arange(50) % 2)
    source = read(str(tmp_path / "a.npz"), bounds=[-100, 300])
    assert source.raw == 0
    both = torch.cat([source.train.x, source.test.x])
    assert float(both.min()) == -1
    np.testing.assert_allclose(sorted(both[:, 1]), sorted(((X[:, 1] * 100 + 100) / 200 - 1).clip(-1, 1)), atol=1e-6)
    for bounds in ([3], [2, 1], "bounds.json", [0, math.inf]):
        with pytest.raises(UsageError, match="bounds="):
            read(str(tmp_path / "a.npz"), bounds=bounds)


@pytest.mark.attack
def test_no_single_value_decides_which_columns_have_bounds(tmp_path):
    """A word in a column of numbers is one value that is missing, with bounds of all columns too."""
    kept = []
    for last in ("5", "high"):
        rows = [f"{i % 9},{i},{i % 2}" for i in range(39)]
        (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *rows, f"{last},3,1"]) + "\n")
        source = read(str(tmp_path / "t.csv"), bounds=[0, 9], accept=["missing"])
        assert ("missing" in [finding.name for finding in source.findings]) == (last == "high")
        kept.append(source.columns)
    assert kept[0] == kept[1]
    assert [(field.least, field.most) for field in kept[0]] == [(0, 9), (0, 9)]


@pytest.mark.parametrize(
    "text", ['{"age": [9]}', '{"age": "x"}', "[1, 2]", '{"age": [2, 1]}', "{", '{"other": [0, 1]}']
)
def test_bounds_that_are_none_are_refused(tmp_path, text):
    path = table(tmp_path / "t.csv", people(40))
    (tmp_path / "bounds.json").write_text(text)
    with pytest.raises(UserError, match=r"bounds"):
        read(path, bounds=str(tmp_path / "bounds.json"))


# Sides


@pytest.mark.attack
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=20, max_size=60),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1.0, 0.6]),
    st.booleans(),
)
def test_without_one_row_no_other_moves_though_many_are_equal(tmp_path, rows, validation, share, taken):
    """Equal rows may be of different people: each is a unit, and the others stay, as a list in which order is none."""

    def sides_of(some):
        x = np.array([[value] * 2 for value, _ in some], dtype="float32")
        np.savez(tmp_path / "a.npz", x=x, y=np.array([label for _, label in some]))
        pair = Pair(str(tmp_path / "a.npz"), None, 1, validation=validation, private_share=share)
        task = load(pair, "", False)
        return [
            sorted(zip(split.x[:, 0].tolist(), split.y.tolist(), strict=True))
            for split in (task.private, task.test, *([task.validation] if validation else []))
        ]

    try:
        whole = sides_of(rows)
        left = sides_of(rows[1:])
    except UserError:
        return
    gone = (float(rows[0][0]), rows[0][1])
    missing = [gone for before, after in zip(whole, left, strict=True) if len(before) > len(after)]
    assert len(missing) <= 1
    for before, after in zip(whole, left, strict=True):
        assert before == sorted([*after, gone]) or before == after


def test_equal_rows_are_no_copies(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 2), "float32"), y=np.arange(200) % 2)
    task = load(Pair(str(tmp_path / "a.npz"), None, 1), "", False)
    assert len(task.private.x) + len(task.test.x) == 200
    assert 20 < len(task.test.x) < 60
    assert task.findings == ()


@pytest.mark.parametrize("kind", ["table", "arrays", "texts"])
def test_rows_that_are_repeated_are_warned_of_and_those_of_few_values_are_not(tmp_path, kind):
    draw, frame = np.random.RandomState(0), people(200)
    words = draw.randint(100, 1000, (200, 20)).astype(str)
    known = pd.DataFrame({"text": map(" ".join, words)}) if kind == "texts" else frame.drop(columns="label")
    few = pd.DataFrame({f"c{i}": draw.randint(0, 4, 800) for i in range(4)})
    if kind == "texts":
        few = pd.DataFrame({"text": [f"town {i % 80}" for i in range(800)]})

    def warned(frame, unit=None):
        path = tmp_path / ("t.npz" if kind == "arrays" else "t.csv")
        if kind == "arrays":
            np.savez(
                path,
                x=frame.drop(columns=["label", "who"]).to_numpy(float),
                y=frame["label"].factorize()[0],
                who=frame["who"],
            )
        else:
            frame.drop(columns=[] if unit else "who").to_csv(path, index=False)
        task = load(Pair(str(path), None, 1, unit=unit), "", False)
        return [(f.severity, f.text.partition(": ")[2]) for f in task.findings if f.name == "copies"]

    known = known.assign(label=frame["label"], who=np.arange(200))
    ((severity, text),) = warned(pd.concat([known] * 4))
    assert severity == "warning"
    assert text.startswith(f"800 {'texts' if kind == 'texts' else 'rows'} are 200 different ones: each copy counts")
    assert warned(pd.concat([known] * 4), "who") == []
    assert warned(pd.concat([known, known[:5]])) == []
    for i in range(0 if kind == "texts" else 4):
        known[f"more{i}"] = draw.randn(200)
    rare = known.assign(label=["yes"] * 20 + ["no"] * 180)
    assert len(warned(pd.concat([rare, rare[:20].sample(160, replace=True, random_state=0)]))) == 1
    assert warned(few.assign(label=["yes", "no"] * 400, who=np.arange(800))) == []


# From a table to a release


def test_a_release_reads_the_tables_that_it_was_made_of(tmp_path, cli):
    frame = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "diagnosis"})
    new, path = frame[450:], table(tmp_path / "cancer.csv", frame[:450])
    out, err = done(cli, "fit", path, "epsilon=3")
    assert "rows: 30 columns, 30 of them without bounds, 2 classes" in err
    assert "\n  cancer.csv: labels by the column diagnosis\n" in err
    assert "it is of other rows than the weights" in err
    assert "test rows: accuracy" in out
    card = (tmp_path / "release" / "README.md").read_text()
    assert "pipeline_tag: tabular-classification" in card
    assert "private rows, which their owner does not name" in card
    page = (tmp_path / "release" / "privacy.html").read_text()
    assert "the names of columns, which of them are left out as ids or words, or have no number" in page
    assert "with all its copies" not in page

    # by name, in any order, with columns that it does not know, from a file or a program
    release = pubsel.load("release")
    answers = release.predict(new)
    assert (np.array(answers.answers) == new["diagnosis"].astype(str)).mean() > 0.8  # 0.77 of the larger class alone
    table(tmp_path / "new.csv", new[new.columns[::-1]].assign(more="x"))
    done(cli, "predict", "release", "new.csv", "to=a.csv")
    assert pd.read_csv("a.csv")["class"].astype(str).tolist() == answers.answers

    for wrong, message in (
        (new.drop(columns="mean area"), "no column mean area, which this model was trained on"),
        (new.to_numpy()[:, :30], "this model takes a table with the columns mean radius"),
        (np.zeros((3, 4, 4), np.uint8), "was trained on rows of numbers"),
    ):
        with pytest.raises(UserError, match=message):
            release.predict(wrong)


def test_a_release_of_features_reads_features(tmp_path, cli):
    y = np.arange(400) % 2
    x = np.random.RandomState(0).randn(400, 5) + y[:, None]
    np.savez(tmp_path / "a.npz", x=x, y=y)
    done(cli, "fit", "./a.npz", "epsilon=3")
    np.save(tmp_path / "new.npy", x)
    done(cli, "predict", "release", "new.npy", "to=a.csv")
    answers = pd.read_csv("a.csv")["class"]
    assert (answers == y).mean() > 0.8
    assert pubsel.load("release").predict(torch.from_numpy(x)).answers == answers.astype(str).tolist()
    assert pubsel.load("release").predict(x[0]).answers == [str(answers[0])]
    assert "how many numbers a row has" in (tmp_path / "release" / "privacy.html").read_text()


def test_public_tables_are_read_by_the_private_columns(tmp_path, cli):
    private = table(tmp_path / "t.csv", people(800))
    public = people(300, seed=1)[["label", "tiny", "income", "age"]].assign(more=1.0)
    table(tmp_path / "p.csv", public)
    out, err = done(cli, "fit", private, "public=[./p.csv]", "epsilon=3", "choice=0.5")
    assert "./p.csv (300 rows), or none: chosen privately" in err
    assert "public data, chosen privately: ./p.csv" in out
    table(tmp_path / "q.csv", public.drop(columns="income"))
    err = failed(cli, "fit", private, "public=[./q.csv]", "epsilon=3", "to=other", code=1)
    assert "no column income, which the private table has" in err


def test_bounds_that_changed_are_named_with_the_data(tmp_path, cli):
    private, bounds = table(tmp_path / "t.csv", people(300)), tmp_path / "b.json"
    for most, code in ((90, 0), (99, 1)):
        bounds.write_text(json.dumps({"age": [18, most]}))
        words = ("fit", private, "bounds=b.json", "epsilon=3", f"to=release{most}", "held_out=0", "delta=1e-3")
        err = failed(cli, *words, code=code) if code else done(cli, *words)[1]
    assert f"private={private} or bounds=b.json: its files are not those that" in err


def test_a_pool_of_tables_is_refused_in_the_plan_too(tmp_path, cli):
    private, pool = table(tmp_path / "t.csv", people(300)), table(tmp_path / "p.csv", people(90, seed=1))
    for dry in ("true", "false"):
        err = failed(cli, "fit", private, f"pool=[{pool}]", f"dry={dry}", "held_out=0", "delta=1e-3")
        assert "pool: compares features, not columns of a table: give one table as public" in err
    assert not (tmp_path / "results").exists()


def test_a_network_for_images_takes_no_rows(tmp_path, cli):
    path = table(tmp_path / "t.csv", people(100))
    err = failed(cli, "run", "model=scattering", *ROWS[1:], f"pair.private={path}", "epsilon=1")
    assert "set model=rows" in err
    err = failed(cli, "run", *ROWS, "pair.private=digits", "epsilon=1")
    assert "has images, and model=rows takes rows of numbers" in err


def test_fields_of_a_table_go_to_json_and_back():
    fields = (Field("a"), Field("b", word="x"), Field("a", missing=True), Field("c", least=0.0, most=2.0))
    assert tuple(Field(**json.loads(json.dumps(field.facts()))) for field in fields) == fields
    frame = pd.DataFrame({"a": [1, None], "b": ["X ", "y"], "c": [1.0, 9.0]})
    expected = [[1, 1, 0, 0], [math.nan, 0, 1, 1]]
    np.testing.assert_array_equal(as_rows(frame, fields).numpy(), np.array(expected, dtype="float32"))


# What real tables and arrays have


def test_bytes_of_a_table_are_words_and_differ_as_they_do(tmp_path):
    """Spark and others write texts as bytes: patients, labels and words, none of which is an image."""
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0) % 7})
    frame["patient"] = [b"p%d" % (i // 4) for i in range(40)]
    frame["label"] = [b"yes" if i % 8 < 4 else b"no" for i in range(40)]
    frame["code"] = [bytes([255, i]) for i in range(40)]
    frame.to_parquet(tmp_path / "t.parquet")
    rows = vectors.read_rows(tmp_path / "t.parquet", "patient", Read(accept=["words"]))
    assert (rows.names, len(np.unique(rows.people))) == (("no", "yes"), 10)
    assert len(np.unique(vectors.read_rows(tmp_path / "t.parquet", "code", Read()).people)) == 40


def test_no_row_decides_how_the_others_are_read(tmp_path):
    """A word among numbers, or among True and False, leaves them what they are; codes with bounds keep their zeros."""
    bounds = tmp_path / "bounds.json"
    bounds.write_text(json.dumps({"icd": ["250.10", "250.1", "V45.01"], "smoker": [0, 1]}))
    frame = pd.DataFrame(
        {"icd": ["250.10", "250.1"] * 20, "smoker": ["True", "False"] * 20, "label": [0, 0, 1, 1] * 10}
    )
    columns_of = []
    for changes in ({}, {"icd": "V45.01"}, {"smoker": "unsure"}, {"smoker": "1"}):
        changed = frame.copy()
        for name, value in changes.items():
            changed.loc[39, name] = value
        rows = vectors.read_rows(tmp_path / table(tmp_path / "t.csv", changed), None, Read(bounds=str(bounds)))
        columns_of.append(rows.columns)
        expected = torch.tensor([[1.0, 1, 0, 0], [-1, 0, 1, 0]]).repeat(19, 1)
        assert torch.equal(rows.x[:38], expected)
        assert ("missing" in {finding.name for finding in rows.findings}) == ("unsure" in changes.values())
    assert len(set(columns_of)) == 1


def test_bounds_of_all_columns_and_public_rows_fit_together(tmp_path):
    read_of = Read(bounds=[-1.0, 100_000.0])
    mine, others = (table(tmp_path / f"{seed}.csv", people(200, seed)) for seed in (0, 1))
    task = load(Pair(private=mine, public=others, m=50, read=read_of), "", False)
    assert task.raw == 0
    centre, scale, _ = columns.by_public(task.public.x, 0)
    assert (centre.tolist(), scale.tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("value", ["3.1 mm", "3,1", "yes"])
def test_values_that_are_no_numbers_are_named_wherever_they_are(value, tmp_path):
    """In new rows, in public tables, and in columns with bounds as in those without."""
    bounds = tmp_path / "bounds.json"
    bounds.write_text('{"age": [0, 120]}')
    new = people(40).astype({"age": object})
    new.loc[3, "age"] = value
    fields = (Field("age"), Field("income"))
    with pytest.raises(UserError, match=f"1 values in columns of numbers are none, or too large, such as '{value}'"):
        vectors.new_rows("new", new, fields)
    path = tmp_path / table(tmp_path / "t.csv", new)
    for rows in (
        vectors.read_rows(path, None, Read(), like=fields),
        vectors.read_rows(path, None, Read(bounds=str(bounds))),
    ):
        (finding,) = [finding for finding in rows.findings if finding.name == "missing"]
        assert (finding.severity, repr(value) in finding.text) == ("error", True)
    assert vectors.new_rows("new", new.replace(value, "n/a"), fields)[3].isnan().tolist() == [True, False]


def test_dates_with_bounds_are_no_numbers(tmp_path):
    pytest.importorskip("pyarrow")
    frame = people(40)
    frame["age"] = pd.Timestamp("2020-01-01")
    frame.to_parquet(tmp_path / "t.parquet")
    (tmp_path / "bounds.json").write_text('{"age": [0, 120]}')
    rows = vectors.read_rows(tmp_path / "t.parquet", None, Read(bounds=str(tmp_path / "bounds.json")))
    assert any("40 values in columns of numbers are none" in finding.text for finding in rows.findings)


DATES = (
    pd.date_range("2020", periods=40),
    pd.timedelta_range("1h", periods=40),
    pd.period_range("2020", periods=40, freq="Y"),
)
OF_ARROW = ("timestamp[ns]", "duration[ns]", "date32[day]", "time64[us]")
OTHERS = (np.arange(40) + 1j, [np.timedelta64(i, "h") for i in range(40)])


@pytest.mark.parametrize("dtype", [None, object])
@pytest.mark.parametrize("objects", [*DATES, *OTHERS])
def test_objects_that_are_no_numbers_are_none_and_no_names(objects, dtype):
    values = pd.Series(objects, dtype=dtype)
    assert np.isnan(vectors.numbers_of(values)).all()
    (finding,) = vectors.about_words("t", pd.DataFrame({"day": values}))
    assert "1 columns have words: day" in finding.text
    numbers = pd.Series([1, 2.5, True, "3", "true", Decimal("0.5"), np.float32(4), np.bool_(False), None], dtype=object)
    assert vectors.numbers_of(numbers)[:-1].tolist() == [1, 2.5, 1, 3, 1, 0.5, 4, 0]


@pytest.mark.parametrize("kind", OF_ARROW)
def test_dates_of_arrow_in_memory_are_dates(kind):
    pytest.importorskip("pyarrow")
    days = pd.Series(DATES[1] if kind.startswith("duration") else DATES[0])
    days = {"date32[day]": days.dt.date, "time64[us]": days.dt.time}.get(kind, days) if kind[:2] != "du" else days
    frame = people(40).drop(columns="label", errors="ignore").assign(day=days.astype(f"{kind}[pyarrow]"))
    with memory.holding(memory.examples_in(frame, np.arange(40) % 2)) as (name,):
        assert any("columns have words: day" in finding.text for finding in read(name).findings)


@pytest.mark.parametrize("cell", [["a", "b"], ["a", None], [[1, 2], [3]], [[1, 2], [3, 4]], {"k": 1}])
def test_cells_that_are_no_numbers_are_one_line(cell, tmp_path):
    pytest.importorskip("pyarrow")
    frame = people(40).assign(cell=[cell] * 40)
    frame.to_parquet(tmp_path / "t.parquet")
    findings = vectors.read_rows(tmp_path / "t.parquet", None, Read()).findings
    assert any("columns have words: cell" in finding.text for finding in findings)
    with pytest.raises(UserError, match=r"lists in column cell are no numbers|columns have words: cell"):
        pubsel.fit(frame)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", np.longdouble])
def test_numbers_in_types_that_torch_lacks_are_read(dtype, tmp_path):
    x = np.arange(120).reshape(40, 3).astype(dtype)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2)
    assert torch.equal(vectors.read_rows(tmp_path / "a.npz", None, Read()).x.float(), torch.arange(120.0).view(40, 3))
    with memory.holding(memory.examples_in(x, np.arange(40) % 2)) as (name,):
        assert torch.equal(open_dataset(name, "", False).train.x.sort(0)[0], torch.arange(120.0).view(40, 3))


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        (1_700_000_000 + np.arange(120) % 60, True),
        (1_700_000_000 + np.arange(120) % 2, True),
        (np.where(np.arange(120), 1_700_000_000 + np.arange(120) % 60, 0), True),  # one other row decides nothing
        (1_700_000_000 + 1000 * np.arange(120), False),
        (1 + 2e-16 * np.arange(120), False),  # one number, as sums in several orders are
        (np.full(120, np.nan), False),
    ],
)
def test_numbers_that_are_equal_once_they_are_rounded_are_named(values, lost, tmp_path):
    frame = people(120).assign(seconds=values)
    table(tmp_path / "t.csv", frame)
    (tmp_path / "bounds.json").write_text('{"seconds": [1.6e9, 1.8e9]}')
    np.savez(tmp_path / "a.npz", x=frame[["age", "seconds"]].to_numpy(), y=np.arange(120) % 2)
    bounded = Read(bounds=str(tmp_path / "bounds.json"))
    for name, rules, expected in (("t.csv", bounded, False), ("t.csv", Read(), lost), ("a.npz", Read(), lost)):
        names = {finding.name for finding in vectors.read_rows(tmp_path / name, None, rules).findings}
        assert ("rounded" in names) == expected


def test_rows_with_more_values_than_the_head_are_named_and_empty_ones_ignored(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n" + "1,2,yes,\n3,4,no,\n" * 5)
    assert torch.equal(vectors.read_rows(path, None, Read()).x[:2], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    path.write_text("a,b,label\n1,2,yes,\n" + "3,4,5,no\n" * 5)
    with pytest.raises(UserError, match="line 3 has more values than the head has names"):
        vectors.read_rows(path, None, Read())


def test_a_column_of_pandas_that_numbers_rows_is_no_feature(tmp_path):
    pytest.importorskip("pyarrow")
    people(60).query("age > 30").to_parquet(tmp_path / "t.parquet")
    rows = vectors.read_rows(tmp_path / "t.parquet", None, Read())
    assert [column.name for column in rows.columns] == ["age", "income", "tiny"]


def test_a_word_for_no_label_that_many_rows_have_may_be_a_class(tmp_path):
    frame = people(40).assign(label=["none", "mild", "severe", "mild"] * 10)
    path = tmp_path / table(tmp_path / "t.csv", frame)
    (finding,) = [f for f in vectors.read_rows(path, None, Read()).findings if f.name == "unlabelled"]
    assert (finding.severity, finding.remedy) == ("error", "if that is a class, call it by another word")
    frame.loc[frame.label == "none", "label"] = ""
    (finding,) = [
        f for f in vectors.read_rows(tmp_path / table(path, frame), None, Read()).findings if f.name == "unlabelled"
    ]
    assert finding.severity == "warning"


@pytest.mark.parametrize("word", ["-", "NA", "?"])
def test_a_label_that_is_missing_is_no_class(word, tmp_path):
    frame = people(40)
    frame.loc[:3, "label"] = word
    rows = vectors.read_rows(tmp_path / table(tmp_path / "t.csv", frame), None, Read())
    assert (len(rows.y), rows.names) == (36, ("no", "yes"))
    assert "unlabelled" in {finding.name for finding in rows.findings}


def test_labels_by_columns_are_several_whatever_the_rows_have(tmp_path):
    """True and False are 1 and 0, and no row decides whether a model answers classes or labels."""
    frame = people(40).drop(columns="label").assign(fever=[True, False] * 20, cough=[False, True] * 20)
    for first in (False, True):
        frame.loc[0, "cough"] = first
        rows = vectors.read_rows(tmp_path / table(tmp_path / "t.csv", frame), None, Read(label=["fever", "cough"]))
        assert rows.names == ("cough", "fever")
        assert rows.y[:2].tolist() == [[float(first), 1.0], [1.0, 0.0]]


def test_an_empty_list_of_labels_is_none_of_them(tmp_path):
    pytest.importorskip("pyarrow")
    of_each = [[], ["fever"], ["cough", "fever"], None, ["cough"]]
    people(40).assign(label=of_each * 8).to_parquet(tmp_path / "t.parquet")
    rows = vectors.read_rows(tmp_path / "t.parquet", None, Read())
    assert (rows.names, len(rows.y)) == (("cough", "fever"), 32)
    assert rows.y[:4].tolist() == [[0, 0], [0, 1], [1, 1], [1, 0]]
    assert "8 of 40 rows have no label" in next(f.text for f in rows.findings if f.name == "unlabelled")


def test_the_labels_are_the_columns_that_are_named_though_no_row_has_one(tmp_path):
    """The only row with a label does not decide how many labels a model has."""
    frame = people(40).drop(columns="label").assign(fever=0, cough=[0, 1] * 20, unknown=[0, 0, 0, 1] * 10)
    for first in (0, 1):
        frame.loc[0, "fever"] = first
        path = tmp_path / table(tmp_path / "t.csv", frame)
        rows = vectors.read_rows(path, None, Read(label=["fever", "cough", "unknown"]))
        assert rows.names == ("cough", "fever", "unknown")
        assert rows.y[[0, 1, 3]].tolist() == [[0, first, 0], [1, 0, 0], [1, 0, 1]]


def test_bounds_come_before_rounding_and_infinite_numbers_are_missing(tmp_path):
    x = np.stack([5.8e6 + np.arange(40) / 100, np.r_[np.inf, -np.inf, np.zeros(38)]], axis=1)
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(40) % 2)
    read_of = Read(bounds=[5.8e6, 5.8e6 + 0.4])
    rows = vectors.read_rows(tmp_path / "t.npz", None, read_of)
    assert len(rows.x[:, 0].unique()) == 40
    assert rows.x[:2, 1].tolist() == [0.0, 0.0]
    assert torch.equal(vectors.new_rows("new", x, rows.columns), rows.x)
    scaled = vectors.read_rows(tmp_path / "t.npz", None, Read(scale=Scale.private))
    assert scaled.x.isnan().sum() == 2


def test_new_rows_of_an_array_are_those_of_its_features(tmp_path):
    x = np.random.RandomState(0).randn(20, 3)
    np.savez(tmp_path / "t.npz", x=x, x_raw=x, x_ids=np.arange(20), y=np.arange(20))
    assert vectors.new_rows("new", tmp_path / "t.npz", ()).shape == (20, 3)
    np.savez(tmp_path / "t.npz", x_train=x, x_test=x[:5])
    assert vectors.new_rows("new", tmp_path / "t.npz", ()).shape == (25, 3)
    with pytest.raises(UserError, match="1 of 20 rows have numbers that are missing"):
        vectors.new_rows("new", np.where(np.arange(60).reshape(20, 3) == 4, np.nan, x), ())
    (tmp_path / "t.jsonl").write_text("{}")
    with pytest.raises(UserError, match="give a table, npz or npy file"):
        vectors.new_rows("new", tmp_path / "t.jsonl", ())


def test_rows_of_new_parts_are_in_order_and_named_by_their_array(tmp_path):
    x = np.arange(12.0).reshape(6, 2)
    np.savez(tmp_path / "t.npz", x_test=x[4:], x_val=x[3:4], x_train=x[:3])
    given = at_path(tmp_path / "t.npz", Takes(rows=True))
    assert given.n == 6
    names, rows = zip(*given.each(), strict=True)
    path = tmp_path / "t.npz"
    assert list(names) == [f"{path}/{row}" for row in "x_train/0 x_train/1 x_train/2 x_val/0 x_test/0 x_test/1".split()]
    assert torch.stack(rows).tolist() == x.tolist()
    np.save(tmp_path / "t.npy", x)
    given = at_path(tmp_path / "t.npy", Takes(rows=True))
    assert [name for name, _ in given.each()] == [f"{tmp_path / 't.npy'}/{i}" for i in range(6)]


def test_a_table_of_features_is_read_by_the_numbers_of_its_columns(tmp_path):
    frame = pd.DataFrame(np.arange(24.0).reshape(2, 12), columns=[str(i) for i in range(12)])
    for order in (sorted(frame), [*frame][::-1]):
        path = Path(table(tmp_path / "t.csv", frame[order]))
        assert vectors.new_rows("t.csv", path, ()).tolist() == frame.to_numpy().tolist()
        assert vectors.new_rows("t", frame[order], ()).tolist() == frame.to_numpy().tolist()
    named = frame.add_prefix("e")
    assert vectors.new_rows("t", named, ()).tolist() == frame.to_numpy().tolist()
    for wrong, message in (
        (named[sorted(named)], "t: column e2 comes too late"),
        (frame.drop(columns="11").assign(id=[7, 8]), "t: column id is no feature"),
        (frame.drop(columns="11").assign(Label=[7, 8]), "t: column Label is no feature"),
        (frame.assign(**{"3": ["1", "about 4"]}), "t: column 3, row 2: 'about 4' is no number"),
        (frame.assign(**{"3": ["1", "?"]}), "1 of 2 rows have numbers that are missing"),
    ):
        with pytest.raises(UserError, match=message):
            vectors.new_rows("t", wrong, ())


OF_SEX = (Field("age", least=0.0, most=100.0), Field("sex", word="m"), Field("sex", word="f"), Field("raw"))


def test_words_and_bounds_that_fit_few_values_stop_before_anything_is_spent(tmp_path):
    frame = people(60).assign(sex=["m", "f"] * 30)
    bounds = {"age": [0, 120], "sex": ["m", "f"]}
    for column, values, why in (
        ("sex", ["Male"] * 54 + ["m"] * 6, "54 of 60 values in column sex are not in m, f, such as 'Male'"),
        ("sex", ["x"] * 5 + ["M "] * 55, ""),
        ("sex", [""] * 30 + ["f"] * 30, ""),
        ("age", [130.0] * 31 + [4.0] * 29, "31 of 60 values in column age are not in 0 to 120, such as 130.0"),
        ("age", [130.0] * 7 + [4.0] * 53, "7 of 60 values in column age are not in 0 to 120, such as 130.0"),
        ("age", [130.0] * 5 + [4.0] * 55, ""),
    ):
        path = table(tmp_path / "t.csv", frame.assign(**{column: values}))
        (tmp_path / "b.json").write_text(json.dumps(bounds))
        found = [f for f in read(path, bounds=str(tmp_path / "b.json")).findings if f.name == "outside"]
        severity = "warning" if why.startswith("7 ") else "error"
        assert [(f.severity, f.text) for f in found] == ([(severity, f"t.csv: {why}")] if why else [])
    np.savez(tmp_path / "a.npz", x=[[50.0, 0.5]] * 60, y=[0, 1] * 30)
    (found,) = read(str(tmp_path / "a.npz"), bounds=[0, 1]).findings
    assert found.text == "a.npz: 1 of 2 columns have most of their numbers outside of 0 to 1"
    np.savez(tmp_path / "a.npz", x=[[50.0, 0.5]] * 7 + [[0.3, 0.5]] * 53, y=[0, 1] * 30)
    (found,) = read(str(tmp_path / "a.npz"), bounds=[0, 1]).findings
    assert (found.severity, found.text.partition(" have ")[2][:15]) == ("warning", "a tenth or more")


def test_new_words_are_named_and_a_column_without_one_that_fits_is_refused(capsys):
    new = pd.DataFrame({"age": [30, 40], "sex": ["m", "F"], "raw": [1.0, 2.0]})
    assert vectors.new_rows("new", new, OF_SEX).tolist() == [
        [pytest.approx(-0.4), 1, 0, 1],
        [pytest.approx(-0.2), 0, 1, 2],
    ]
    assert capsys.readouterr().err == ""
    for column, values, warning in (
        ("sex", ["m", "x"], "1 of 2 values in column sex are not in m, f, such as 'x'"),
        ("age", [30, 400], "1 of 2 values in column age are not in 0 to 100, such as 400"),
        ("sex", ["", None], "column sex is empty in all 2 rows"),
        ("raw", [np.nan, np.nan], "column raw is empty in all 2 rows"),
    ):
        vectors.new_rows("new", new.assign(**{column: values}), OF_SEX)
        assert f"warning: new: {warning}" in capsys.readouterr().err
    coded = pd.concat([new.assign(raw=raw) for raw in (1, 2, 3, -999)])
    vectors.new_rows("new", coded, OF_SEX)
    assert "warning: new: column raw has -999, far from its others" in capsys.readouterr().err
    with pytest.raises(UserError, match="2 of 2 values in column sex are not in m, f, such as 'male', 'female': write"):
        vectors.new_rows("new", new.assign(sex=["male", "female"]), OF_SEX)


def test_decimal_commas_are_called_that(tmp_path):
    (tmp_path / "t.csv").write_text("a;b;label\n" + "".join(f"{i},5;{i},25;{i % 2}\n" for i in range(40)))
    with pytest.raises(UserError, match="no column of numbers: it has a, b: with decimal commas: write points"):
        vectors.read_rows(tmp_path / "t.csv", None, Read())
    (tmp_path / "t.csv").write_text("a;b;label\n" + "".join(f"{i},5;{i}.25;{i % 2}\n" for i in range(40)))
    (finding,) = (f for f in vectors.read_rows(tmp_path / "t.csv", None, Read()).findings if f.severity == "error")
    assert (finding.name, finding.text) == ("words", "t.csv: columns have numbers with decimal commas: a")


@pytest.mark.parametrize("sign", ",.")
def test_signs_between_thousands_are_no_decimal_ones(sign, tmp_path):
    numbers = [f"{237 * i % 90000:,}".replace(",", sign) for i in range(5000)]
    rows = "".join(f'"{number}",{i},{i % 2}\n' for i, number in enumerate(numbers))
    (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}")
    text = "columns have numbers with commas or points between thousands: a"
    frame = pd.read_csv(tmp_path / "t.csv", dtype={"a": str})
    with memory.holding(memory.examples_in(frame)) as (name,):
        for path in (str(tmp_path / "t.csv"), name):
            (finding,) = (f for f in read(path).findings if f.severity == "error")
            assert (finding.name, finding.text.partition(": ")[2]) == ("words", text)
    with pytest.raises(UserError, match="values in columns of numbers are none"):
        vectors.new_rows("new", frame, (Field("a"),))
    # a single value, such as 24.12, decides nothing
    (tmp_path / "t.csv").write_text(f"a,b,label\n24{sign}12,0,0\n".replace(",12,", ";12,") + rows)
    (finding,) = (f for f in read(str(tmp_path / "t.csv")).findings if f.severity == "error")
    assert (finding.name, finding.text.partition(": ")[2]) == ("words", text)
    # in late rows alone, after as many as are below a thousand; and so are zeros before ids
    numbers = [f"{400 + i % 600}" if i < 1200 else f"1{sign}{i % 300:03}" for i in range(1500)]
    rows = "".join(f"{number};{i};{i % 2}\n" for i, number in enumerate(numbers))
    (tmp_path / "t.csv").write_text(f"a;b;label\n{rows}")
    findings = [f.text.partition(": ")[2] for f in read(str(tmp_path / "t.csv")).findings if f.severity == "error"]
    assert findings == [text]
    # decimals of three places, without zeros at their end in the second file
    for written in ((f"{i % 40 / 8:.3f}" for i in range(5000)), (f"{20 + i % 500 * 0.033:.5g}" for i in range(5000))):
        rows = "".join(f"{number},{i},{i % 2}\n" for i, number in enumerate(written))
        (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}")
        assert [column.name for column in read(str(tmp_path / "t.csv")).columns] == ["a", "b"]


def test_a_table_of_numbers_with_names_of_images_is_named(tmp_path):
    frame = people(60).assign(ImageID=[f"{i:04}.png" for i in range(60)])
    (finding,) = (f for f in read(table(tmp_path / "t.csv", frame)).findings if f.name == "columns" and f.remedy)
    assert finding.line().endswith("ImageID has names of images, and the other columns are read: set path=ImageID")
    with pytest.raises(UserError, match="it has ImageID: give text=COLUMN or path=COLUMN, if one"):
        read(table(tmp_path / "t.csv", frame[["ImageID", "label"]]))


def test_arrays_have_labels_as_tables_do_and_public_ones_need_none(tmp_path):
    x = np.random.RandomState(0).randn(60, 3)
    np.savez(tmp_path / "a.npz", x=x, y=[-1, 1] * 30)
    assert read(str(tmp_path / "a.npz")).names == ("-1", "1")
    for labels in ([-1, 0, 1] * 20, [-1] * 60, [-2, 1] * 30):
        np.savez(tmp_path / "b.npz", x=x, y=labels)
        with pytest.raises(UserError, match=r"labels out of range: -[12] is below 0: leave examples without a label"):
            read(str(tmp_path / "b.npz"))
    np.savez(tmp_path / "p.npz", x=x + 1)
    (tmp_path / "p").mkdir()
    np.save(tmp_path / "p" / "p.npy", x + 1)
    for public in ("p.npz", "p/p.npy"):
        task = load(Pair(private=str(tmp_path / "a.npz"), public=str(tmp_path / public), m=60), "", False)
        assert len(task.public.x) == 60
        with pytest.raises(UserError, match="no labels in it: add "):
            load(Pair(private=str(tmp_path / public), public=None, m=1), "", False)


@pytest.mark.parametrize("theirs", [["b", "c", "zz"], ["zz", "c", "b"], ["a"], None])
def test_public_classes_are_those_of_the_same_name_or_none(theirs, tmp_path):
    """A class that the private set lacks, and rows without labels, are no class of it."""
    mine = people(90).assign(label=["a", "b", "c"] * 30)
    others = people(90, 1)
    others = others.drop(columns="label") if theirs is None else others.assign(label=np.resize(theirs, 90))
    paths = [table(tmp_path / f"{i}.csv", frame) for i, frame in enumerate((mine, others))]
    y = load(Pair(private=paths[0], public=paths[1], m=60), "", False).public.y
    numbers = {"a": 0, "b": 1, "c": 2}
    expected = {numbers.get(name, 3) for name in theirs or ["none of them"]}
    assert {min(number, 3) for number in y.tolist()} == expected


@pytest.mark.parametrize("scale", [1, 1e6])
def test_no_column_alone_decides_a_distance(scale, tmp_path, cli):
    """Distances of tables see each column, whatever its unit, and with a missing number they are numbers."""
    for name, shift in {"mine": 0, "near": 0.5, "far": 3}.items():
        draw = np.random.RandomState(len(name))
        x = pd.DataFrame(draw.randn(120, 3), columns=["a", "b", "c"]).assign(label=[0, 1] * 60)
        x["a"] *= scale
        x["c"] += shift
        x.loc[3, "b"] = np.nan
        table(tmp_path / f"{name}.csv", x)
    words = "private=./mine.csv public=[./near.csv,./far.csv] model=rows distance=mmd distance.m=60"
    done(cli, "rank", *words.split(), "distance.initialisations=2")
    values = only_record(kind="ranks")["values"]
    assert np.mean(values["./far.csv"]) > 3 * np.mean(values["./near.csv"])


@pytest.mark.parametrize("ids", ["of people", "in order", "of rows"])
@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_numbers_that_are_ids_by_their_values_are_called_that(ids, suffix, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 3)), np.sort(rng.integers(2, size=400))
    people = np.repeat(rng.choice(90_000, 100, replace=False), 4)
    column = {"of people": rng.permutation(people), "in order": np.repeat(np.arange(100), 4), "of rows": np.arange(400)}
    measured = {
        "age": rng.integers(18, 90, 400),
        "platelets": rng.normal(250, 60, 400).round(),
        "hour": np.arange(400) % 24,
    }
    for more, expected in (
        (column[ids], {("ids", "error") if ids == "of people" else ("columns", "warning")}),
        *((values, set()) for values in measured.values()),
    ):
        table = pd.DataFrame(x).assign(cow=more, label=y).rename(columns=str)
        table.to_csv(tmp_path / "t.csv", index=False)
        np.savez(tmp_path / "t.npz", x=np.c_[x, more], y=y)
        findings = vectors.read_rows(tmp_path / f"t{suffix}", None, Read()).findings
        assert {(f.name, f.severity) for f in findings if f.severity != "note"} == expected


def test_a_column_that_is_not_read_may_say_whose_each_example_is(tmp_path):
    y, people = np.arange(120) % 2, np.repeat([f"K{i * 37}" for i in range(30)], 4)
    np.savez(
        tmp_path / "t.npz",
        x=np.random.default_rng(0).normal(size=(120, 3)),
        y=y,
        kennung=people,
        site=np.arange(120) % 7,
    )
    pd.DataFrame({"text": [f"word {i}" for i in range(120)], "label": y, "kennung": people}).to_csv(tmp_path / "t.csv")
    of_arrays = vectors.read_rows(tmp_path / "t.npz", None, Read()).findings
    of_texts = texts.read_texts(tmp_path / "t.csv", None, Read()).rows.findings
    for findings, what in ((of_arrays, "example"), (of_texts, "text")):
        assert f"'kennung' may say whose each {what} is" in "".join(f.text for f in findings if f.name == "ids")


def test_rows_of_the_test_part_that_are_training_rows_are_warned_of(tmp_path):
    frame = people(200).assign(split=["train"] * 200)
    path = table(tmp_path / "t.csv", pd.concat([frame, frame[:40].assign(split="test")]))
    found = [f.text for f in load(Pair(path, None, 1), "", False).findings if f.name == "both_sides"]
    assert found == [f"{path}: 40 of 40 test rows are training rows too"]
    more = np.random.RandomState(0).randn(222, 4)
    frame = people(222).assign(split=["train"] * 200 + ["test"] * 22, **{f"more{i}": more[:, i] for i in range(4)})
    some = pd.concat([frame, frame[:18].assign(split="test")])
    path = table(tmp_path / "s.csv", some)
    found = [f.text for f in load(Pair(path, None, 1), "", False).findings if f.name in ("copies", "both_sides")]
    assert found == [f"{path}: 18 of 40 test rows are training rows too"]


def test_labels_that_mean_the_same_are_not_two_classes(tmp_path):
    frame = people(90)
    yes = frame.assign(label=[("yes", "no", "1")[i % 3] for i in range(90)])
    (finding,) = (f for f in read(table(tmp_path / "t.csv", yes)).findings if f.severity == "error")
    assert (
        finding.line()
        == "t.csv: labels '1', 'yes' mean the same, and would be two classes: write each class in one way"
    )
    for words in (("1", "0"), ("t", "n", "x"), ("yes", "no", "maybe")):
        kept = frame.assign(label=[words[i % len(words)] for i in range(90)])
        assert not [f for f in read(table(tmp_path / "t.csv", kept)).findings if f.severity == "error"]


def test_a_column_with_bounds_that_is_the_label_is_named(tmp_path):
    frame = people(200)
    path = Path(table(tmp_path / "t.csv", frame.assign(sex=frame["label"].map({"yes": "f", "no": "m"}))))
    (tmp_path / "b.json").write_text('{"sex": ["f", "m"]}')
    findings = vectors.read_rows(path, None, Read(bounds=str(tmp_path / "b.json"))).findings
    assert "t.csv: columns have one number for each label: sex" in [f.text for f in findings]


@pytest.mark.parametrize("written", ["{} %", "<{}", "{}mg"])
def test_numbers_with_units_or_signs_are_called_that(written, tmp_path):
    frame = people(200).assign(crp=[written.format(i) if i % 3 else f"{i}.5" for i in range(200)])
    (finding,) = (f for f in read(table(tmp_path / "t.csv", frame)).findings if f.severity == "error")
    assert finding.text.startswith("t.csv: columns have numbers with units or signs, or ids: crp (")
