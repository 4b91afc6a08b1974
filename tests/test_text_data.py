"""Texts as data: how they are read and hashed, a release that classifies new ones, and text encoders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils import murmurhash3_32

import pubsel
from pubsel import data
from pubsel.cli import main
from pubsel.data import load, open_dataset, texts
from pubsel.data.features import of_source
from pubsel.data.texts import FEATURES, TextInput, column_of_texts, hashed
from pubsel.messages import UsageError, UserError
from pubsel.models import text_encoder
from pubsel.release.classifier import Classifier
from pubsel.release.onnx import as_network
from pubsel.settings.keys import Backbone, Pair, Read
from pubsel.settings.schema import check
from tests.made import done, picture, write_csv

CPU = torch.device("cpu")
PLACES = [2695, 1573, 1926, 3494, 689]  # of triples of characters
TOPICS = {"law": "court judge", "music": "song band", "sport": "goal team"}


def corpus(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Return made texts: two words in ten tell the topic."""
    draw = np.random.default_rng(seed)
    common = [f"word{i}" for i in range(40)]
    rows = []
    for i in range(n):
        topic = list(TOPICS)[draw.integers(3)]
        words = [*draw.choice(common, 8), *draw.choice(TOPICS[topic].split(), 2)]
        rows.append({"text": " ".join(draw.permutation(words)), "topic": topic, "user": f"P{i // 2}"})
    return rows


def opened(path: Path | str, unit: str | None = None, **read: str):
    return open_dataset(str(path), ".", False, unit, read=Read(**read))


# Hashing


def test_a_text_has_the_same_numbers_in_every_process_and_version():
    """Places of triples by MurmurHash3, and log(1 + count) in rows of norm 1."""
    x = hashed(["Dog, dog", "dog,\n DOG"])
    places = [abs(murmurhash3_32(triple)) % FEATURES for triple in (" do", "dog", "og ", "og,", "g, ")]
    assert (tuple(x.shape), x.dtype, places) == ((2, FEATURES), torch.float32, PLACES)
    assert {*x[0].nonzero().flatten().tolist()} == {*places}
    assert torch.equal(x[0], x[1])
    counts = np.log1p([2, 2, 1, 1, 1])
    assert x[0, places].tolist() == pytest.approx(counts / np.linalg.norm(counts))
    assert not hashed([""]).any()


def test_a_text_has_the_same_numbers_whatever_the_others_are():
    some = [row["text"] for row in corpus(20)]
    assert torch.equal(hashed(some)[7], hashed(some[7:8])[0])


# Reading


@pytest.mark.parametrize(
    ("names", "read", "column"),
    [
        (["id", "Review", "label"], {}, "Review"),
        (["title", "text", "label"], {}, "text"),
        (["title", "body", "label", "user_id"], {}, "body"),
        (["title", "age", "label"], {}, None),  # a column of a table of numbers
        (["text", "age", "label"], {}, "text"),
        (["path", "text", "label"], {}, None),  # images with captions
        (["text", "path", "label"], {"text": "text"}, "text"),
        (["note", "label"], {}, None),
        (["note", "label"], {"text": "note"}, "note"),
        (["text", "age"], {"text": "none"}, None),
        (["text", "review"], {"label": "text"}, "review"),
    ],
)
def test_the_column_of_texts_is_known_by_its_name(names, read, column):
    assert column_of_texts(names, Read(**read)) == column


def test_a_table_of_texts_is_read_with_its_labels_and_sides(tmp_path):
    rows = corpus(60)
    for i, row in enumerate(rows):
        row |= {"label": row.pop("topic"), "split": "test" if i % 3 == 0 else "train", "score": "1"}
    rows[1]["text"] = "train"  # is no split
    write_csv(tmp_path / "a.csv", rows)
    source = opened(tmp_path / "a.csv", "user", accept=["nobody"])
    assert (len(source.train.x), len(source.test.x), source.names) == (40, 20, ("law", "music", "sport"))
    by_text = {row["text"]: row["label"] for row in rows}
    for split, kept in ((source.train, source.texts.train), (source.test, source.texts.test)):
        assert [source.names[y] for y in split.y] == [by_text[text] for text in kept]
        assert torch.equal(split.x, hashed(kept))
    assert len(source.groups[0].unique()) == len({row["user"] for row in rows if row["split"] == "train"})
    assert [f.text for f in source.findings if f.name == "columns"] == [
        "a.csv: text is read as texts, and other columns are not used: score; text=none reads a table of numbers"
    ]


