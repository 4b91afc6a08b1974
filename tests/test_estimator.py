"""Data in memory: `pubsel.fit`, its release, and the estimator of scikit-learn."""

import copy
import json
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.model_selection import cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from torch.utils.data import TensorDataset

import pubsel
from pubsel.cell import Cell
from pubsel.data import load, memory
from pubsel.data.memory import LABEL, NO_LABELS, PATH, TEXT, examples_in
from pubsel.messages import UsageError, UserError
from pubsel.rules import canonical
from pubsel.settings.keys import Pair
from pubsel.sklearn import PrivateClassifier
from tests.made import checked, interrupted, picture
from tests.test_text_data import corpus

X, Y = load_breast_cancer(return_X_y=True)
DIGITS = load_digits()
IMAGES, DIGIT = (DIGITS.images * 15).astype(np.uint8), DIGITS.target


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines():
    """The lines of all ledgers here."""
    return [
        json.loads(line)
        for path in Path("results/ledger").glob("*.jsonl")
        for line in path.read_text().split("\n")
        if line
    ]


def test_five_lines_give_a_release_that_may_be_given_away(tmp_path):
    release = pubsel.fit(X[:450], Y[:450], epsilon=1)
    assert (release.predict(X[450:]) == Y[450:]).mean() > 0.8  # 0.77 of the larger class alone
    assert release.predict_proba(X[450:]).shape == (119, 2)
    assert release.privacy["epsilon"] <= 1
    assert "private rows, which their owner does not name" in release.card
    assert not {"utility", "on_test", "notes"} & release.record.keys()

    # all rows are trained on, the ledger has the release, and nothing else is written
    assert release.record["private_examples"] == 450
    assert [line["epsilon"] for line in lines()] == [release.privacy["epsilon"]]
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
    assert {path.name for path in Path("results").iterdir()} == {"ledger"}

    # the folder, once it is saved, is that of the command
    release.save("given")
    assert {path.name for path in Path("given").iterdir()} == {
        "model.safetensors",
        "config.json",
        "README.md",
        "privacy.html",
    }
    again = pubsel.load("given").predict(pd.DataFrame(X[450:], columns=map(str, range(30))))
    assert again.answers == release.predict(X[450:]).astype(str).tolist()
    with pytest.raises(UsageError, match="it is there already"):
        release.save("given")
    assert "in_memory" not in "".join(path.read_text(errors="replace") for path in Path("given").iterdir())


def test_the_same_rows_again_are_another_release_of_the_same_data():
    for _ in range(2):
        pubsel.fit(X, Y, epsilon=0.5)
    assert len(lines()) == 2
    assert len({line["release"] for line in lines()}) == 2
    assert len([*Path("results/ledger").glob("*.jsonl")]) == 1


def test_examples_that_stand_in_for_a_test_part_are_counted_nowhere(capsys):
    """Each class has a made-up one, which nobody gave."""
    x, y = np.random.default_rng(0).normal(size=(210, 3)), np.arange(210) % 22
    with pytest.raises(UserError, match="x: 22 classes of 210 examples: if these"):  # with 22 more, few enough
        pubsel.fit(x, y, epsilon=5)
    people = np.arange(210) // 2
    release = pubsel.fit(x, y % 2, epsilon=5, delta=1e-3, groups=people, held_out=0.2, verbose=True)
    n, held = release.record["private_units"], 105 - release.record["private_units"]
    plan = capsys.readouterr().err
    assert f"of the 105 people with 210 rows {n} for training, {held} to measure, none for testing" in plan
    assert release.record["private_examples"] == 2 * n
    with memory.holding(memory.examples_in(x, y % 2)) as (name,):
        pair = Pair(private=name, public=None, m=None, metric=None)
        task = load(pair, ".", False)
    assert (len(task.private.y), task.tested, len(task.test.y)) == (210, 0, 2)


def test_a_number_that_is_missing_without_a_scale_is_zero_as_in_training():
    release = pubsel.fit(X[:, :3] / 1000, Y, epsilon=5, scale="none")
    new = np.array([[np.nan, 0.02, 0.1], [0.0, 0.02, 0.1]])
    first, second = release.predict_proba(new)
    assert np.isfinite(first).all()
    assert first.tolist() == second.tolist()


def kinds():
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "c"])
    yield "table", frame, Y
    yield "table with its label", frame.assign(diagnosis=np.where(Y, "benign", "malignant")), "diagnosis"
    yield "tensor", torch.from_numpy(X).float(), torch.from_numpy(Y)
    yield "half", X.astype(np.float16), Y.tolist()
    yield "sparse", csr_matrix(X), Y
    yield "words", X, np.where(Y, "yes", "no")
    yield "missing", np.where(X > 1000, np.nan, X), Y
    yield "bool", X, Y.astype(bool)
    yield "minus one", X, 2 * Y - 1
    yield "images", IMAGES, DIGIT
    yield "tensor of images", torch.from_numpy(np.repeat(IMAGES[:, None], 3, axis=1)), DIGIT
    yield "data set", TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y)), None


@pytest.mark.parametrize(("kind", "x", "y"), [pytest.param(*each, id=each[0]) for each in kinds()])
def test_what_a_program_has_is_taken(kind, x, y):
    release = pubsel.fit(x, y, epsilon=5)
    if kind == "data set":
        x, y = X.astype(np.float32), Y
    labels = x[y].to_numpy() if isinstance(y, str) else np.asarray(y)
    answers = release.predict(x)
    assert isinstance(answers[0], str) == isinstance(labels[0], str)
    assert (answers == labels).mean() > 0.8
    assert set(release.classes.tolist()) == set(labels.tolist())


