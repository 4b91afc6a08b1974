"""What a program imports: each function gives what its command gives."""

import gzip
import json
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import pubsel
from pubsel import cli, records
from pubsel.commands import tune
from pubsel.messages import UsageError, UserError
from pubsel.papers.typeset import text

WORDS = """+experiment=quickstart model=linear training.steps=3 distance.initialisations=2 algorithm.k=20 pair.m=50
    distance.m=50""".split()
CIRCUMSTANCES = ("seconds", "finished", "seconds_candidate", "seconds_private")


def record_in(folder: Path) -> dict:
    (path,) = folder.glob("*/result.json")
    return json.loads(path.read_text())


def without_times(record: dict) -> dict:
    record = json.loads(json.dumps(record))
    for part in (record, record.get("distance")):
        for key in CIRCUMSTANCES:
            if isinstance(part, dict):
                part.pop(key, None)
    return record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pubsel.Record:
    folder = tmp_path_factory.mktemp("trained")
    settings = {"training": {"steps": 3}, "distance": {"initialisations": 2, "m": 50}, "pair": {"m": 50}}
    settings["algorithm"] = {"k": 20}
    return pubsel.train("+experiment=quickstart", "model=linear", results=folder, epsilon=3, **settings)


def test_train_gives_the_record_of_run(trained: pubsel.Record, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", *WORDS, "epsilon=3", f"results={tmp_path}"]) == 0
    assert without_times(trained) == without_times(record_in(tmp_path / "runs"))
    assert capsys.readouterr().out == f"{trained}\n"
    assert (trained.folder / "model.pt").exists()


def test_tune_gives_the_record_of_tune(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tune, "draw", lambda tuning, secret: [1, 0])
    x, y = load_digits(return_X_y=True)
    arrays = {"train_images": (16 * x.reshape(-1, 8, 8)).clip(0, 255).astype(np.uint8), "train_labels": y}
    np.savez(tmp_path / "mine.npz", **arrays, test_images=arrays["train_images"][:50], test_labels=y[:50])
    words = "model=pixels algorithm=dp_sgd_clip1 distance=none threads=1".split()
    settings = {"private": tmp_path / "mine.npz", "epsilon": 4, "pair": {"public": None}, "results": tmp_path}
    settings |= {"privacy": {"delta": 1e-4}, "training": {"batch_size": 10**6}}
    over = {"training.epochs": [1, 3], "training.milestones": [[0.5]]}
    plan = pubsel.tune(over, *words, dry=True, **settings)
    assert plan == {}
    assert "the best of 2 settings" in str(plan)
    assert not plan.folder.exists()

    record = pubsel.tune(over, *words, **settings)
    assert record["tuning"]["over"] == [f"training.epochs={n} training.milestones=[0.5]" for n in (1, 3)]
    assert without_times(record) == without_times(pubsel.load(record.folder))
    assert len(record.predict(arrays["train_images"][:3]).answers) == 3
    with pytest.raises(UsageError, match="one setting"):
        pubsel.tune("training.epochs=1", *words, **settings)


def test_rank_gives_the_record_of_rank(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["private=digits", "public=[digits,[noise,photo_patches]]", "model=digits_cnn", "distance.m=40"]
    assert cli.main(["rank", *words, "distance.initialisations=2", f"results={tmp_path / 'one'}"]) == 0
    distance = {"m": 40, "initialisations": 2}
    public = ["digits", ("noise", "photo_patches")]
    record = pubsel.rank("digits", public, "model=digits_cnn", results=tmp_path / "two", distance=distance)
    assert without_times(record) == without_times(record_in(tmp_path / "one" / "ranks"))
    first, second = capsys.readouterr().out, str(record)
    assert [line for line in first.splitlines() if "Per network:" not in line] == [
        line for line in second.splitlines() if "Per network:" not in line
    ]
    assert pubsel.load(record["identity"], tmp_path / "two").text == record.text


def test_load_gives_the_record_that_runs_shows(trained: pubsel.Record, capsys: pytest.CaptureFixture) -> None:
    for name in (trained["identity"], trained.folder, trained.folder / "result.json"):
        again = pubsel.load(name, trained.folder.parents[1])
        assert without_times(again) == without_times(trained)
        assert (again.folder, again.text) == (trained.folder, trained.text)
    assert cli.main(["runs", "show", trained["identity"], f"results={trained.folder.parents[1]}"]) == 0
    assert again["privacy"]["statement"] in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing-like-it: no such file, and no record of this name in"):
        pubsel.load("nothing-like-it", trained.folder)


def test_load_reads_the_records_that_are_kept_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    kept = shutil.copy(Path(__file__).parents[1] / "results" / "records" / "gsd_table2.jsonl.gz", tmp_path / "records")
    with gzip.open(kept, "rt") as lines:
        name = json.loads(next(lines))["identity"]
    assert pubsel.load(name, tmp_path)["identity"] == name


def test_export_gives_the_folder_of_the_command(trained: pubsel.Record, tmp_path: Path) -> None:
    results = trained.folder.parents[1]
    with pytest.raises(UserError, match=r"privacy\.secure_noise=true|anyway=true"):
        pubsel.export(trained, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    words = [f"results={results}", "anyway=true", f"to={tmp_path / 'words'}"]
    assert cli.main(["export", trained["identity"], *words]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "words").iterdir()}
    for i, run in enumerate((trained, trained["identity"], trained.folder)):
        record = pubsel.export(run, tmp_path / f"{i}", anyway=True, results=results)
        assert record.folder == tmp_path / f"{i}"
        assert {path.name: path.read_bytes() for path in record.folder.iterdir()} == files
        assert record["weights"] == json.loads(files["config.json"])["weights"]
        assert "which may NOT be given away" in str(record)


def test_table_gives_the_rows_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "records").mkdir()
    shutil.copy(Path(__file__).parents[1] / "results" / "records" / "gsd_table2.jsonl.gz", tmp_path / "records")
    frame = pubsel.table("gsd_table2", results=tmp_path)
    assert not (tmp_path / "tables").exists()
    assert cli.main(["table", "gsd_table2", f"results={tmp_path}"]) == 0
    assert text(frame) in capsys.readouterr().out
    assert frame["utility"].notna().any()
    assert "paper_success_rate" in pubsel.table("gsd_table8", results=tmp_path)
    with pytest.raises(UsageError, match="unknown table 'all': use one of adamix_ours"):
        pubsel.table("all")


def test_open_dataset_gives_what_data_check_tells(capsys: pytest.CaptureFixture) -> None:
    source = pubsel.open_dataset("digits")
    assert cli.main(["data", "check", "digits"]) == 0
    assert capsys.readouterr().out == f"digits: {source!r}\n"
    assert repr(source).startswith("1,297 training and 500 test images of 8x8x1, 10 classes, measured by accuracy\n")
    assert "<pre>1,297 training" in source._repr_html_()


def test_a_record_in_a_notebook_has_its_text_and_its_keys_and_no_markup_of_its_own(tmp_path: Path) -> None:
    record = pubsel.Record({"label": "<b>", "privacy": {"epsilon": 1.5}, "values": [1, 2]}, tmp_path, "a < b")
    page = record._repr_html_()
    assert "<pre>a &lt; b</pre>" in page
    assert "<th>label</th><td>&lt;b&gt;</td>" in page
    assert "<th>privacy.epsilon</th><td>1.5</td>" in page
    assert "<th>values</th><td>[1, 2]</td>" in page
    assert f'<tr title="{escape(records.RECORD["label"])}"><th>label</th>' in page
    assert record["privacy"] == {"epsilon": 1.5}  # a mapping like result.json
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ([], {"epsilom": 3}, r"unknown key epsilom \(did you mean epsilon\?\)"),
        (["a b"], {}, "cannot read 'a b': write key=value"),
        ([], {"epsilon": -1}, "epsilon=-1.0: must be greater than 0"),
        (["algorithm=gepp"], {}, "Could not find 'algorithm/gepp'"),
        ([], {"pair": {"private": "digits"}}, "pair.private=digits: give its public data too"),
    ],
)
def test_what_is_wrong_is_told_as_by_the_command(
    words: list[str], settings: dict, message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as told:
        pubsel.train(*words, results=tmp_path, **settings)
    given = [f"pair.private={settings['pair']['private']}"] if "pair" in settings else []
    given += [f"{key}={value}" for key, value in settings.items() if key != "pair"]
    assert cli.main(["run", *words, *given, f"results={tmp_path}"]) == 2
    assert " ".join(str(told.value).split()) in capsys.readouterr().err


def test_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "two_steps.yaml").write_text("defaults: [digits]\nsteps: 2\n")
    words = [word for word in WORDS if not word.startswith("training")]
    record = pubsel.train(*words, training="two_steps", config_dir=tmp_path, results=tmp_path / "results")
    assert record["settings"]["training"]["steps"] == 2


def test_importing_it_takes_no_torch() -> None:
    code = "import pubsel, sys; assert 'torch' not in sys.modules and 'pandas' not in sys.modules; pubsel.train"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(pubsel.__all__) == {*"Record audit export fit load open_dataset rank table train tune".split()}
    assert (Path(pubsel.__file__).parent / "py.typed").exists()