def test_a_column_that_names_people_stops_a_command_that_protects_each_text(tmp_path):
    write_csv(tmp_path / "a.csv", [row | {"label": row.pop("topic")} for row in corpus(40)])
    (finding,) = (f for f in opened(tmp_path / "a.csv").findings if f.name == "ids")
    assert (finding.severity, finding.remedy[:13]) == ("error", "set unit=user")
    assert not [f for f in opened(tmp_path / "a.csv", "user").findings if f.name in ("ids", "columns")]
    write_csv(tmp_path / "b.csv", [{"note": "a b", "label": "x"}, {"note": "c", "label": "y"}])
    with pytest.raises(UserError, match="no column of numbers: it has note: give text=COLUMN"):
        opened(tmp_path / "b.csv")


def test_texts_of_numbers_stay_texts(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "007,a\n1.50,b\n,a\n2,b\n" * 5)
    source = opened(tmp_path / "a.csv")
    assert {*source.texts.train, *source.texts.test} == {"007", "1.50", "", "2"}
    assert [f.text for f in source.findings if f.name == "empty"] == ["a.csv: 5 of 20 texts are empty"]


def write_folder(folder: Path, rows: list[tuple[str, str]]) -> Path:
    for name, text in rows:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_numbers_in_a_column_with_a_name_of_texts_stop_a_command(tmp_path):
    frame = pd.DataFrame({"age": range(40), "review": np.arange(40) % 5, "label": np.arange(40) % 2})
    frame.to_csv(tmp_path / "a.csv", index=False)
    findings = {finding.severity: finding for finding in opened(tmp_path / "a.csv").findings}
    assert findings["error"].line() == (
        "a.csv: review is read as texts, and has numbers: text=none reads a table of numbers"
    )
    assert "error" not in {finding.severity for finding in opened(tmp_path / "a.csv", text="review").findings}
    assert opened(tmp_path / "a.csv", text="none").train.x.shape[1] == 2


def test_a_folder_of_text_files_is_read(tmp_path):
    files = [(f"{part}/{c}/{i}.txt", f"{part} {c} {i}") for part in ("train", "Test") for c in "ab" for i in range(9)]
    folder = write_folder(tmp_path / "f", [*files, ("README.txt", "about"), (".git/x/y.txt", "no")])
    source = opened(folder)
    assert (len(source.train.x), len(source.test.x), source.names) == (18, 18, ("a", "b"))
    assert all(text.split()[:2] == ["Test", "ab"[y]] for text, y in zip(source.texts.test, source.test.y, strict=True))
    (unread,) = (f.text for f in source.findings if f.name == "not_read")
    assert unread == "f: 1 texts are not in a class folder, and are not read, the first README.txt"

    flat = opened(write_folder(tmp_path / "flat", [(f"{i}.txt", "one two") for i in range(5)]))
    assert (flat.classes, len(flat.train.x) + len(flat.test.x)) == (1, 5)
    people = [(f"{c}/p{i}/{j}.txt", f"{c} text{i}") for c in "ab" for i in range(20) for j in range(2)]
    of_people = opened(write_folder(tmp_path / "people", people), "folder")
    assert len(torch.cat(of_people.groups).unique()) == 20
    assert not {*of_people.groups[0].tolist()} & {*of_people.groups[1].tolist()}