def test_public_randomness_does_not_follow_from_data_in_memory():
    """Its name is a digest of the private data, and what is drawn by it may be given away."""
    with memory.holding(examples_in(X, Y), examples_in(X + 1, Y)) as names:
        words = ["model=rows", "algorithm=whitened_head", "distance=none", "pair.public=null"]
        cells = [Cell.of(canonical(checked("run", f"pair.private={name}", *words))) for name in names]
    assert cells[0].name != cells[1].name
    assert cells[0].public_key == cells[1].public_key == "whitened_head 0"


@pytest.mark.attack
@pytest.mark.parametrize("features", ["scattering", "pixels"])
def test_nothing_of_data_in_memory_is_left_but_its_release(tmp_path, features):
    """A digest in it would confirm who guesses all rows; kept features are those of private images."""
    images, labels = IMAGES[:300], DIGIT[:300]
    release = pubsel.fit(images, labels, epsilon=5, features=features, data_root=tmp_path / "data")
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    text = json.dumps(release.record)
    held = memory.examples_in(images, labels)
    assert held.key not in text
    assert release.record["private"] == release.record["settings"]["pair"]["private"] == "x"
    other = pubsel.fit(images[:-1], labels[:-1], epsilon=5, features=features, data_root=tmp_path / "data").record
    changed = {key for key in other if other[key] != release.record[key]}
    assert changed <= {"weights", "finished", "privacy", "private_examples", "private_units", "derived"}


def test_paths_and_lists_of_images_are_taken(tmp_path):
    paths = [tmp_path / "images" / f"{i}.png" for i in range(60)]
    for i, path in enumerate(paths):
        picture(path, 120 * (i % 2) + i, (8, 8), "L")
    release = pubsel.fit(paths, [i % 2 for i in range(60)], epsilon=5, delta=1e-3)
    assert len(release.predict([str(path) for path in paths[:5]])) == 5
    assert release.record["private_examples"] == 60
    table = pd.DataFrame({"image": map(str, paths), "label": [i % 2 for i in range(60)], "age": range(60)})
    assert pubsel.fit(table, "label", epsilon=5, delta=1e-3).record["private_examples"] == 60
    images = [Image.open(path).copy() for path in paths]
    assert len(pubsel.fit(images, [i % 2 for i in range(60)], epsilon=5, delta=1e-3).predict(images[:3])) == 3


TEXTS = [row["text"] for row in corpus(500)]
TOPIC = np.array([row["topic"] for row in corpus(500)])


@pytest.fixture
def few_features(monkeypatch):
    """Hash texts into fewer numbers, which is faster."""
    monkeypatch.setattr("pubsel.data.texts.FEATURES", 256)
    monkeypatch.setattr("pubsel.data.texts.hashed.__defaults__", (256,))


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, lambda texts: pd.DataFrame({"review": texts, "n": 0})])
@pytest.mark.usefixtures("few_features")
def test_texts_are_taken_however_they_are_held(kind):
    x = kind(TEXTS[:400])
    release = pubsel.fit(x, TOPIC[:400], epsilon=5)
    assert (release.record["private_examples"], "texts" in release.card) == (400, True)
    for new in (TEXTS[400:], pd.Series(TEXTS[400:]), kind(TEXTS[400:])):
        assert (release.predict(new) == TOPIC[400:]).mean() > 0.85
    assert release.predict(["the court", None]).shape == (2,)


@pytest.mark.usefixtures("few_features")
def test_public_texts_are_a_list_of_texts_or_of_sets(monkeypatch, tmp_path):
    """Names and paths stay names and paths."""
    sets = []
    monkeypatch.setattr("pubsel.estimator.command.run", lambda settings: sets.append(settings.public) or interrupted())
    pd.DataFrame({"text": TEXTS}).to_csv("others.csv")
    for public in (TEXTS[:60], (TEXTS[:60], TOPIC[:60]), [TEXTS[:60], pd.Series(TEXTS)], ["others.csv"], ["digits"]):
        with pytest.raises(KeyboardInterrupt):
            pubsel.fit(TEXTS, TOPIC, public=public)
    kinds = [[Path(name).suffix for name in public] for public in sets]
    assert kinds == [[".parquet"], [".parquet"], [".parquet"] * 2, [".csv"], [""]]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    whose = [row["user"] for row in corpus(500)]
    release = pubsel.fit(pd.DataFrame({"note": TEXTS}), TOPIC, public=TEXTS[:60], text="note", groups=whose, epsilon=5)
    assert release.record["private_units"] == 220  # 30 people's texts are public too
    with pytest.raises(UsageError, match=r"bounds=\.\.\.: x is a table of texts, on which it has no effect"):
        pubsel.fit(TEXTS, TOPIC, bounds=[0, 1])


def test_strings_are_paths_if_they_are_files_or_end_as_images_do(tmp_path):
    """No single one of ten or more decides."""
    assert examples_in(["~40 people", "~ten"], [0, 1]).frame[TEXT].tolist() == ["~40 people", "~ten"]
    paths = [picture(tmp_path / f"{i}.png") or f"{i}.png" for i in range(20)]
    (tmp_path / "scan").write_bytes((tmp_path / "0.png").read_bytes())
    for strings, column in ((paths, PATH), ([*paths, "scan"], PATH), ([*paths[:5], *TEXTS[:5]], TEXT), (TEXTS, TEXT)):
        assert list(examples_in(strings, NO_LABELS).frame) == [column]
    for strings in ([*paths, "a text"], [*paths, "gone.png"], [Path(f"{i}") for i in range(3)]):
        with pytest.raises(UsageError, match=r"paths of images, of which \d of .* no files, the first (a text|gone|0)"):
            examples_in(strings, NO_LABELS)
    with pytest.raises(UsageError, match=r"y: a\.csv is one path, whose labels are in it: leave y out"):
        pubsel.fit("a.csv", DIGIT)


