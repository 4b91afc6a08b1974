"""A run as a folder that may be given away: it answers as the run does, and has nothing in it that was not released."""

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.stats import norm

import pubsel
from pubsel import files
from pubsel.cli import main
from pubsel.commands import export
from pubsel.data import same_examples
from pubsel.data.vectors import Field
from pubsel.messages import UsageError, UserError
from pubsel.privacy import accountant, ledger
from pubsel.release import adversary, card
from pubsel.release.bundle import without_paths, write
from pubsel.release.classifier import Classifier, rebuilt
from pubsel.release.onnx import OfRows, as_network
from pubsel.settings.keys import ExportConfig, Format
from tests.forked import Command
from tests.made import interrupted, write_npz
from tests.test_report import CONTRAST, Page, browser, driver, opened

__all__ = ["browser", "driver"]  # fixtures

NETWORK = "test_efficientnet"
NAMES = ("a|b *c*", "bee", "<b>cow & co")  # as folders may be called
COUNTS = (47, 41, 37)  # private images of a class, apart from those for testing
SEED = 918273645
FILES = {"model.safetensors", "config.json", "README.md", "privacy.html"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private images as a folder and as npz files, weights of a tiny network, and the runs of all tests."""
    home = tmp_path_factory.mktemp("clinic_of_dr_faustus")
    draw, i = np.random.default_rng(0), 0
    for label, (name, n) in enumerate(zip(NAMES, COUNTS, strict=True)):
        for part, many in (("train", n), ("test", 8)):
            for _ in range(many):
                path = home / "patients_of_1975" / part / name / f"margarete_{i:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draw.normal(60 + 50 * label, 40, (8, 8)).clip(0, 255).astype(np.uint8)).save(path)
                i += 1

    labels = np.arange(90) % 3
    both = np.stack([labels % 2, labels // 2], 1)
    for name, y in (("three", labels), ("noise_8", labels), ("several", both)):
        images = draw.integers(256, size=(90, 8, 8), dtype=np.uint8)
        write_npz(home / f"{name}.npz", (images[:60], y[:60]), (images[60:], y[60:]))
    torch.manual_seed(0)
    (home / "weights").mkdir()
    save_file(timm.create_model(NETWORK, num_classes=10).state_dict(), str(home / "weights" / "tiny.safetensors"))
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


SECURE = "privacy.secure_noise=true"
FOLDER = """pair.private=./patients_of_1975 algorithm=dp_sgd training.epochs=3 model=linear
    training.batch_size=125""".split()
PLAIN = (*FOLDER, SECURE)
NPZ = ("pair.private=three.npz", "pair.public=three.npz", SECURE)
TINY = f"""model=mobilenetv2_coral model.backbone.architecture={NETWORK} model.backbone.input_size=32
    model.backbone.checkpoint=weights/tiny.safetensors""".split()
CHOICE = f"""pair.private=./patients_of_1975 pair.public=auto pair.candidates=[digits,[./three.npz,noise_8.npz]]
    epsilon_select=0.5 pair.take=test pair.m=30 distance=gsd_m200 distance.k=4 distance.m=30
    distance.initialisations=1 model=pixels algorithm=dp_pca algorithm.k=5 training=pillar training.steps=3
    training.batch_size=125 {SECURE}""".split()
PILLAR = (*NPZ, *TINY, "algorithm=pillar", "algorithm.k=5", "training=pillar", "training.steps=3")
DIGITS = (*NPZ, "model=digits_cnn", "algorithm=dp_sgd", "training=digits", "training.epochs=2")
SCATTERING = (*NPZ, "model=scattering", "algorithm=dp_sgd", "training.epochs=3")
TIMM = f"""{" ".join(NPZ)} model=timm model.architecture={NETWORK} model.checkpoint=weights/tiny.safetensors
    model.norm=freeze model.input_size=32 model.trained=[head] algorithm=dp_sgd training.epochs=2""".split()
SEVERAL = f"""pair.private=several.npz pair.public=several.npz {SECURE}
    model=linear algorithm=dp_sgd training.epochs=3""".split()
WHITENED = (*NPZ, "model=pixels", "algorithm=whitened_head")
NO_PUBLIC = f"""pair.private=three.npz pair.public=pool pair.pool=[digits] pair.take=test pair.m=30 epsilon_select=1000
    algorithm=whitened_head distance=none {SECURE}""".split()
NO_PUBLIC = (*NO_PUBLIC, *TINY)


def name_of(words: tuple[str, ...]) -> str:
    return next(name for name, value in globals().items() if value is words)


def trained(*words: str) -> pubsel.Record:
    """The record of a short run, made once for all tests that ask for it."""
    always = ("threads=1", "device=cpu", "epsilon=4", "training.batch_size=60", f"seed={SEED}")
    few = () if "pair.take=test" in words else ("pair.take=train", "pair.m=12", "distance=none")
    given = {word.partition("=")[0] for word in words}
    return pubsel.train(*(word for word in (*few, *always) if word.partition("=")[0] not in given), *words)


def exported(record: pubsel.Record, target: Path, *words: str) -> Path:
    assert main(["export", str(record.folder), f"to={target}", "threads=1", *words]) == 0
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# It answers as the run does


@pytest.mark.parametrize(
    "words", [PLAIN, DIGITS, TIMM, SCATTERING, WHITENED, PILLAR, SEVERAL, CHOICE, NO_PUBLIC], ids=name_of
)
def test_the_folder_answers_as_the_run_does(words: tuple[str, ...], tmp_path: Path) -> None:
    record = trained(*words)
    folder = exported(record, tmp_path / "model")
    assert {path.name for path in folder.iterdir()} == FILES
    state = torch.load(record.folder / "model.pt", weights_only=True)
    given = load_file(folder / "model.safetensors")
    assert given.keys() == state.keys()
    assert all(torch.equal(given[name], state[name]) for name in state)

    data_root = "weights"  # where the file of the backbone's weights is looked for: its path is in no file
    images = "patients_of_1975" if "patients" in record["private"] else record["private"]
    expected = record.predict(images)
    loaded = pubsel.load(folder)
    told = loaded.predict(images, data_root=data_root)
    np.testing.assert_allclose(told.probabilities, expected.probabilities, atol=1e-6)  # sums in another order
    assert (told.classes, told.multi_label) == (expected.classes, expected.multi_label)
    assert str(loaded) == record["privacy"]["statement"]
    output = tmp_path / "answers.csv"
    assert main(["predict", str(folder), images, f"to={output}", f"data_root={data_root}"]) == 0
    assert len(output.read_text().splitlines()) == len(expected) + 1


def test_what_is_left_without_public_data_has_features_of_the_last_layer_alone(capsys: pytest.CaptureFixture) -> None:
    """Features of earlier stages pay only if public data bring them to one scale; it can be attacked too."""
    record = trained(*NO_PUBLIC)
    assert record["public"] is None
    alone = trained("pair.private=three.npz", "pair.public=null", "algorithm=whitened_head", *TINY, SECURE)
    shapes = [
        {name: tensor.shape for name, tensor in load_file(exported(each, target) / "model.safetensors").items()}
        for each, target in ((record, Path("last_layer")), (alone, Path("alone")))
    ]
    assert shapes[0] == shapes[1]
    words = ["attack", "loss", f"run={record.folder.name}", "threads=1", "data_root=weights"]
    assert main(words) == 0, capsys.readouterr().err


def test_config_json_says_what_it_takes_to_use_the_model(tmp_path: Path) -> None:
    record = trained(*PILLAR)
    config = json.loads((exported(record, tmp_path / "model") / "config.json").read_text())
    facts = json.loads((record.folder / "model.json").read_text())
    assert config["backbone"] == facts["backbone"]
    assert config["backbone_source"] == "the file tiny.safetensors, which is not published with timm"
    assert config["model"]["backbone"]["checkpoint"] == "tiny.safetensors"
    assert (config["classes"], config["shape"], config["multi_label"]) == (["0", "1", "2"], [1, 8, 8], False)
    assert (config["head"]["kind"], config["head"]["inputs"], config["preprocessing"]["size"]) == ("linear", 5, 32)
    assert (config["privacy"]["epsilon"], config["privacy"]["against"]) == (record["privacy"]["epsilon"], [])

    published = trained(*SCATTERING)
    config = json.loads((exported(published, tmp_path / "other") / "config.json").read_text())
    assert config["backbone_source"] == "none: it has no weights"
    assert accountant.ROUNDED in published["privacy"]["not_covered"]  # features are computed of several at once
    assert accountant.ROUNDED[1:] in (tmp_path / "other" / "README.md").read_text()
    assert config["preprocessing"]["J"] == config["model"]["backbone"]["scattering"]["J"]


def test_the_source_of_published_weights_is_their_page() -> None:
    from pubsel.data.features import described
    from pubsel.settings.keys import Backbone

    how, source = described(Backbone("resnet18.a1_in1k"))
    assert source == "https://huggingface.co/timm/resnet18.a1_in1k"
    assert (how["size"], how["resize"], how["interpolation"]) == (224, 236, "bicubic")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    record = trained(*PILLAR)
    folder = exported(record, tmp_path / "model")
    with pytest.raises(UserError, match=r"tiny\.safetensors: no such file"):
        pubsel.load(folder).predict("three.npz", data_root="nowhere")

    loaded = pubsel.load(folder)
    state = load_file(folder / "model.safetensors")
    weights = folder / "model.safetensors"
    others = {name: tensor + 1 for name, tensor in state.items()}
    for harm, message in (
        (lambda: save_file(others, str(weights)), "does not have the weights that the config.json next to it names"),
        (lambda: weights.write_bytes(b"{"), "model.safetensors does not fit the config.json next to it"),
        (weights.unlink, "model.safetensors: no such file, the weights"),
    ):
        harm()
        with pytest.raises(UserError, match=re.escape(message)):
            loaded.predict("three.npz")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json: it lacks model: bring it back"):
        pubsel.load(folder)


# Nothing in it that was not released


def elsewhere(record: pubsel.Record, folder: Path) -> Path:
    """A copy of a run with only what the folder may depend on: weights, model.json, the ledger and, of the record, what
    is covered or public. All else in the record is another value, and nothing else is there: no data, no log."""
    run = folder / "runs" / "another_name"
    run.mkdir(parents=True)
    torch.save(torch.load(record.folder / "model.pt", weights_only=True), run / "model.pt")
    shutil.copy(record.folder / "model.json", run)

    kept = {"privacy", "weights", "algorithm", "settings", "public", "public_labels", "commit"}
    kept |= {"private_examples", "private_units"}
    other = {
        "utility": 0.123,
        "utility_interval": [0.1, 0.2],
        "test_examples": 7,
        "on_test": {"figures": {}, "largest_class": 0.6, "hardly_answered": ["another"]},
        "epsilon": 4.5,
        "seconds": 1.5,
        "seed": 1,
        "private": "/other/data",
        "streams": {"code": "another", "place": "another"},
    }
    empty = {dict: {}, list: [], str: "another"}  # of the same kind, or a record would not be read
    values = {key: other.get(key, empty.get(type(value), value)) for key, value in record.items()}
    values |= {key: record[key] for key in kept & record.keys()}
    settings = json.loads(json.dumps(values["settings"]))
    used = {"take", "overlap", "candidates", "public", "private", "validation", "private_share"}
    pair = {key: value for key, value in settings["pair"].items() if key in used}
    if pair["public"] == pair["private"]:  # that it is a part of the private data is told, and not of which
        pair["public"] = values["public"] = "/other/data"
    settings["pair"] = pair | {"private": "/other/data"}
    groups = {"algorithm": {}, "privacy": {}, "training": {}}
    values["settings"] = {key: settings[key] for key in ("pair", "model")} | groups
    values["versions"] = {"pubsel": record["versions"]["pubsel"], "python": "9"}
    privacy_of_training = ("adjacency", "sampling", "sensitivity", "composition", "claimed_epsilon")
    changed = {key: 7.5 if isinstance(record["privacy"].get(key), float) else "other" for key in privacy_of_training}
    values["privacy"] = record["privacy"] | changed | {"not_covered": []}
    (run / "result.json").write_text(json.dumps(values))
    lines, _ = ledger.of_data(record.folder.parent.parent, record["private"])
    of_run = {record["identity"]: values["identity"]}
    lines = [line | {"private": "/other/data", "cell": of_run.get(line["cell"], line["cell"])} for line in lines]
    (folder / "ledger").mkdir()
    (folder / "ledger" / "0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


@pytest.mark.attack
@pytest.mark.parametrize("words", [PLAIN, PILLAR, CHOICE], ids=name_of)
def test_every_byte_is_a_function_of_what_was_released(words: tuple[str, ...], tmp_path: Path, home: Path) -> None:
    """Built again in another process, in another place, from the releases alone, while the data are out of reach."""
    record = trained(*words)
    expected = contents(exported(record, tmp_path / "model"))
    run = elsewhere(record, tmp_path / "copy")
    hidden = home.with_name("hidden")
    home.rename(hidden)
    try:
        words = ("export", str(run), "to=again", "data_root=nowhere", "download=false")
        again = Command(tmp_path, *words, HOME=str(tmp_path))
        assert again.code() == 0, again.err
    finally:
        hidden.rename(home)
    assert contents(tmp_path / "again") == expected


@pytest.mark.attack
@pytest.mark.parametrize("words", [PLAIN, FOLDER, CHOICE], ids=name_of)
def test_planted_secrets_are_in_no_byte(words: tuple[str, ...], tmp_path: Path, home: Path) -> None:
    record = trained(*words)
    folder = exported(record, tmp_path / "given", "anyway=true")
    figures = [record["utility"], *record["utility_interval"], record["selection"]["test"]]
    figures += [value for figure in record["on_test"]["figures"].values() for value in figure]
    secrets = ["margarete", "patients", "1975", "faustus", str(SEED), f"{socket.gethostname():>7}", "given"]
    secrets += [str(home), str(tmp_path), sys.prefix, *(record[key] for key in ("identity", "hardware"))]
    secrets += [record["streams"]["code"], record["finished"][:10]]
    secrets += [*map(str, figures), *(f"{100 * value:.2f}" for value in figures)]
    for name, content in contents(folder).items():
        lower = content.lower()
        for secret in secrets:
            if re.search(r"[a-z_]", secret) or len(secret) > 6:
                assert secret.lower().encode() not in lower, (name, secret)
        if name != "model.safetensors":
            numbers = re.findall(r"(?<![\w.-])\d[\d.,]*(?!\w)", content.decode())  # no part of a digest
            assert not {str(n) for n in (*COUNTS, record["test_examples"])} & set(numbers), name


def test_a_path_in_the_settings_of_a_network_is_cut_to_the_name_of_its_file() -> None:
    model = {"checkpoint": "/home/faust/a.pth", "options": {"files": ["~/b/c.pth"], "depth": 3}, "name": "timm"}
    cut = {"checkpoint": "a.pth", "options": {"files": ["c.pth"], "depth": 3}, "name": "timm"}
    assert without_paths(model) == cut


def test_public_data_are_named_without_their_path_and_private_ones_not_at_all() -> None:
    assert card._named(["/home/faust/flowers", "mnist"], "/home/faust/patients") == "flowers + mnist"
    assert card._named("/home/faust/../faust/patients", "/home/faust/patients") == "a part of the private data"
    unnamed = "public images, which their owner does not name + mnist"
    for other in ("/home/margarete/patients", "patients"):  # the same name, but other data
        assert card._named([other, "mnist"], "/home/faust/patients") == unnamed
    assert card._named("digits", "digits") == "digits"


@pytest.mark.parametrize(
    "name", ["patients.npz", "./patients.npz", "~/patients.npz", "x/../patients.npz", "~/a.npz", "./b.npz"]
)
def test_a_file_is_the_same_however_its_path_is_spelled(name: str, tmp_path: Path, folder, monkeypatch) -> None:
    """Otherwise private data would be taken, and named, as public."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for other in ("patients.npz", "other.npz"):
        Path(other).touch()
    Path("x").mkdir()
    Path("a.npz").symlink_to("patients.npz")
    os.link("patients.npz", "b.npz")
    private = str(tmp_path / "patients.npz")
    assert same_examples(private, name, "data")
    assert not same_examples(str(tmp_path / "other.npz"), name, "data")
    assert card._named(name, private) == ("a part of the private data" if "patients" in name else Path(name).name)


# What may not be given away


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (FOLDER, "its noise follows from a seed.*: train again with privacy.secure_noise=true; that spends epsilon 4"),
        ((*FOLDER, "algorithm=non_private", "training=digits"), "its weights were trained without noise"),
        ((*FOLDER, SECURE, "epsilon=inf"), "its weights were trained without noise.*: train with epsilon=NUMBER"),
        (
            (*NPZ, "model=linear", "algorithm=gep", "algorithm.k=5", "privacy.accounting=paper", "training.epochs=2"),
            "its guarantee is not valid.*: train again with privacy.accounting=prv",
        ),
    ],
    ids=["seeded", "non_private", "no noise", "paper"],
)
def test_what_is_not_covered_is_refused_unless_anyway(
    words: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = tuple(word for word in words if word != "algorithm=dp_sgd" or "algorithm=non_private" not in words)
    record = trained(*words)
    capsys.readouterr()
    assert main(["export", str(record.folder), f"to={tmp_path / 'model'}"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert re.search(f"{why}.*; or set anyway=true, which the folder then says on top$", told[0]), told[0]
    assert list(tmp_path.iterdir()) == []

    folder = exported(record, tmp_path / "model", "anyway=true")
    assert "which may NOT be given away" in capsys.readouterr().out
    reason = why.partition(".*")[0]
    without_noise = record["privacy"]["epsilon"] is None
    card_text = (folder / "README.md").read_text()
    for line in ("One image is protected", "Noise makes a model less accurate"):
        assert (line in card_text) != without_noise
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    assert "differential-privacy" not in front
    assert text.strip().startswith(
        f"> **Do not give this model away.** It was exported with `anyway=true`. Reason: {reason}"
    )
    page = (folder / "privacy.html").read_text()
    before = re.sub("<[^>]*>", "", page[page.index("<main>") : page.index("<h1>")])
    assert before.strip().startswith("Do not give this model away. It was exported with anyway=true. Reason: ")
    assert reason in before
    assert json.loads((folder / "config.json").read_text())["privacy"]["against"] != []
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_was_trained_on_public_data_alone_needs_no_noise(tmp_path: Path) -> None:
    record = trained(*NPZ[:2], "model=pixels", "algorithm=only_public", "training=adamix", "training.steps=3")
    page = (exported(record, tmp_path / "model") / "privacy.html").read_text()
    assert "at most 50 %" in page
    assert "Do not give" not in page


def test_a_weak_guarantee_is_called_weak_on_top(tmp_path: Path) -> None:
    record = trained(*PLAIN, "privacy.delta=0.02", "privacy.weak=true")
    folder = exported(record, tmp_path / "model")
    for name, head in (("README.md", "# A classifier"), ("privacy.html", "<h1>")):
        assert "delta is above 1/125" in (folder / name).read_text().partition(head)[0]


def test_a_guarantee_of_other_weights_is_refused_even_so(tmp_path: Path) -> None:
    record = trained(*PLAIN)
    run = tmp_path / "run"
    shutil.copytree(record.folder, run)
    (run / "result.json").write_text(json.dumps(record | {"weights": "0"}))
    with pytest.raises(UserError, match=r"result\.json states the guarantee of other weights"):
        export.run(settings(run, tmp_path / "model", anyway=True))
    (run / "result.json").unlink()
    (run / "settings.json").unlink()
    with pytest.raises(UserError, match=r"it lacks result\.json, which states the guarantee"):
        export.run(settings(run, tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def settings(run: Path, to: Path, **more: object) -> ExportConfig:
    values = {"run": str(run), "to": str(to), "format": Format.safetensors, "anyway": False, "results": "results"}
    values |= {"data_root": ".", "download": False, "threads": 1, "debug": False}
    return ExportConfig(**values | more)


# The whole folder or nothing


@pytest.mark.parametrize("there", [{"a": b"1", "b": b"3"}, {"a": b"1"}, {"a": b"1", "b": b"2", "c": b""}, {"b": b""}])
def test_a_folder_that_is_there_is_left_if_each_byte_is_the_same(there: dict[str, bytes], tmp_path: Path) -> None:
    """Another model has files of the same names; what is called done must be what the card is of."""
    files, target = {"a": b"1", "b": b"2"}, tmp_path / "model"
    write(target, files, "model", private=False)
    write(target, files, "model", private=False)
    assert contents(target) == files
    shutil.rmtree(target)
    write(target, there, "model", private=False)
    with pytest.raises(UsageError, match="to=model: it is there already, with other files"):
        write(target, files, "model", private=False)
    assert contents(target) == there


def test_the_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = trained(*PLAIN)
    write, calls = Path.write_bytes, []

    def fails(path: Path, content: bytes) -> int:
        calls.append(path)
        return interrupted() if len(calls) == 3 else write(path, content)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(KeyboardInterrupt):
        export.run(settings(record.folder, tmp_path / "model"))
    assert len(calls) == 3
    assert list(tmp_path.iterdir()) == []


def test_only_an_empty_folder_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = trained(*PLAIN)
    (tmp_path / "empty").mkdir()
    assert {path.name for path in exported(record, tmp_path / "empty").iterdir()} == FILES
    before = contents(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    capsys.readouterr()
    assert main(["export", str(record.folder), f"to={tmp_path / 'empty'}"]) == 0  # the same once more
    assert main(["export", str(record.folder), f"to={tmp_path / 'file'}"]) == 2
    assert capsys.readouterr().err.endswith("it is there already: give a new folder, or delete it\n")
    assert contents(tmp_path / "empty") == before
    assert (tmp_path / "file").read_text() == "mine"

    with monkeypatch.context() as patch:  # another process has made it meanwhile
        patch.setattr(Path, "iterdir", lambda path, listed=Path.iterdir: listed(path) if entered else iter(()))
        entered, entry = list[Path](), files.remove_left
        patch.setattr(files, "remove_left", lambda path: (entered.append(path), entry(path)))
        write(tmp_path / "empty", before, "a", False)
    assert contents(tmp_path / "empty") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_the_working_directory_and_links_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "nowhere").symlink_to("absent")
    monkeypatch.chdir(tmp_path / "empty")
    for to in (".", "../empty", "../link", "../nowhere", "absent/.."):
        assert main(["export", "a_run_that_is_not_looked_for", f"to={to}"]) == 2
        assert capsys.readouterr().err.endswith(f"to={to}: a link, or the folder that you are in: give a new folder\n")
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture) -> None:
    for words in (["export"], ["export", "NAME"], ["export", "to=model"]):
        assert main(words) == 2
        assert "pubsel export RUN to=FOLDER: name of a finished run" in capsys.readouterr().err


# The card and the page


@pytest.fixture(scope="module")
def folders(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run with three releases, and one with names of classes that are hard to write."""
    place = tmp_path_factory.mktemp("folders")
    with contextlib.chdir(home):
        runs = {"choice": trained(*CHOICE), "plain": trained(*PLAIN)}
        return {name: exported(record, place / name) for name, record in runs.items()}


def test_the_card_has_the_layout_of_hugging_face(folders: dict[str, Path]) -> None:
    text = (folders["plain"] / "README.md").read_text()
    assert text.startswith("---\n")
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["pipeline_tag"], front["library_name"]) == ("image-classification", "pubsel")
    assert "differential-privacy" in front["tags"]
    sections = ["Use", "Classes", "Intended use", "How it was made", "Figures", "Limits", "Files"]
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == sections
    assert r"\<b\>cow \& co, a\|b \*c\*, bee." in text
    for words in ("The names are public", "private images, which their owner does not name", "states no accuracy"):
        assert words in text
    assert "\n\n\n" not in text
    rows = re.findall(r"^\|.*", text, re.MULTILINE)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_the_folder_names_the_version_that_wrote_it_and_the_code_that_trained(tmp_path: Path) -> None:
    record = trained(*PLAIN)
    for commit, place, words in (
        ("abc123", "clean", "The code is open: pubsel 0.0.7, commit abc123, method"),
        ("abc123-dirty", "changed", "The model was trained with pubsel 0.0.7, commit abc123 with changes, method"),
        (None, "unknown", "The code is open: pubsel 0.0.7, method"),
    ):
        run = tmp_path / f"run_{place}"
        shutil.copytree(record.folder, run)
        values = record | {"versions": record["versions"] | {"pubsel": "0.0.7"}, "commit": commit}
        (run / "result.json").write_text(json.dumps(values))
        folder = tmp_path / place
        export.run(settings(run, folder))
        text = (folder / "README.md").read_text()
        assert f"With pubsel {pubsel.__version__} or later" in text
        assert "| made with | pubsel 0.0.7" in text
        assert json.loads((folder / "config.json").read_text())["made_by"] == f"pubsel {pubsel.__version__}"
        assert words in (folder / "privacy.html").read_text()
        assert "dirty" not in text + (folder / "privacy.html").read_text()


def test_the_page_names_every_release_with_its_share(folders: dict[str, Path], home: Path) -> None:
    text = (folders["choice"] / "privacy.html").read_text()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", text)]
    released = {row[0]: row for row in rows if len(row) == 5}
    expected = {"choice of the public data": 0.5, "first release before training": None, "training": None}
    assert set(released) == {*expected, "<strong>together</strong>"}
    assert released["choice of the public data"][1:3] == ["0.5", "11 %"]
    shares = [int(row[2].split()[0]) for row in released.values()]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=1)
    assert float(released["<strong>together</strong>"][1]) == pytest.approx(4.5, abs=0.01)
    card_text = (folders["choice"] / "README.md").read_text()
    assert re.search(r"\| public data \| .*, chosen privately from three.npz \\\+ noise\\_8.npz, digits \|", card_text)


def test_the_line_that_checks_epsilon_gives_it(folders: dict[str, Path]) -> None:
    for name, n in (("plain", 1), ("choice", 2)):
        text = (folders[name] / "privacy.html").read_text()
        lines = re.findall(r'python -c "(.*?)"</code>', text.replace("&#34;", '"'))
        assert len(lines) == n
        config = json.loads((folders[name] / "config.json").read_text())
        total = config["privacy"]["epsilon"] - (0.5 if name == "choice" else 0)
        spent = [eval(line.partition("; print(")[2][:-1], {"spent": accountant.spent}) for line in lines]
        assert sum(spent) == pytest.approx(total, rel=1e-3)


def test_the_line_that_checks_epsilon_gives_no_more_than_is_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With batches, the numerical accountant is run, whose bound depends on its grid."""
    record = trained(*PLAIN, "training.batch_size=20")
    text = (exported(record, tmp_path / "model") / "privacy.html").read_text()
    (line,) = re.findall(r'python -c "(.*?)"</code>', text)
    capsys.readouterr()
    exec(line, {})
    printed = float(capsys.readouterr().out)
    (row,) = re.findall(r'<tr><td>training</td><td class="number">(.*?)</td>', text)
    assert 0.99 * float(row) < printed <= float(row)


def test_what_is_not_covered_depends_on_the_settings() -> None:
    pair = {"take": "train", "public": "digits"}
    settings = {"pair": pair, "model": {"backbone": {"architecture": "resnet18"}}}
    record = {"settings": settings, "privacy": {"epsilon": 1.0, "noise_source": "seeded"}}
    whole = " ".join(
        card.not_covered(record | {"private": "digits", "public": "digits", "public_labels": "of the private set"})
    )
    record = {"settings": {"model": {"name": "linear"}}, "privacy": {"noise_source": "operating system"}}
    less = " ".join(card.not_covered(record | {"private": "digits", "public": None}))
    for words in ("declared public", "initial weights", "guess the seed", "public data: nobody", "in the last digits"):
        assert words in whole
        assert words not in less


@pytest.mark.parametrize(
    ("take", "public", "labels", "expected"),
    [
        ("train", "./own.npz", "of the private set", ["Training"]),
        ("test", "./own.npz", "of the private set", ["Test"]),
        ("test", ["digits", "./own.npz"], "of another set", ["Test"]),
        ("train", "digits", "of another set", []),
        ("test", "/other/own.npz", "of another set", []),
        ("train", "./own.npz", None, []),
    ],
)
def test_public_examples_of_the_private_set_are_not_covered(
    take: str, public: str | list[str], labels: str | None, expected: list[str]
) -> None:
    settings = {"pair": {"take": take, "public": public}, "model": {"name": "linear"}}
    together = "+".join([public] if isinstance(public, str) else public)
    record = {"settings": settings, "privacy": {}, "public": together if labels else None, "public_labels": labels}
    sentences = card.not_covered(record | {"private": "own.npz"})
    assert [s.split()[0] for s in sentences if "examples of the private set that were declared public" in s] == expected


def test_random_weights_are_nobodys() -> None:
    network = {"architecture": "resnet18"}
    for backbone, published in (
        (network, True),
        (network | {"pretrained": False}, False),
        (network | {"pretrained": False, "checkpoint": "a.pth"}, True),
        ({"architecture": "pixels"}, False),
    ):
        assert card._published({"backbone": backbone}) == published
    assert card._published({"name": "timm", "pretrained": True})
    assert not card._published({"name": "timm", "pretrained": False})


def test_the_page_is_well_formed_needs_no_network_and_names_its_weights(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        text = (folder / "privacy.html").read_text()
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in text
        page = Page(text)
        assert page.open == []
        assert not re.search(r"https?://|@import|src=|<script|url\(", text)
        policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert policy == "default-src 'none'; style-src 'unsafe-inline'"


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_can_be_read_in_a_browser_and_prints_on_one_sheet(browser, folders, width, scheme) -> None:
    for folder in folders.values():
        opened(browser, (folder / "privacy.html").as_uri(), width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        contrasts = browser.execute_script(CONTRAST)
        assert contrasts["least"] >= 4.5, contrasts
        assert (contrasts["page"] < 0.1) == (scheme == "dark")
        paper = {"preferCSSPageSize": True, "printBackground": True}
        printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", paper)["data"])
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1, folder


# What the numbers mean


def test_a_program_that_attains_epsilon_and_delta_attains_the_bounds() -> None:
    """With chance delta it tells the truth; else it answers at random, with odds e^epsilon for the truth."""
    for epsilon, delta in ((0.1, 0.0), (1.0, 1e-3), (3.0, 0.1)):
        right = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
        assert adversary.success(epsilon, delta, 1.0) == pytest.approx(right)
        alarms = (1 - delta) / (1 + math.exp(epsilon))  # of the same program
        assert adversary.recognised(epsilon, delta, 1.0, alarms) == pytest.approx(right)
    assert adversary.success(1e6, 0.0, 1.0) == 1.0
    assert adversary.recognised(1e6, 0.0, 1.0, 0.01) == 1.0


def test_bounds_for_gaussian_noise_are_those_of_the_best_test() -> None:
    """The likelihood ratio of N(0, 1) and N(mu, 1), at every threshold and every (epsilon, delta) of its curve."""
    for mu in (0.3, 1.0, 2.5):
        part = {"accountant": "exact Gaussian", "noise_multiplier": 1 / mu, "rate": 1, "steps": 1}
        for delta in (1e-5, 1e-2):
            part |= {"epsilon": accountant.gaussian_epsilon(mu, delta), "delta": delta}
            variation = adversary.variation_of([part], part["epsilon"], delta)
            assert variation == pytest.approx(2 * norm.cdf(mu / 2) - 1)
            assert adversary.success(part["epsilon"], delta, variation) == pytest.approx(norm.cdf(mu / 2))
            for alarms in (1e-3, 0.01, 0.2, 0.6):
                best = norm.sf(norm.isf(alarms) - mu)
                assert best <= adversary.recognised(part["epsilon"], delta, variation, alarms) + 1e-9

            # somebody with k examples moves the mean by k mu
            for size in (2, 5):
                epsilon, more = adversary.of_group(part["epsilon"], delta, size)
                assert accountant.gaussian_delta(epsilon, size * mu) <= more + 1e-12
                assert norm.cdf(size * mu / 2) <= adversary.success(epsilon, more, size * variation) + 1e-12


def test_with_too_little_noise_for_the_accountant_epsilon_and_delta_bound_the_adversary() -> None:
    part = {"accountant": "PRV upper bound", "noise_multiplier": 0.05, "rate": 0.1, "steps": 1000}
    with pytest.raises(UsageError, match="too little to be accounted for"):
        accountant.advantage(0.05, 0.1, 1000)
    for epsilon in (1.0, 1000.0):
        part |= {"epsilon": epsilon, "delta": 1e-5}
        assert adversary.variation_of([part], epsilon, 1e-5) == adversary.total_variation(epsilon, 1e-5)


@pytest.mark.slow
def test_what_rounding_loses_counts_as_delta() -> None:
    """With so little noise, a run whose example was never drawn, 1e-46 of all, is all that hides it."""
    assert 1 - 1e-12 < accountant.advantage(0.2, 0.1, 1000) <= 1


def test_a_grid_that_is_too_fine_gives_way_to_a_coarser_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = accountant.advantage(1.0, 0.1, 90)
    accountant._prv.cache_clear()
    monkeypatch.setattr(accountant, "MAX_GRID", 20_000)
    coarse = accountant.advantage(1.0, 0.1, 90)
    assert fine < coarse < 1


def test_several_releases_add_up() -> None:
    noise = {"noise_multiplier": 2.0, "rate": 1, "steps": 1}
    gaussian = noise | {"accountant": "exact Gaussian", "epsilon": 2.0, "delta": 1e-5}
    pure = noise | {"accountant": "permute-and-flip", "epsilon": 0.5, "delta": 0.0}
    alone = [adversary.variation_of([part], part["epsilon"], part["delta"]) for part in (gaussian, pure)]
    assert alone[1] == pytest.approx(math.tanh(0.25))
    assert adversary.variation_of([gaussian, pure], 2.5, 1e-5) == pytest.approx(sum(alone))
    assert adversary.variation_of([gaussian, pure], 0.1, 0.0) == pytest.approx(math.tanh(0.05))


def test_percentages_are_never_rounded_down() -> None:
    for share, text in ((0.5, "50 %"), (0.50001, "50.1 %"), (0.7314, "73.2 %"), (0.9999, "100 %"), (1.0, "100 %")):
        assert card.percent(share) == text
    values = [float(card.percent(share / 1000).split()[0]) for share in range(1001)]
    assert all(a <= b for a, b in pairwise(values))
    assert all(value >= share / 10 - 1e-9 for share, value in enumerate(values))


def test_bounds_are_never_printed_smaller_than_they_are() -> None:
    values = (0.0, 4.0, 3.9971, 1e-5, 0.02, 8.00001, 12345.6, math.exp(700))
    assert " ".join(map(card.above, values)) == "0 4 3.998 1e-05 0.02 8.001 1.235e+04 1.015e+304"


# ONNX


@pytest.fixture
def runtime() -> Any:
    pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    return pytest.importorskip("onnxruntime", reason="needs the extra onnx")


def refused(target: Path, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export.run(settings(trained(*PLAIN).folder, target, format=Format.onnx))
    assert not target.exists()


@pytest.mark.parametrize("words", [PLAIN, DIGITS, WHITENED, SCATTERING, PILLAR, SEVERAL], ids=name_of)
def test_onnx_goes_the_whole_way_from_images(words: tuple[str, ...], tmp_path: Path, runtime: Any) -> None:
    """The example on the card runs without torch, and gives the answer of the run."""
    record = trained(*words)
    folder = exported(record, tmp_path / "model", "format=onnx")
    assert {path.name for path in folder.iterdir()} == FILES | {"model.onnx"}
    content = (folder / "model.onnx").read_bytes()
    for secret in (sys.prefix, str(Path(pubsel.__file__).parent), "faustus"):
        assert secret.encode() not in content
    assert not re.search(rb"\w{3}\.py", content)  # of a file; weights, which are noise, have the last three bytes too

    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    x = np.load("three.npz")["test_images"][:7, None]
    (logits,) = session.run(None, {"images": x})
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    predictions = record.predict(x[:, 0])
    if predictions.multi_label:
        shares = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(shares, predictions.probabilities, atol=1e-4)
    assert json.loads((folder / "config.json").read_text())["onnx"] == {"inputs": {"images": "uint8 [n, 1, 8, 8]"}}

    (tmp_path / "new_images").mkdir()
    Image.fromarray(x[0, 0]).save(tmp_path / "new_images" / "a.png")
    expected = record.predict(x[0, 0]).answers
    assert without_torch(folder) == f"{expected}\n"


TABLE = pd.DataFrame(
    {
        "age": [20.0, 30, 130, -5] * 30,
        "pulse": np.where(np.arange(120) % 3, np.arange(120) * 1000.0, np.nan),
        "sex": ["f", "m", "?", ""] * 30,
        "income": [1e5, 2e5, np.nan, 5e4, 7e4] * 24,
    }
)
BOUNDS = {"age": [0, 120], "sex": ["f", "m"], "income": [0, 1e6]}


def without_torch(folder: Path) -> str:
    """What the example on the card prints, of a process that loads no torch."""
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    code = code.replace("FOLDER", str(folder)) + "\nimport sys\nassert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scale", ["auto", "none"])
def test_onnx_goes_the_whole_way_from_a_table(scale: str, tmp_path: Path, runtime: Any) -> None:
    y = np.arange(120) % 4 > 1
    more = {"epsilon": 9.0, "delta": 1e-3, "scale": scale, "bounds": BOUNDS, "results": tmp_path / "results"}
    release = pubsel.fit(TABLE, np.where(y, "high", "low"), **more, format="onnx")
    folder = release.save(tmp_path / "model")
    known = json.loads((folder / "config.json").read_text())["onnx"]
    assert known["inputs"] == {"rows": "float32 [n, 5]"}
    columns = {"pulse": None, "age": None, "income": None, "sex": "m"}
    assert {column["name"]: column.get("word") for column in known["columns"]} == columns

    new = TABLE[::-1].reset_index(drop=True)
    new.to_csv(tmp_path / "new_table.csv", index=False)
    assert without_torch(folder) == f"{release.predict(new).tolist()}\n"
    rows = [new[c["name"]].eq(c["word"]) if "word" in c else new[c["name"]] for c in known["columns"]]
    session = runtime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"rows": np.stack(rows, 1).astype(np.float32)})
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(shares, release.predict_proba(new), atol=1e-4)


def test_rows_as_they_are_become_those_that_a_model_takes() -> None:
    """As `Field.read` has it, in any order of the columns."""
    fields = [Field("a", missing=True), Field("b", least=-2.0, most=6.0), Field("w", word="x"), Field("a"), Field("c")]
    x = torch.tensor([[7.0, 1, 3, math.nan], [math.nan, 0, math.inf, -4], [-3.0, math.nan, 0, 2]])
    given = OfRows(fields, zero=False)
    assert [field.name for field in given.given] == ["b", "w", "a", "c"]
    nan = math.nan
    expected = torch.tensor([[0, 1, 1, 3, nan], [1, 0, 0, nan, -4], [0, -1, 0, 0, 2.0]])
    torch.testing.assert_close(given(x), expected, equal_nan=True)
    torch.testing.assert_close(OfRows(fields, zero=True)(x), expected.nan_to_num(0.0))


@pytest.mark.parametrize("words", [PLAIN, WHITENED, SCATTERING, PILLAR], ids=name_of)
def test_the_network_that_is_written_gives_the_logits_of_predict(words: tuple[str, ...]) -> None:
    """In torch, so that no package of ONNX is needed for it."""
    whole, facts = rebuilt(trained(*words).folder)
    classifier = Classifier.of(whole, facts, "data", torch.device("cpu"))
    written = as_network(classifier)
    torch.testing.assert_close(written.net(*written.inputs.values()), classifier.model(written.features))


def test_without_the_weights_of_the_encoder_there_is_no_onnx(tmp_path: Path, runtime: Any) -> None:
    record = trained(*PILLAR)
    Path("weights").rename("away")
    message = r"tiny\.safetensors: no such file.*; format=onnx needs these weights: bring them back, or leave it out"
    try:
        with pytest.raises(UserError, match=message):
            export.run(settings(record.folder, tmp_path / "model", format=Format.onnx))
    finally:
        Path("away").rename("weights")
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("runtime")
def test_onnx_that_gives_other_answers_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pubsel.release import onnx

    for other in ([0.0, 9.0, 0.0], [0.0, math.nan, 0.0]):
        monkeypatch.setattr(onnx, "logits", lambda whole, x, other=other: torch.tensor([other] * 3))
        refused(tmp_path / "model", "the network gives other answers as ONNX: leave it out")


def test_logits_that_are_no_numbers_or_of_another_shape_are_not_near() -> None:
    from pubsel.release.onnx import _near

    expected = np.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
    assert _near(expected + 1e-4, expected)
    for answers in (expected + 0.1, expected * math.nan, expected[:1], expected[[0, 0, 0]]):
        assert not _near(answers, expected)
    assert not _near(expected, expected * math.nan)


def test_a_network_that_onnxruntime_cannot_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Any
) -> None:
    monkeypatch.setattr(runtime, "InferenceSession", Mock(side_effect=RuntimeError("no kernel\nfor this")))
    refused(tmp_path / "model", r"onnxruntime cannot run this network \(no kernel for this\): leave it out")


def test_without_the_packages_of_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(tmp_path / "model", r'format=onnx needs .*: python -m pip install "\.\[onnx\]" in a clone')