@pytest.mark.parametrize("split", ["", "train/"])
def test_a_class_of_texts_that_would_be_lost_is_an_error(tmp_path, split):
    """Files of another kind in its folder, or none; a link to a folder is one."""
    folder = write_folder(tmp_path / "f", [(f"{split}{c}/{i}.txt", f"{c} {i}") for c in "ab" for i in range(6)])
    write_folder(folder, [(f"{split}c/0.docx", "x"), (f"{split}c/1.docx", "y"), (f"{split}a/notes.md", "z")])
    write_folder(tmp_path / "elsewhere", [(f"{i}.txt", f"d {i}") for i in range(6)])
    (folder / split / "d").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"1 class folders without texts that are read: c \(.docx\).*accept="):
        load(Pair(private=str(folder), public=None), "", False)
    source = opened(folder)
    assert source.names == ("a", "b", "d")
    assert [f.text for f in source.findings if f.name == "not_read"] == ["f: 3 files are not read: 2 .docx, 1 .md"]


def test_a_folder_with_images_is_one_of_images(tmp_path):
    folder = write_folder(tmp_path / "f", [("a/0.txt", "a caption"), ("b/0.txt", "another")])
    assert texts.is_texts(folder, Read())
    for name in "ab":
        picture(folder / name / "0.png")
    assert not texts.is_texts(folder, Read())


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([("a/b/0.txt", "deep")], r"no text is at <class>/\*\.txt, the first is a/b/0\.txt"),
        ([("train/a/0.txt", "x"), ("test/b/0.txt", "x")], "class b is in its test part alone"),
    ],
)
def test_folders_that_are_laid_out_otherwise_are_refused(tmp_path, files, match):
    with pytest.raises(UserError, match=match):
        opened(write_folder(tmp_path / "f", files))


def test_files_in_another_encoding_are_named_or_left_out(tmp_path):
    folder = write_folder(tmp_path / "f", [(f"{c}/{i}.txt", f"{c} {i}") for c in "ab" for i in range(6)])
    (folder / "a" / "9.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(UserError, match=r"1 of 13 texts are not in UTF-8, the first 9\.txt: .* or set skip=true"):
        opened(folder)
    source = opened(folder, skip=True)
    assert len(source.train.x) + len(source.test.x) == 12


def test_a_table_without_the_column_and_keys_without_effect_are_refused(tmp_path):
    write_csv(tmp_path / "a.csv", [{"text": "a", "label": "x"}])
    with pytest.raises(UsageError, match=r"text=note: a\.csv has no such column: text, label"):
        opened(tmp_path / "a.csv", text="note")
    with pytest.raises(UsageError, match=r"read\.bounds=\.\.\.: .* is a table of texts, on which it has no effect"):
        load(Pair(str(tmp_path / "a.csv"), None, 1, read=Read(bounds="b.json")), ".", False)


def test_public_texts_are_read_by_their_names(tmp_path):
    private = [{"note": row["text"], "label": row["topic"]} for row in corpus(80)]
    write_csv(tmp_path / "a.csv", private)
    write_csv(tmp_path / "b.csv", [{"text": row["text"]} for row in corpus(70, 1)])
    pair = Pair(str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), None, read=Read(text="note"))
    task = load(pair, ".", False)
    assert (tuple(task.public.x.shape), task.text) == ((70, FEATURES), ("note", FEATURES))


@pytest.mark.parametrize("kind", ["texts", "rows"])
def test_findings_name_what_they_are_of(tmp_path, kind):
    """Rows and texts are no images."""
    column = {"texts": "text", "rows": "age"}[kind]
    sides = ["train"] * 30 + ["test"] * 10
    values = [f"word{i}" for i in range(40)] if kind == "texts" else range(40)
    frame = pd.DataFrame({column: values, "label": ["a", "b"] * 15 + ["a"] * 10, "split": sides})
    frame.to_csv(tmp_path / "a.csv", index=False)
    source, _, findings = data.checked(str(tmp_path / "a.csv"), ".", False, None, Read())
    assert (source.kind, [finding.name for finding in findings]) == (kind, ["label_column", "few", "few"])
    assert f"fewer than 50 training {kind} may be lost" in findings[1].text
    assert f"without a test {kind[:-1]}, which are not measured: b" in findings[2].text
    frame.assign(label=["a"] * 30 + ["b"] * 10).to_csv(tmp_path / "b.csv", index=False)
    *_, findings = data.checked(str(tmp_path / "b.csv"), ".", False, None, Read())
    assert findings[1].text.endswith(f"no training {kind[:-1]} of a class is left: b")
    frame.drop(columns="split").to_csv(tmp_path / "c.csv", index=False)
    assert opened(tmp_path / "c.csv").notes[0].endswith(f"of 40 {kind} held out as the test set, by {kind[:-1]}")