class Columns:
    """A data set with the interface of Hugging Face's."""

    def __init__(self, classes=None, **columns):
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: SimpleNamespace(names=classes if "label" in name else None) for name in columns}

    def __len__(self):
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, name):
        return iter(self.columns[name])


def columns_of(kind, places):
    """Some examples of a kind, with their labels as numbers."""
    numbers = [sorted(set(TOPIC)).index(TOPIC[i]) for i in places]
    if kind == "texts":
        return Columns(sorted(set(TOPIC)), text=[TEXTS[i] for i in places], label=numbers)
    if kind == "images":
        images = [Image.fromarray(IMAGES[i]) for i in places]
        return Columns([f"n{i}" for i in range(10)], img=images, fine_label=DIGIT[places], coarse=DIGIT[places] // 2)
    return Columns(embedding=X[places].tolist(), label=Y[places].tolist(), idx=list(places))


@pytest.mark.parametrize("kind", ["texts", "images", "rows"])
@pytest.mark.usefixtures("few_features")
def test_data_sets_of_hugging_face_are_taken_by_their_columns(kind):
    train, test = columns_of(kind, range(400)), columns_of(kind, range(400, 500))
    release = pubsel.fit(train, "fine_label" if kind == "images" else None, epsilon=50)
    truth = {"texts": TOPIC, "images": np.array([f"n{i}" for i in DIGIT]), "rows": Y}[kind][400:500]
    assert (release.predict(test) == truth).mean() > 0.6
    assert (release.predict(list(test[test.column_names[0]])) == truth).mean() > 0.6
    if kind == "texts":
        public = pubsel.fit(train, public=test, public_labels="given", epsilon=8)
        assert public.record["public"] == "public[0]"


def test_columns_that_may_mean_several_things_are_refused():
    rows = columns_of("rows", range(20))
    stream = SimpleNamespace(column_names=None, features=None)
    for x, y, message in (
        ({"train": rows, "test": rows}, None, r"x: dict of train, test: give one of them, such as x\['train'\]"),
        (stream, None, "x: a stream of examples: load them without streaming=True"),
        (columns_of("images", range(9)), None, "y: no column label: x has img, fine_label, coarse: give the name"),
        (rows, "outcome", "y: no column outcome: x has embedding, label, idx: give the name"),
        (Columns(a=[1], b=[2], label=[0]), None, r"x: columns a, b, label: give x\.select_columns"),
        (columns_of("rows", range(9)), Y, "y: 569 for 9 examples"),
    ):
        with pytest.raises(UsageError, match=message):
            examples_in(x, y)
    # a label that is not known is no class, and public examples need none
    held = examples_in(Columns(["a", "b"], text=["x", "y", "z"], label=[1, -1, None]))
    assert held.frame[LABEL].fillna("none").tolist() == ["b", "none", "none"]
    assert list(examples_in(Columns(text=["x", "y"]), NO_LABELS).frame) == [TEXT]


def test_public_rows_and_groups(tmp_path):
    release = pubsel.fit(X[:400], Y[:400], public=(X[400:], Y[400:]), public_labels="given", groups=np.arange(400) // 2)
    assert release.record["private_units"] == 200
    assert "for a person" in release.privacy["statement"]
    assert release.record["public"] is None or release.record["public"] == "public[0]"
    named = pubsel.fit(IMAGES, DIGIT, public=["photo_patches", IMAGES[:200]], epsilon=3)
    assert (named.predict(IMAGES) == DIGIT).mean() > 0.8


@pytest.mark.attack
def test_private_rows_as_public_ones_are_refused_and_no_digest_of_either_is_released():
    for public in (X, (X[::-1], Y[::-1])):
        with pytest.raises(UsageError, match=r"no private rows remain: all are public \(public\[0\]\)"):
            pubsel.fit(X, Y, public=[public], epsilon=3)
    with pytest.raises(ValueError, match=r"no private rows remain"):
        PrivateClassifier(public=X).fit(X, Y)
    assert not lines()

    release = pubsel.fit(X[:400], Y[:400], public=[X[380:]], epsilon=3)
    assert release.record["private_examples"] == 380
    assert "public rows, which their owner does not name" in release.card
    assert ".parquet" not in release.card + json.dumps(release.record)


@pytest.mark.attack
def test_rows_that_are_often_equal_stay_only_if_their_owner_accepts_it():
    coarse = (X[:, :3] > X[:, :3].mean(0)).astype(float)
    with pytest.raises(UserError, match=r"public\[0\]: 169 of 169 public rows equal private ones of x: .*public_too"):
        pubsel.fit(coarse[:400], Y[:400], public=[coarse[400:]], epsilon=5)
    assert not lines()
    release = pubsel.fit(coarse[:400], Y[:400], public=[coarse[400:]], epsilon=5, accept=["public_too"])
    assert release.record["private_examples"] == 400
    assert ("Private examples that equal public ones" in release.card) == (release.record["public"] is not None)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (["AA", "Aa", "aa"], {"accept": ["labels"]}),
        ([b"benign", b"malign", b"other"], {}),
        ([1.0, 2.5, 3.0], {}),
        (["01", "1", "x"], {"accept": ["labels"]}),
    ],
)
def test_classes_are_the_labels_as_they_are_spelt(names, settings):
    places = np.arange(569) % 3
    x, y = np.eye(3)[places] + np.random.default_rng(0).normal(size=(569, 3)) / 10, np.array(names)[places]
    release = pubsel.fit(x, y, epsilon=5, **settings)
    assert sorted(release.classes.tolist()) == sorted(names)
    assert (release.predict(x) == y).mean() > 0.9


@pytest.mark.parametrize("kind", ["rows", "texts"])
@pytest.mark.usefixtures("few_features")
def test_a_column_with_the_split_is_taken_as_of_a_file(kind):
    """Otherwise a model would be measured on what it was trained on."""
    frame = pd.DataFrame({"a": X[:, 0]} if kind == "rows" else {"text": [f"{'good' if y else 'bad'} {y}" for y in Y]})
    frame, part = frame.assign(label=Y), np.where(np.arange(569) % 4, "train", "test")
    for name, settings in (("split", {}), ("split", {"split": "split"}), ("part", {"split": "part"})):
        frame.assign(**{name: part}).to_csv("table.csv", index=False)
        held = pubsel.fit(frame.assign(**{name: part}), "label", **settings)
        file = pubsel.fit("table.csv", results="others", **settings)
        assert held.record["private_examples"] == file.record["private_examples"] == (part == "train").sum()


def test_paths_of_images_have_their_parts_as_a_table_of_them_has(tmp_path):
    part, y = np.where(np.arange(60) % 4, "train", "test"), np.arange(60) // 4 % 2
    paths = [tmp_path / part[i] / f"{i}.png" for i in range(60)]
    for i, path in enumerate(paths):
        picture(path, 120 * int(y[i]) + i, (8, 8), "L")
    frame = pd.DataFrame({"image": map(str, paths), "label": y})
    release = pubsel.fit(frame.assign(split=part), "label", epsilon=5, delta=1e-3)
    assert release.record["private_examples"] == 45
    assert len(release.predict(paths)) == 60

    # folders called train and test say so too, and nothing is trained on by mistake
    for x in (frame, frame.image, paths):
        labels = "label" if x is frame else y
        with pytest.raises(UserError, match=r"training and test images \(45 and 15\), which are mixed: .* split=none"):
            pubsel.fit(x, labels, epsilon=5, delta=1e-3)
        release = pubsel.fit(x, labels, epsilon=5, delta=1e-3, split="none")
        assert release.record["private_examples"] == 60
    assert len(release.predict(paths)) == 60


def pickled(release):
    return pickle.loads(pickle.dumps(release))


@pytest.mark.parametrize(
    ("copied", "x", "y"),
    [(copy.copy, X, Y), (copy.deepcopy, X, Y), (pickled, X, Y), (pickled, IMAGES[:200], DIGIT[:200])],
)
def test_a_copy_of_a_release_is_one(copied, x, y, tmp_path):
    release = pubsel.fit(x, y)
    answers, card = release.predict_proba(x), release.card
    content = release.save(tmp_path / "before").joinpath("model.safetensors").read_bytes()
    again = copied(release)
    del release
    assert (again.predict_proba(x) == answers).all()
    assert again.card == card
    assert again.save(tmp_path / "after").joinpath("model.safetensors").read_bytes() == content
    assert pubsel.load(tmp_path / "after").predict(x).answers == again.predict(x).astype(str).tolist()
    with pytest.raises(UserError, match="run: a copy of a release has none"):
        _ = again.run
    folder = again.folder
    del again
    assert not folder.exists()


def test_estimators_of_a_cross_validation_may_be_given_away(tmp_path):
    results = cross_validate(PrivateClassifier(epsilon=5), X, Y, cv=2, n_jobs=2, return_estimator=True)
    for i, model in enumerate(results["estimator"]):
        assert (model.release_.save(tmp_path / f"{i}") / "privacy.html").exists()
        assert "differential privacy" in model.release_.card


def test_sentences_are_of_the_examples_that_are_there():
    twice = np.arange(400) % 200
    with memory.holding(examples_in(IMAGES[twice], DIGIT[twice])) as (name,):
        task = load(Pair(private=name, public=None), "", False)
    assert f"{name}: 400 images are {len(np.unique(IMAGES[:200], axis=0))} different ones" in " ".join(task.notes)
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "c"]).assign(label=Y)
    frame[:400].to_csv("rows.csv", index=False)
    frame[400:].to_csv("others.csv", index=False)
    task = load(Pair(private="./rows.csv", public="./others.csv", m=150), "", False)
    assert re.search(r"./others.csv: \d+ public rows from its test split", " ".join(task.notes))


def test_several_labels_an_example():
    several = np.stack([Y, X[:, 0] > 14], axis=1).astype(int)
    release = pubsel.fit(X, several, epsilon=5)
    assert release.predict(X).shape == several.shape
    assert (release.predict(X) == several).mean() > 0.8


def test_labels_of_arrays_keep_their_order_though_nobody_has_one():
    y = np.zeros((len(X), 12), int)
    y[:, 11], y[:, 2], y[:, 5] = X[:, 0] > 14, X[:, 0] <= 14, 1
    assert (pubsel.fit(X, y, epsilon=8).predict(X) == y).mean(0).min() > 0.8


@pytest.mark.parametrize("several", [False, True])
def test_images_without_a_label_are_left_out_with_their_labels(several):
    y = np.stack([DIGIT > 4, DIGIT % 2], 1) if several else DIGIT[:, None]
    hidden = np.where(np.arange(len(y))[:, None] % 3 == 0, np.nan, y)
    release = pubsel.fit(IMAGES, hidden if several else hidden[:, 0], epsilon=8)
    assert (release.predict(IMAGES).astype(float) == y.squeeze()).mean() > 0.8