def test_summaries_next_to_texts_are_no_examples(tmp_path):
    for i in range(24):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        (tmp_path / "ab"[i % 2] / f"r{i}.txt").write_text(f"word{i}")
    assert not [f for f in texts.read_texts(tmp_path, None, Read()).rows.findings if f.severity == "error"]
    for i in range(12):
        (tmp_path / "ab"[i % 2] / f"r{i}_summary.txt").write_text(f"sum{i}")
    (finding,) = (f for f in texts.read_texts(tmp_path, None, Read()).rows.findings if f.severity == "error")
    assert finding.name == "copies"
    assert "12 files have the name of another one with more after it" in finding.text


# A release


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release on made texts, in a folder with texts that it has not seen."""
    home = tmp_path_factory.mktemp("texts")
    write_csv(home / "private.csv", [row | {"label": row.pop("topic")} for row in corpus(700)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("pubsel.data.texts.FEATURES", 256)
        patch.setattr("pubsel.data.texts.hashed.__defaults__", (256,))
        assert main(["fit", "private.csv", "unit=user", "epsilon=3", "to=release", "device=cpu"]) == 0
    return home


def test_a_release_classifies_new_texts_however_they_are_given(release, monkeypatch, cli):
    monkeypatch.chdir(release)
    new = corpus(100, 1)
    truth, new_texts = [row["topic"] for row in new], [row["text"] for row in new]
    model = pubsel.load("release")
    answers = model.predict(new_texts).answers
    assert np.mean(np.array(answers) == truth) > 0.9
    pd.DataFrame(new).to_csv("new.csv")
    write_folder(release / "new", [(f"{i:03}.txt", text) for i, text in enumerate(new_texts)])
    for given in (pd.Series(new_texts), np.array(new_texts), pd.DataFrame(new), "new.csv", ["new.csv"], Path("new")):
        assert model.predict(given).answers == answers

    out, _ = done(cli, "predict", "release", "new.csv", "new/000.txt", "to=answers.csv")
    assert "answers.csv: 101 texts, 3 classes" in out
    assert list(pd.read_csv("answers.csv")["class"]) == [*answers, answers[0]]
    assert model.predict([None, "court"]).files == ["0", "1"]


def test_new_texts_are_of_the_column_that_the_model_was_trained_on():
    takes, new = TextInput("note", 8), pd.DataFrame({"title": ["t"], "abstract": ["a"], "note": ["n"]})
    assert texts.new_texts("", new, takes) == [("", "n")]
    with pytest.raises(UserError, match="no column note, which this model was trained on, and abstract, title may be"):
        texts.new_texts("", new[["title", "abstract"]], takes)
    assert texts.new_texts("", new[["title", "abstract"]], TextInput(None, 8)) == [("", "a")]
    assert texts.new_texts("", new[["abstract"]], takes) == [("", "a")]


def test_a_release_of_texts_says_that_it_is(release):
    facts = json.loads((release / "release" / "config.json").read_text())
    assert facts["text"] == {"column": "text", "hashed": 256}
    assert facts["preprocessing"]["features"].startswith(
        "triples of characters, in lower case, within words and at their ends, hashed into 256"
    )
    card = (release / "release" / "README.md").read_text()
    for words in ("pipeline_tag: text-classification", "# A classifier of texts with 3 classes", "on hashed triples"):
        assert words in card
    assert "that they are texts, and the name of their column in a table" in card
    assert "training texts" in (release / "release" / "privacy.html").read_text()


def test_a_model_of_texts_takes_no_images_or_numbers_and_the_reverse(release, monkeypatch, tmp_path):
    monkeypatch.chdir(release)
    model = pubsel.load("release")
    picture(tmp_path / "a.png")
    write_csv(tmp_path / "a.csv", [{"age": 1}])
    for given in (np.zeros((2, 256)), torch.zeros(2, 3), 3, tmp_path / "a.png", [["a"]]):
        with pytest.raises(UserError, match="this model was trained on texts: give a table with a column text"):
            model.predict(given)
    with pytest.raises(UserError, match="no column text: it has age"):
        model.predict(tmp_path / "a.csv")
    with pytest.raises(UserError, match="no such file or folder"):
        model.predict("the court and the judge")
    source = opened("private.csv")
    with pytest.raises(UsageError, match="has texts, which a network for images does not take"):
        of_source("some", source, check(Backbone, {"architecture": "pixels"}), ".", CPU, print)


def test_data_check_says_what_is_read(release, monkeypatch, cli):
    monkeypatch.chdir(release)
    out, _ = done(cli, "data", "check", "private.csv", "unit=user")
    assert "test texts hashed into 4,096 numbers, 3 classes" in out


# Encoders


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny encoder of random weights."""
    transformers = pytest.importorskip("transformers", reason="no extra text")
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(TOPICS.values()).split()]
    (folder / "vocab.txt").write_text("\n".join([*words, *(f"word{i}" for i in range(40))]))
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def backbone(folder: Path | str, **more: str) -> Backbone:
    return check(Backbone, {"architecture": f"hf:{folder}", **more})