def test_labels_that_are_not_known():
    several = np.stack([Y, X[:, 0] > 14], axis=1).astype(float)
    hidden = np.where(np.random.default_rng(0).random(several.shape) < 0.3, np.nan, several)
    release = pubsel.fit(X, hidden, epsilon=5)
    assert (release.predict(X) == several).mean() > 0.8


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, Y[:-1], "y: 568 for 569 examples"),
        (X, None, "y: none given"),
        (X[:, 0], Y, "give rows of numbers"),
        ([["a", "b"]] * 569, Y, "give rows of numbers"),
        (IMAGES.astype(float), DIGIT, "give rows of numbers"),
        (X, np.zeros(569), "one class"),
        (pd.DataFrame({"a": X[:, 0], "day": pd.date_range("2020-01-01", periods=569)}), Y, "1 columns have words: day"),
        (X, X[:, 0], "more classes|classes of"),
        (X, np.where(Y, "cat", "Cat "), "one class|differ in how they are written"),
        (X, [None] * 569, "no row has a label|one class"),
        (X, np.where(np.arange(1138).reshape(569, 2) == 5, 1.7, np.stack([Y, Y], 1)), "1 of 1138 labels are not 0 or"),
        (X, np.where(np.arange(1138).reshape(569, 2) == 5, np.inf, np.stack([Y, Y], 1)), "1 of 1138 labels are not 0"),
        (X, [[1], [1, 2], *[[1]] * 567], "y: lists of several lengths: give one value"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_nothing_is_spent(tmp_path, x, y, message):
    with pytest.raises((UsageError, UserError), match=message):
        pubsel.fit(x, y, epsilon=1)
    assert not lines()
    assert not memory._HELD


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_a_release_is_exported_by_its_run(format):
    if format == "onnx":
        pytest.importorskip("onnxruntime", reason="no extra onnx")
    pubsel.fit(X, Y, epsilon=0.5, results="mine")
    release = pubsel.fit(X, Y, epsilon=5, results="mine")
    record = pubsel.export(release, "model", format=format)
    files = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    assert ("model.onnx" in files) == (format == "onnx")
    assert {name: files[name] for name in files if name != "model.onnx"} == {
        path.name: path.read_bytes() for path in release.folder.iterdir()
    }
    assert "may NOT" not in str(record)
    assert record.predict(X).answers == release.predict(X).astype(str).tolist()


@pytest.mark.attack
def test_a_folder_does_not_say_whether_an_earlier_release_is_of_the_same_rows():
    """Its owner alone knows: an equal set, or one with another row, makes the same page."""
    other = X.copy()
    other[7] += 1
    releases = [pubsel.fit(x, Y, epsilon=0.5) for x in (X, X, other)]
    pages = {re.sub("[0-9a-f]{16,}", "", (release.folder / "privacy.html").read_text()) for release in releases}
    assert len(pages) == 1  # but for the digest of the weights
    assert "Other releases of the same examples: their epsilons add up" in pages.pop()


def test_the_training_of_fit_is_audited(monkeypatch):
    audited = {"epsilon": 2, "scale": "none", "canaries": 20}
    record = pubsel.audit(X[:100], Y[:100], **audited)
    assert (record["kind"], record["algorithm"], record["claimed"]) == ("white_box", "whitened_head", 2)
    assert record["settings"]["audit"]["canaries"] == 20
    assert str(record).startswith("whitened_head on x, white_box: claimed epsilon 2.00, measured at least ")
    assert record["control"]["noise"] == pytest.approx(1 / 3)
    assert record.folder.is_relative_to("results/audits")
    assert not lines()
    assert json.loads((record.folder / "result.json").read_text())["measured"] == record["measured"]
    with pytest.raises(UsageError, match="public: the choice is not audited, only training: leave it out"):
        pubsel.audit(X[:100], Y[:100], public=X[100:], **audited)


# The estimator


def test_the_estimator_is_one_of_scikit_learn():
    frame = pd.DataFrame(X, columns=[f"c{i}" for i in range(30)])
    model = make_pipeline(FunctionTransformer(), PrivateClassifier(epsilon=2.0))
    model.fit(frame[:450], np.where(Y[:450], "b", "m"))
    assert model.score(frame[450:], np.where(Y[450:], "b", "m")) > 0.8  # 0.77 of the larger class alone
    assert model.classes_.tolist() == ["b", "m"]
    assert np.allclose(model.predict_proba(frame[450:]).sum(1), 1)
    assert clone(model[-1]).get_params() == model[-1].get_params()
    assert model[-1].release_.privacy["epsilon"] <= 2


@pytest.mark.usefixtures("few_features")
def test_the_estimator_takes_texts_alone_and_in_a_pipeline():
    """Hashed by the release itself, or by a step of scikit-learn that learns nothing from them."""
    for steps in ([], [HashingVectorizer(n_features=256)]):
        model = make_pipeline(*steps, PrivateClassifier(epsilon=5.0)).fit(TEXTS[:400], TOPIC[:400])
        assert model.score(TEXTS[400:], TOPIC[400:]) > 0.85
        assert model[-1].release_.record["private_examples"] == 400
    with pytest.raises(ValueError, match="y: 499 for 500 examples"):
        PrivateClassifier().fit(TEXTS, TOPIC[1:])


def test_several_fits_warn_that_their_epsilons_add_up(monkeypatch):
    monkeypatch.setattr(PrivateClassifier, "_fits", 0)
    with pytest.warns(UserWarning, match="each fit is a release of its data, and their epsilons add up") as caught:
        scores = cross_val_score(PrivateClassifier(epsilon=5.0), X, Y, cv=3)
    assert len([warning for warning in caught if "epsilons add up" in str(warning.message)]) == 1
    assert scores.mean() > 0.85
    assert len(lines()) == 3


NOISE = "two fits of one data set draw different noise"


@pytest.mark.slow
def test_the_checks_of_scikit_learn_pass_but_for_those_that_noise_forbids():
    expected = dict.fromkeys(
        ("check_classifier_data_not_an_array", "check_supervised_y_2d", "check_fit_idempotent"), NOISE
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checks = check_estimator(
            PrivateClassifier(epsilon=50.0, delta=1e-3), expected_failed_checks=expected, on_fail=None, on_skip=None
        )
    assert [check["check_name"] for check in checks if check["status"] == "failed"] == []
    assert sum(check["status"] == "passed" for check in checks) > 40


# What programs really have


@pytest.mark.parametrize("names", [["none", "mild", "severe"], [-1, 1, 2], ["a|b", "a", "b"]])
def test_labels_that_would_be_no_classes_are_named_before_anything_is_spent(names):
    y = np.array(names)[np.arange(569) % 3]
    with pytest.raises(ValueError, match="call these classes by other words"):
        PrivateClassifier().fit(X, y)
    assert not lines()


def test_an_estimator_knows_the_names_of_columns():
    mine, others = (pd.DataFrame(x, columns=[f"c{i}" for i in range(30)]) for x in (X[:400], X[400:]))
    model = PrivateClassifier(public=(others[others.columns[::-1]], Y[400:]), public_labels="given").fit(mine, Y[:400])
    assert "c0" in (model.release_.folder / "config.json").read_text()
    assert model.score(mine, Y[:400]) > 0.85
    with pytest.raises(ValueError, match="column patient names people"):
        PrivateClassifier().fit(mine.rename(columns={"c0": "patient"}), Y[:400])


def test_an_estimator_takes_what_its_errors_name():
    y = np.array(["Yes", "yes", "no"])[np.arange(569) % 3]
    with pytest.raises(ValueError, match=r"write them alike, .* or continue with accept=\[labels\]"):
        PrivateClassifier().fit(X, y)
    model = clone(PrivateClassifier(accept=["labels"])).fit(X, y)
    assert set(model.predict(X)) <= {*model.classes_} == {*y}
    frame = pd.DataFrame(X[:, :3], columns=["patient", "a", "b"])
    with pytest.raises(ValueError, match="column patient names people, and is left out: give groups, or a row"):
        PrivateClassifier().fit(frame, Y)


def test_images_without_a_person_or_a_label_are_named_as_rows_are():
    people = (np.arange(len(DIGIT)) // 3).astype(float)
    people[::5] = np.nan
    with pytest.raises(UserError, match="name nobody"):
        pubsel.fit(IMAGES, DIGIT, groups=people, features="scattering")
    with pytest.raises(UserError, match="differ in how they are written"):
        pubsel.fit(IMAGES[:90], ["cat", "Cat ", "dog"] * 30, features="scattering")
    with memory.holding(examples_in(IMAGES // 128, DIGIT)) as (name,):
        assert "black" in {finding.name for finding in load(Pair(private=name, public=None), "", False).findings}


def test_labels_and_people_may_be_a_column():
    """[n, 1], a table with one column, bytes, masked numbers, and labels of a data set are read as they are meant."""
    for y in (Y[:, None], pd.DataFrame({"y": Y}), Y):
        assert examples_in(X, y).frame[LABEL].tolist() == Y.tolist()
    assert examples_in(X, Y.astype(str)[:, None]).frame[LABEL].tolist() == Y.astype(str).tolist()
    assert examples_in(X, np.eye(2)[Y]).frame[LABEL].tolist() == Y.tolist()
    people = [[f"p{i}"] for i in range(569)]
    assert examples_in(X, Y, people).frame[memory.PERSON].nunique() == 569
    assert examples_in(TensorDataset(torch.tensor(X), torch.tensor(Y / 2))).frame[LABEL].nunique() == 2
    assert examples_in([("good", "pos"), ("bad", "neg")]).frame[LABEL].tolist() == ["pos", "neg"]
    masked = np.ma.MaskedArray(X, mask=np.tile(np.arange(30) == 3, (569, 1)))
    assert examples_in(masked, Y).frame["3"].isna().all()
    assert examples_in(torch.tensor(X, requires_grad=True), Y).frame.shape == (569, 31)
    for groups, why in (("patient", "patient is one value"), ([(1, 2)] * 569, r"\[569, 2\]: give one value")):
        with pytest.raises(UsageError, match=f"groups: .*{why}"):
            examples_in(X, Y, groups)
    with pytest.raises(UsageError, match=r"y: 1 of 569 examples have no label or several"):
        examples_in(X, np.where(np.arange(569)[:, None] == 4, 1, np.eye(2)[Y]))
    with pytest.raises(UsageError, match="x has no column sick"):
        examples_in(pd.DataFrame(X), "sick")
    with pytest.raises(UsageError, match="two columns are called 1"):
        examples_in(pd.DataFrame(X[:, :2], columns=[1, "1"]), Y)


@pytest.mark.parametrize("audited", [False, True])
def test_people_are_named_once(audited):
    """Otherwise others would be protected than those that groups names."""
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "person"]).assign(clinic=np.arange(569) % 9, label=Y)
    frame.to_csv("rows.csv")
    groups, made = np.arange(569) // 2, pubsel.audit if audited else pubsel.fit
    for x, y, settings, message in (
        ("rows.csv", None, {}, "groups: rows.csv is a path or a name: give unit=COLUMN"),
        (Path("rows.csv"), None, {"unit": "clinic"}, "groups: rows.csv is a path or a name: give unit=COLUMN"),
        (X, Y, {"unit": "0"}, "groups: unit=0 names people too: give unit=COLUMN alone"),
        (frame, "label", {}, "groups: x has a column person of other values: rename that one"),
    ):
        with pytest.raises(UsageError, match=message):
            made(x, y, groups=groups, **settings)
    assert not lines()
    frame["person"] = groups
    assert examples_in(frame, "label", groups).frame[memory.PERSON].tolist() == groups.tolist()


@pytest.mark.parametrize("kind", ["frame", "levels", "arrow", "texts"])
def test_people_in_an_index_are_people(kind):
    """Otherwise each of their rows would be protected alone."""
    who = np.arange(569) // 3
    frame = pd.DataFrame(X[:, :2], columns=["a", "b"], index=pd.Index(who, name="patient"))
    x = {
        "frame": frame,
        "levels": frame.set_index(pd.MultiIndex.from_arrays([who, range(569)], names=["patient", None])),
        "arrow": pytest.importorskip("pyarrow").Table.from_pandas(frame),
        "texts": pd.Series([f"text {i}" for i in range(569)], index=frame.index),
    }[kind]
    with pytest.raises(UserError, match="column patient names people"):
        pubsel.fit(x, Y)
    with memory.holding(examples_in(x, Y)) as (name,):
        assert len(load(Pair(private=name, unit="patient", public=None), "", False).people) == 190


@pytest.mark.parametrize("kind", ["words", "numbers", "levels", "texts"])
def test_people_in_an_index_without_a_name_are_an_unnamed_column_as_of_a_file(kind):
    who = [f"pat{i // 6:03}" for i in range(569)]
    frame = pd.DataFrame(X[:, :2], columns=["a", "b"], index=who)
    x = {
        "words": frame,
        "numbers": frame.set_axis(np.arange(569) // 6),
        "levels": frame.set_axis(pd.MultiIndex.from_arrays([range(569), who])),
        "texts": pd.Series([f"text {i}" for i in range(569)], index=who),
    }[kind]
    with pytest.raises(ValueError, match=f"column 'index_level_{int(kind == 'levels')}' has no name, and does not"):
        PrivateClassifier(epsilon=1).fit(x, Y)
    assert not [name for name in examples_in(x, Y, groups=who).frame if "level" in name]


@pytest.mark.parametrize(
    "rows", [range(569), [*range(300), *range(269)], np.arange(569)[::-1], pd.to_datetime([1] * 569)]
)
def test_an_index_that_numbers_rows_is_no_column(rows):
    frame = pd.DataFrame(X[:, :2], columns=["a", "b"], index=rows)
    assert list(examples_in(frame, Y).frame) == ["a", "b", LABEL]


def test_labels_and_people_are_of_the_rows_that_their_index_names():
    """Otherwise labels, and people, would be those of other rows without a word."""
    frame = pd.DataFrame(X[:, :2], columns=["a", "b"], index=np.arange(569) + 9)
    labels = pd.Series(Y, index=frame.index)
    for y, groups in ((labels[::-1], None), (labels.set_axis(labels.index + 1), None), (labels, labels[::-1])):
        with pytest.raises(UsageError, match=r"(y|groups): its index is not that of x: give \1.loc\[x.index\]"):
            examples_in(frame, y, groups)
    counted = frame.reset_index(drop=True)
    with pytest.raises(UsageError, match="y: its index"):
        examples_in(counted.sample(frac=1), labels.reset_index(drop=True))
    for x, y in ((frame, labels), (counted, labels), (frame, Y), (frame.sample(frac=1), labels.tolist())):
        assert examples_in(x, y).frame[LABEL].tolist() == Y.tolist()


def test_dates_in_an_index_are_no_column():
    days = pd.date_range("2020", periods=569, name="day")
    for index in (days, days.to_period("D"), days - days[0]):
        assert list(examples_in(pd.DataFrame(X[:, :2], columns=["a", "b"], index=index), Y).frame) == ["a", "b", LABEL]


def test_a_level_of_an_index_is_a_column_of_new_rows_too():
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "c"]).set_index("c")
    model = pubsel.fit(frame, Y, epsilon=8)
    assert '"c"' in (model.folder / "config.json").read_text()
    assert (model.predict(frame) == model.predict(frame.reset_index())).all()
    assert list(examples_in(frame.assign(c=0), Y).frame) == ["a", "b", "c", LABEL]


def test_an_estimator_sees_no_masked_number():
    hidden = np.ma.masked_equal(np.where(np.arange(30) == 3, -9999, X), -9999)
    model = PrivateClassifier(epsilon=8).fit(hidden, Y)
    assert (model.predict_proba(hidden) == model.predict_proba(np.where(hidden.mask, np.nan, X))).all()
    assert '"missing": true' in (model.release_.folder / "config.json").read_text()
    with pytest.raises(ValueError, match="y contains NaN"):
        PrivateClassifier().fit(X, np.ma.MaskedArray(Y.astype(float), mask=Y == 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"to": "release"}, "to: no argument in Python: save the release by .save"),
        ({"output": "release"}, "to: no argument"),
        ({"private": "rows.csv"}, "private: no argument in Python: give x"),
        ({"dry": True}, "dry: no argument"),
        ({"sample_weight": np.ones(569)}, "unknown key sample_weight"),
        ({"bounds": {"0": {"u", "v"}}}, "569 of 569 values in column 0 are not in u, v"),
        ({"bounds": object()}, "bounds: .*: give .least, most."),
    ],
)
def test_arguments_that_have_no_place_are_named_before_anything_is_spent(settings, message):
    for function in (pubsel.fit, pubsel.audit):
        with pytest.raises(UserError, match=message):
            function(X, Y, **settings)
    assert not lines()


def test_numbers_of_numpy_are_settings():
    release = PrivateClassifier(epsilon=np.int64(2), delta=np.float32(2**-10)).fit(X, Y).release_
    assert "(2, 0.000976562)" in release.privacy["statement"]
    assert pubsel.fit(X, Y, seed=np.int64(3), threads=np.int32(1)).record["settings"]["seed"] == 3


def test_classes_are_those_of_the_column_and_of_the_table_of_labels():
    frame = pd.DataFrame(X[:, :3], columns=["a", "b", "c"]).assign(label=Y, grade=Y + 3)
    assert pubsel.fit(frame[["a", "b", "c", "label"]], epsilon=8).predict(frame).dtype == Y.dtype
    assert pubsel.fit(frame.drop(columns="label"), label="grade", epsilon=8).classes.tolist() == [3, 4]
    words = pd.get_dummies(pd.Series(np.where(Y, "well", "ill")))
    assert pubsel.fit(X, words).classes.tolist() == ["ill", "well"]
    assert pubsel.fit(X, words.assign(old=X[:, 0] > 14)).classes.tolist() == ["ill", "well", "old"]
    several = np.stack([X[:, 0] > np.quantile(X[:, 0], i / 13) for i in range(1, 13)], axis=1)
    release = pubsel.fit(X, several, epsilon=50)
    assert release.classes.tolist() == list(map(str, range(12)))
    assert (release.predict(X) == several).mean() > 0.8