def test_features_are_the_mean_of_the_tokens_and_of_no_other_text(encoder):
    import transformers

    loaded = text_encoder.load_text_encoder(backbone(encoder), CPU)
    some = [row["text"] for row in corpus(70)] + ["court", "", "goal " * 200]
    x = loaded.features(some)
    assert tuple(x.shape) == (73, 16)
    net, tokenizer = (kind.from_pretrained(encoder) for kind in (transformers.AutoModel, transformers.AutoTokenizer))
    for i in (0, 69, 70, 71):
        with torch.no_grad():
            hidden = net.eval()(**tokenizer([some[i]], return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(x[i], hidden[0].mean(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(loaded.features(some[5:6])[0], x[5])
    assert torch.equal(loaded.features(some[::-1]).flip(0), x)

    # in batches of one shape, whatever the others are: "goal" 200 times is cut off after 64 tokens
    shapes = set()
    loaded.net.register_forward_pre_hook(lambda _, __, given: shapes.add(given["input_ids"].shape), with_kwargs=True)
    loaded.features(some)
    assert shapes == {(text_encoder.BATCH, 16), (text_encoder.BATCH, 64)}


def test_the_pooling_of_sentence_transformers_is_used_and_changes_the_digest(encoder, tmp_path):
    folder = Path(shutil.copytree(encoder, tmp_path / "encoder"))
    mean = text_encoder.load_text_encoder(backbone(folder), CPU)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Transformer", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    write_folder(folder, [("Pooling/config.json", json.dumps({"pooling_mode_cls_token": True}))])
    first = text_encoder.load_text_encoder(backbone(folder), CPU)
    assert (mean.pooling, first.pooling, mean.weights == first.weights) == ("mean", "first", False)
    ids = torch.tensor(first.tokenizer(["court goal"])["input_ids"])
    expected = first.net(input_ids=ids).last_hidden_state[0, 0]
    torch.testing.assert_close(first.features(["court goal"])[0], expected, rtol=1e-4, atol=1e-5)
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "x.Dense", "path": ""}]))
    with pytest.raises(UserError, match="its Dense is not known here"):
        text_encoder.load_text_encoder(backbone(folder), CPU)