def test_people_in_bytes_and_large_integers_are_as_many_as_they_are():
    people = [2**63 + i // 2 if i % 4 < 2 else -i for i in range(569)]  # floats, for numpy
    assert examples_in(X, Y, people).frame[memory.PERSON].nunique() == len(set(people))
    held = examples_in(X, Y, [b"%d" % (i // 2) for i in range(569)])
    with memory.holding(held) as (name,):
        assert len(load(Pair(private=name, unit=memory.PERSON, public=None), "", False).people) == 285


def test_a_table_of_another_library_keeps_its_names():
    arrow = pytest.importorskip("pyarrow")
    frame = pd.DataFrame(X, columns=[f"c{i}" for i in range(30)])
    model = pubsel.fit(arrow.Table.from_pandas(frame), Y, epsilon=1)
    backwards = frame[frame.columns[::-1]]
    assert (model.predict(arrow.Table.from_pandas(backwards)) == model.predict(frame)).all()


def test_an_image_is_the_same_for_fit_and_predict(tmp_path):
    """Arrays with a channel, PIL images with transparency and orientation, paths in an array; 16 bits are refused."""
    model = pubsel.fit([image[..., None] for image in IMAGES[:200]], DIGIT[:200], features="scattering")
    answers = model.predict(IMAGES[:20])
    assert (model.predict([image[..., None] for image in IMAGES[:20]]) == answers).all()
    paths = []
    for i in range(20):
        Image.fromarray(IMAGES[i]).save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    for several in (np.array(paths), pd.Series(paths)):
        assert (model.predict(several) == answers).all()
    with pytest.raises(UsageError, match=r"\[n, c, h, w\]"):
        examples_in(torch.from_numpy(IMAGES), DIGIT)

    clear = Image.fromarray(np.zeros((8, 8, 4), dtype=np.uint8), "RGBA")
    turned = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    turned.getexif()[0x0112] = 3
    x = examples_in([clear, clear], [0, 1]).x
    assert x.min() == 255
    assert examples_in([turned, turned], [0, 1]).x[0, 0, 0, 0] == 63
    with pytest.raises(UsageError, match="more than 8 bits"):
        examples_in([Image.fromarray(np.zeros((8, 8), dtype=np.uint16))], [0])


def test_a_list_of_public_images_is_one_set():
    pictures = [Image.fromarray(image) for image in IMAGES[:5]]
    assert memory.are_images(pictures, False)
    assert memory.are_images(list(IMAGES[:5]), True)
    assert not memory.are_images([IMAGES[:5], IMAGES[5:9]], True)
    assert not memory.are_images(list(X[None]), False)
    pubsel.fit(IMAGES[:200], DIGIT[:200], public=pictures * 10, features="scattering")
    with pytest.raises(UsageError, match=r"public\[0\]: ndarray of float64"):
        pubsel.fit(IMAGES[:200], DIGIT[:200], public=IMAGES[:50] / 255, features="scattering")
    bounds = np.array([np.int64(0), np.int64(4000)])
    assert pubsel.fit(X, Y, bounds=bounds).record["private_examples"] == 569
    assert pubsel.fit(X, Y, bounds={"0": np.array([0, 40])}).record["private_examples"] == 569


def test_the_same_data_in_memory_and_in_a_file_share_one_budget(tmp_path):
    frame = pd.DataFrame(X).assign(label=Y)
    frame.to_csv(tmp_path / "t.csv", index=False)
    pubsel.fit(str(tmp_path / "t.csv"), epsilon=1, budget=1)
    with pytest.raises(UsageError, match="budget"):
        pubsel.fit(X, Y, epsilon=1)


def test_labels_of_several_are_matched_by_name():
    x = np.random.RandomState(0).randn(700, 3)
    y = pd.DataFrame({"ill": x[:, 0] > 0, "old": x[:, 1] > 0}).astype(int)
    public = {"public_labels": "given", "epsilon": 1, "scale": "none", "threads": 1}
    release = pubsel.fit(x[:300], y[:300], public=(x[300:600], y[["old", "ill"]][300:600]), **public)
    assert (release.predict(x[600:]) == y[600:].to_numpy()).mean() > 0.7  # 0.5 if switched
    with pytest.raises(UsageError, match="needs public labels of the private task"):
        pubsel.fit(x[:300], y[:300], public=(x[300:600], y[300:600].set_axis(["old", "rich"], axis=1)), **public)