def test_a_release_on_an_encoder_needs_its_folder_and_names_no_path(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", [{"text": row["text"], "label": row["topic"]} for row in corpus(300)])
    assert main(["fit", "a.csv", "epsilon=8", "to=release", "device=cpu", f"features=hf:{encoder}"]) == 0
    facts = (tmp_path / "release" / "config.json").read_text()
    assert json.loads(facts)["text"] == {"column": "text", "hashed": None}
    assert json.loads(facts)["model"]["name"] == text_encoder.name_of(f"hf:{encoder}")
    assert str(encoder.parent) not in facts + (tmp_path / "release" / "README.md").read_text()
    with pytest.raises(UserError, match=r"has no config\.json.*pubsel predict takes"):
        pubsel.load("release").predict(["court judge"])
    assert len(pubsel.load("release").predict(["court judge", "song"], checkpoint=str(encoder))) == 2


@pytest.mark.parametrize("features", ["rows", "encoder"])
def test_onnx_goes_from_hashed_texts_or_tokens(features, encoder, tmp_path, monkeypatch, capsys):
    """The example on the card, with another text, gives the answer of the release."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a.csv", [{"text": row["text"], "label": row["topic"]} for row in corpus(300)])
    shutil.copytree(encoder, "small")
    taken = ["features=hf:./small"] if features == "encoder" else []
    assert main(["fit", "a.csv", "epsilon=8", "to=release", "device=cpu", "format=onnx", *taken]) == 0
    capsys.readouterr()
    new = "court judge word1 word2 word3"
    code = (tmp_path / "release" / "README.md").read_text().split("```python\n")[2].partition("```")[0]
    scope: dict = {}
    exec(code.replace("FOLDER", "release").replace("a new text", new), scope)
    more = {"checkpoint": "small"} if taken else {}
    expected = pubsel.load("release").predict([new], **more)
    assert capsys.readouterr().out == f"{expected.answers}\n"
    shares = np.exp(scope["logits"]) / np.exp(scope["logits"]).sum()
    np.testing.assert_allclose(shares, expected.probabilities, atol=1e-4)

    session = runtime.InferenceSession("release/model.onnx", providers=["CPUExecutionProvider"])
    shapes = {each.name: each.shape for each in session.get_inputs()}
    tokens = {"input_ids": ["n", "t"], "attention_mask": ["n", "t"]}
    assert shapes == (tokens if taken else {"features": ["n", FEATURES]})


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_the_network_from_tokens_gives_the_features_of_texts(encoder, pooling):
    """In torch, so that no package of ONNX is needed for it."""
    loaded = text_encoder.load_text_encoder(backbone(encoder), CPU)._replace(pooling=pooling)
    model = torch.nn.Linear(16, 3)
    written = as_network(Classifier(model, loaded, (16,), ("a", "b", "c"), False))
    assert [*written.inputs] == ["input_ids", "attention_mask"]
    assert written.how == {"tokens": 64}
    logits = written.net(*written.inputs.values())
    torch.testing.assert_close(logits, model(written.features), rtol=1e-4, atol=1e-5)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_other_weights_in_a_folder_are_another_model(encoder, tmp_path):
    folder = Path(shutil.copytree(encoder, tmp_path / "encoder"))
    before = text_encoder.name_of(f"hf:{folder}")
    assert before.startswith("encoder-")
    (folder / "model.safetensors").write_bytes(b"others")
    assert text_encoder.name_of(f"hf:{folder}") != before
    assert text_encoder.name_of("hf:owner/small") == "small"


def test_encoders_that_are_absent_are_refused_and_none_is_fetched(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="no extra text")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"nothing has no config\.json"):
        text_encoder.load_text_encoder(backbone("./nothing"), CPU)
    with pubsel.settings.fetching(False), pytest.raises(UserError, match="give download=true to fetch them"):
        text_encoder.load_text_encoder(backbone("some/encoder"), CPU)
    images = open_dataset("digits", ".", False)
    with pytest.raises(UsageError, match="has no texts"):
        of_source("digits", images, backbone("./nothing"), ".", CPU, print)
