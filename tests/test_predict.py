"""What a trained model says of new images: the same as when it was evaluated, by name, from its own two files."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.metrics import roc_auc_score

import pubsel
from pubsel import files, records
from pubsel.cli import main
from pubsel.commands import predict
from pubsel.commands.predict import BATCH, READERS
from pubsel.data import class_names
from pubsel.data.given import as_input, given
from pubsel.messages import UsageError, UserError
from pubsel.papers import make
from pubsel.release.classifier import Classifier
from pubsel.settings.datasets import dataset_info
from tests.made import write_npz

NETWORK = "test_efficientnet"
NAMES = ("ant", "bee", "cow")
N_TRAIN, N_TEST = 60, 45


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private images as a folder and as npz files, weights of a tiny network, and the runs of all tests."""
    home = tmp_path_factory.mktemp("home")
    images, labels = bright(N_TRAIN + N_TEST)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = home / "animals" / NAMES[label] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)

    both = np.stack([labels % 2, labels // 2], 1)  # two labels of each image
    for name, y in (("animals", labels), ("two", labels // 2), ("several", both)):
        write_npz(home / f"{name}.npz", (images[:N_TRAIN], y[:N_TRAIN]), (images[N_TRAIN:], y[N_TRAIN:]))
    torch.manual_seed(0)
    save_file(timm.create_model(NETWORK, num_classes=10).state_dict(), str(home / "tiny.safetensors"))
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def bright(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey images of 8x8 pixels whose brightness tells the class, in most cases, with labels in no order."""
    draw = np.random.default_rng(0)
    labels = draw.integers(3, size=n)
    values = draw.normal(60 + 50 * labels[:, None, None], 40, size=(n, 8, 8))
    return values.clip(0, 255).astype(np.uint8), labels


def trained(*words: str) -> pubsel.Record:
    """The record of a short run, made once for all tests that ask for it."""
    always = ("distance=none", "threads=1", "device=cpu", "epsilon=4", "training.batch_size=30")
    return pubsel.train("pair.take=train", "pair.m=12", *always, *words)


FOLDER = ("pair.private=./animals", "algorithm=dp_sgd", "training.epochs=3", "model=linear")
NPZ = ("pair.private=animals.npz", "pair.public=animals.npz")
TWO = ("pair.private=two.npz", "pair.public=two.npz")
TINY = f"""
model=mobilenetv2_coral model.backbone.architecture={NETWORK} model.backbone.checkpoint=tiny.safetensors
model.backbone.input_size=32 +model.backbone.crop=1.0 data_root=.
""".split()
TIMM = f"""
model=timm model.architecture={NETWORK} model.checkpoint=tiny.safetensors model.norm=freeze
model.input_size=32 model.trained=[head] data_root=.
""".split()
OF_IMAGES = (*TIMM, "algorithm=dp_sgd", "training.epochs=2")
OF_FEATURES = (*TINY, "algorithm=dp_sgd", "training.epochs=3")


# The same as when it was evaluated


def test_files_of_a_folder_get_the_classes_that_the_record_counted() -> None:
    record = trained(*FOLDER)
    files = pubsel.open_dataset("./animals").files
    assert files is not None
    told = record.predict([f"animals/{name}" for name in files[1].names])
    right = [answer == Path(file).parent.name for answer, file in zip(told.answers, told.files, strict=True)]
    assert record["utility"] == np.mean(right) > 0.5
    assert told.classes == NAMES
    np.testing.assert_allclose(told.probabilities.sum(1), 1)


@pytest.mark.parametrize(
    "words",
    [
        ("model=digits_cnn", "algorithm=dp_sgd", "training=digits", "training.epochs=2"),
        ("model=digits_cnn", "model.trained=[fc]", "model.once=true", "algorithm=non_private", "training.epochs=2"),
        OF_IMAGES,
        ("model=pixels", "algorithm=dp_sgd", "training.epochs=3"),
        ("model=pixels", "algorithm=pillar", "algorithm.k=5", "training=pillar", "training.steps=3"),
        ("model=pixels", "algorithm=dp_pca", "algorithm.k=5", "training=pillar", "training.steps=3"),
        ("model=pixels", "algorithm=adamix", "algorithm.rank=10", "training=adamix", "training.steps=3"),
        ("model=pixels", "algorithm=dp_fc"),
        ("model=pixels", "algorithm=public_second_moment"),
        ("model=pixels", "algorithm=dppl_public"),
        (*TWO, "model=pixels", "algorithm=noisy_sgd", "algorithm.k=5", "algorithm.steps=1000"),
        ("model=scattering", "algorithm=dp_sgd", "training.epochs=3"),
        ("model=pixels", "algorithm=whitened_head"),
        ("model=pixels", "algorithm=whitened_head", "pair.public=null"),
        OF_FEATURES,
        (*TINY, "algorithm=pillar", "algorithm.k=5", "training=pillar", "training.steps=3"),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words if word.startswith(("model=", "algorithm="))),
)
def test_every_kind_of_model_says_what_the_record_counted(words: tuple[str, ...]) -> None:
    record = trained(*NPZ, *words)
    told = record.predict(record["private"], data_root=".")
    test = [i for i, file in enumerate(told.files) if "/test_images/" in file]
    labels = np.load(record["private"])["test_labels"]
    assert record["utility"] == np.mean(told.probabilities[test].argmax(1) == labels)
    assert [told.classes[c] for c in told.probabilities.argmax(1)] == told.answers
    assert told.classes == ("0", "1", "2")[: labels.max() + 1]  # an npz has no names


@pytest.mark.parametrize(
    "words",
    [("model=linear", "algorithm=dp_sgd", "training.epochs=3"), OF_FEATURES],
    ids=["network", "features"],
)
def test_labels_of_which_an_image_has_several(words: tuple[str, ...]) -> None:
    record = trained("pair.private=several.npz", *words)
    told = record.predict(np.load("several.npz")["test_images"], data_root=".")
    labels = np.load("several.npz")["test_labels"]
    assert record["metric"] == "auc"
    assert record["utility"] == np.mean([roc_auc_score(labels[:, c], told.probabilities[:, c]) for c in range(2)])
    assert told.answers == [[str(c) for c in np.flatnonzero(row >= 0.5)] for row in told.probabilities]

    path = Path("results/runs", record["identity"])
    assert main(["predict", str(path), "several.npz", "to=labels.csv", "data_root=."]) == 0
    rows = list(csv.DictReader(Path("labels.csv").read_text().splitlines()))
    assert list(rows[0]) == ["file", "0", "1"]
    assert rows[0]["file"] == "several.npz/test_images/0"
    assert float(rows[0]["1"]) == pytest.approx(told.probabilities[0, 1], rel=1e-5)


# The files of a model are enough


def test_two_files_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither record nor private data."""
    record = trained(*FOLDER)
    for name in ("model.pt", "model.json"):
        shutil.copy(record.folder / name, tmp_path)
    expected = record.predict("animals")
    shutil.copytree("animals/cow", tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", ".", "new"]) == 0
    rows = list(csv.DictReader(Path("answers.csv").read_text().splitlines()))
    answers = dict(zip(expected.files, expected.answers, strict=True))
    assert [row["class"] for row in rows] == [answers[f"animals/cow/{Path(row['file']).name}"] for row in rows]


def test_weights_that_it_was_given_need_not_be_there_again() -> None:
    """model.pt of a network on images has all its weights."""
    record = trained(*NPZ, *OF_IMAGES)
    expected = record.predict("animals.npz").answers
    Path("tiny.safetensors").rename("elsewhere.safetensors")
    try:
        assert record.predict("animals.npz").answers == expected
    finally:
        Path("elsewhere.safetensors").rename("tiny.safetensors")


def test_a_record_names_the_weights_that_its_network_was_given() -> None:
    """One digest of one file: of features, of a network that is trained further, and of networks for a distance."""
    digest = trained(*NPZ, *OF_FEATURES)["backbone"]
    assert trained(*NPZ, *OF_IMAGES)["backbone"] == digest
    for words in (TIMM, TINY):
        distance = ("distance=gsd", "distance.k=4") if words == TIMM else ("distance=whitening",)
        ranked = pubsel.rank(
            "animals.npz", "animals.npz", *distance, "distance.m=12", "distance.initialisations=1", *words
        )
        assert ranked["backbone"] == digest

    assert "backbone" not in trained(*FOLDER)


def test_model_json_is_as_secret_as_the_weights_and_says_nothing_more() -> None:
    facts = trained(*FOLDER).folder / "model.json"
    assert facts.stat().st_mode & 0o777 == 0o600
    keys = "model classes multi_label shape mean std backbone frozen weights example"
    assert set(json.loads(facts.read_text())) == set(keys.split())


def test_classes_of_named_sets_have_names(tmp_path: Path) -> None:
    assert class_names("cifar10_1", "data")[3] == "cat"
    assert class_names("chestmnist_64", "data")[13] == "Hernia"
    ends = {"mit67": ("airport_inside", "wine_cellar"), "cub200": ("Black_footed_Albatross", "Common_Yellowthroat")}
    ends |= {"oxford_flowers": ("pink_primrose", "blackberry_lily"), "oxford_pets": ("Abyssinian", "Yorkshire_Terrier")}
    ends |= {"stanford_dogs": ("Chihuahua", "African_hunting_dog")}
    for name in make.work_of("adamix_figure4")[2]:
        assert class_names(name, "data")[:: dataset_info(name).classes - 1] == ends[name]
    assert class_names("digits", "data") == ()
    assert class_names(str(tmp_path / "cifar10.npz"), str(tmp_path))[0] == "airplane"
    assert class_names("./cifar10.npz", str(tmp_path)) == ()


# What may be asked


def test_images_in_memory_are_those_of_files() -> None:
    record = trained(*FOLDER)
    files = sorted(Path("animals").glob("*/*.png"))[:7]
    expected = record.predict(files)
    pictures = [Image.open(file) for file in files]
    x = np.stack([np.array(picture) for picture in pictures])
    colour = np.repeat(x[..., None], 3, -1)
    tensor = torch.from_numpy(x)[:, None]
    for images in (pictures, x, list(x), tensor, list(tensor), [pictures[0], x[1:3], *files[3:5], tensor[5:]]):
        told = record.predict(images)
        np.testing.assert_allclose(told.probabilities, expected.probabilities, atol=1e-6)
        assert told.answers == expected.answers
    np.testing.assert_allclose(record.predict(colour).probabilities, expected.probabilities, atol=0.05)
    assert record.predict([pictures[0], files[3]]).files == ["0", str(files[3])]
    assert len(record.predict(pictures[0])) == len(record.predict(colour[0])) == len(record.predict(tensor[0])) == 1


def test_any_size_format_and_colour_is_brought_to_the_training_shape(tmp_path: Path) -> None:
    record = trained(*FOLDER)
    draw = np.random.default_rng(1)
    picture = Image.fromarray(draw.integers(256, size=(40, 24, 3), dtype=np.uint8))
    for name, mode in (("a.jpg", "RGB"), ("b.png", "RGBA"), ("c.gif", "P"), ("d.tif", "L"), ("e.webp", "RGB")):
        (tmp_path / "deep" / "deeper").mkdir(parents=True, exist_ok=True)
        picture.convert(mode).save(tmp_path / "deep" / "deeper" / name)
    told = record.predict(tmp_path)
    assert [Path(file).name for file in told.files] == ["a.jpg", "b.png", "c.gif", "d.tif", "e.webp"]
    alone = record.predict(picture.convert("RGBA")).probabilities[0]
    np.testing.assert_allclose(told.probabilities[1], alone, atol=1e-6)


def test_a_table_names_its_files() -> None:
    record = trained(*FOLDER)
    table = Path("animals") / "new.csv"
    file = next(Path("animals/bee").iterdir())
    table.write_text(f"path;other\nbee/{file.name};1\n")
    told = record.predict("animals/new.csv")
    table.unlink()
    assert told.files == [f"bee/{file.name}"]
    np.testing.assert_allclose(told.probabilities, record.predict(file).probabilities, atol=1e-6)


def test_the_table_has_a_row_for_each_image(capsys: pytest.CaptureFixture) -> None:
    record = trained(*FOLDER)
    file = next(Path("animals/ant").iterdir())
    assert main(["predict", record["identity"], "animals/bee", str(file), "to=some.csv"]) == 0
    rows = list(csv.reader(Path("some.csv").read_text().splitlines()))
    told = record.predict(["animals/bee", file])
    assert capsys.readouterr().out == f"some.csv: {len(told)} images, 3 classes\n"
    assert rows[0] == ["file", "class", "probability"]
    assert [row[0] for row in rows[1:]] == told.files
    assert [row[1] for row in rows[1:]] == told.answers
    np.testing.assert_allclose([float(row[2]) for row in rows[1:]], told.probabilities.max(1), rtol=1e-5)
    assert Path("some.csv").stat().st_mode & 0o777 == 0o600

    pattern = record["identity"][:-5] + "*"
    assert main(["predict", pattern, "animals/bee", "to=some.csv", "all=true"]) == 0
    rows = list(csv.reader(Path("some.csv").read_text().splitlines()))
    assert rows[0] == ["file", "class", "probability", *NAMES]
    assert len(rows) == len(list(Path("animals/bee").iterdir())) + 1
    np.testing.assert_allclose([float(v) for v in rows[1][3:]], told.probabilities[0], rtol=1e-5)


def test_the_table_goes_where_it_is_sent_and_replaces_nothing_that_is_read(capfd: pytest.CaptureFixture) -> None:
    folder = trained(*FOLDER).folder
    image = next(Path("animals/bee").iterdir())
    Path("listed.csv").write_text(f"path\n{image.resolve()}\n")
    before = {path: path.read_bytes() for path in (image, Path("listed.csv"), folder / "model.pt")}
    capfd.readouterr()
    assert main(["predict", str(folder), str(image), "to=-"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == "file,class,probability"
    assert len(out.splitlines()) == 2
    assert "-: 1 images, 3 classes\n" in err

    for asked, to in (
        ("animals", image),
        ("listed.csv", image),
        ("listed.csv", "listed.csv"),
        ("animals", folder / "model.pt"),
        ("animals", folder / "result.json"),
    ):
        assert main(["predict", str(folder), asked, f"to={to}"]) == 2
        assert "which the command reads: name another file" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_memory_does_not_grow_with_the_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first answers at most two batches are read."""
    read = []
    monkeypatch.setattr(predict, "as_input", lambda raw, *how: read.append(raw) or as_input(raw, *how))
    small, large = (Classifier(None, None, shape, ("a", "b"), False) for shape in ((1, 8, 8), (3, 2048, 2048)))
    pages = predict.batches(given(np.zeros((10 * BATCH, 8, 8), np.uint8)), small, False)
    names, x, n = next(pages)
    assert len(names) == len(x) == n == BATCH
    assert len(read) <= 2 * BATCH + READERS
    assert sum(n for _, _, n in pages) == 9 * BATCH
    pages = predict.batches(given(np.zeros((40, 8, 8), np.uint8)), large, False)
    assert next(pages)[1].shape == (32, 3, 2048, 2048)
    pages.close()


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    record = trained(*FOLDER)
    monkeypatch.setattr(files, "PAUSE", 0.0)
    record.predict(np.zeros((2 * BATCH + 1, 8, 8), np.uint8))
    lines = [line for line in capsys.readouterr().err.splitlines() if "images" in line]
    assert [line.split(",")[0] for line in lines] == [f"predict: {k * BATCH} of {2 * BATCH + 1} images" for k in (1, 2)]


# What goes wrong


def test_what_cannot_be_read_is_named_or_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record = trained(*FOLDER)
    capsys.readouterr()
    (tmp_path / "a.png").write_text("no image")
    Image.new("L", (8, 8)).save(tmp_path / "b.png")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "c.tif")
    with pytest.raises(UserError, match=r"a\.png: not a readable image: remove it or replace it, or set skip=true"):
        record.predict(tmp_path)
    with pytest.raises(UserError, match=r"c\.tif: more than 16 bits per channel"):
        record.predict(tmp_path / "c.tif")
    assert record.predict(tmp_path, skip=True).files == [str(tmp_path / "b.png")]
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["left out"] * 2
    with pytest.raises(UserError, match="no image could be read"):
        record.predict([tmp_path / "a.png"], skip=True)

    out = tmp_path / "out.csv"
    assert main(["predict", record["identity"], str(tmp_path), f"to={out}"]) == 1
    assert not out.exists()
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "images: none given"),
        ("nowhere", "nowhere: no such file or folder"),
        ("results/runs", "results/runs: no images in this folder"),
        (np.zeros((8, 8)), "rows of numbers"),
        (np.zeros((1, 8, 8, 4), np.uint8), "images: an array of uint8 \\[1, 8, 8, 4\\]"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), "\\[n, c, h, w\\] in a tensor"),
        ({"a": 1}, "images: dict: give paths, PIL images"),
        (np.zeros((2, 64), np.float32), "rows of numbers, but this model was trained on images"),
    ],
    ids=str,
)
def test_what_are_no_images_is_refused(images: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(*FOLDER).predict(images)


HARM = {
    "no weights": (lambda run: (run / "model.pt").unlink(), "model.pt: no such file, the weights of the model"),
    "no facts": (
        lambda run: (run / "model.json").unlink(),
        "bring it back, or delete .* and train it again.*pubsel runs show",
    ),
    "no record": (
        lambda run: (run / "result.json").unlink(),
        "not finished, so it has no model yet: give its command again",
    ),
    "half": (lambda run: (run / "model.json").write_text("{"), r"model.json cannot be read \(.*: bring it back"),
    "empty": (lambda run: (run / "model.json").write_text("{}"), "model.json: it lacks model: bring it back"),
    "damaged": (lambda run: (run / "model.pt").write_bytes(b"PK"), "model.pt does not fit the model.json next to it"),
    "other weights": (lambda run: changed(run, weights="0"), "model.pt does not have the weights that the model.json"),
    "other network": (
        lambda run: changed(run, mean=[0.9]),
        "its network is another one here than where it was trained",
    ),
    "other classes": (lambda run: changed(run, classes=["a"]), "model.pt does not fit the model.json next to it"),
    "nothing": (lambda run: shutil.rmtree(run), "no such file, and no record of this name in"),
}


@pytest.mark.parametrize(("harm", "words"), HARM.values(), ids=HARM)
def test_what_a_run_lacks_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, harm, words: str) -> None:
    folder = trained(*FOLDER).folder
    run = tmp_path / "runs" / folder.name
    shutil.copytree(folder, run)
    harm(run)
    capsys.readouterr()
    assert main(["predict", run.name, "animals", f"results={tmp_path}", f"to={tmp_path / 'a.csv'}"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    with pytest.raises(UserError, match=words):
        raise UserError(told[0])
    assert not (tmp_path / "a.csv").exists()


def test_a_release_of_nearly_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "config.json").touch()
    with pytest.raises(UserError, match=r"relase: no such file.* \(did you mean release\?\)"):
        records.find(str(tmp_path / "relase"), tmp_path)


def changed(run: Path, **values: object) -> None:
    facts = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(facts | values))


def test_another_backbone_is_refused(tmp_path: Path) -> None:
    record = trained(*NPZ, *OF_FEATURES)
    torch.manual_seed(1)
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model(NETWORK, num_classes=10).state_dict(), str(other))
    with pytest.raises(UserError, match=f"{NETWORK}: its weights here are not those that the model was trained with"):
        record.predict("animals.npz", checkpoint=other)

    Path("tiny.safetensors").rename("elsewhere.safetensors")
    try:
        with pytest.raises(UserError, match=r"tiny\.safetensors: no such file, neither here nor in .*checkpoint=FILE"):
            record.predict("animals.npz")
        expected = record.predict("animals.npz", checkpoint="elsewhere.safetensors").answers
    finally:
        Path("elsewhere.safetensors").rename("tiny.safetensors")
    assert record.predict("animals.npz", data_root=".").answers == expected
    with pytest.raises(UserError, match="this model has no backbone"):
        trained(*FOLDER).predict("animals", checkpoint=other)


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture) -> None:
    assert main(["predict"]) == 2
    assert "pubsel predict RUN IMAGES: name of a finished run" in capsys.readouterr().err
    assert main(["predict", trained(*FOLDER)["identity"]]) == 2
    assert "give folders, image files, CSV or npz files after the run" in capsys.readouterr().err
    assert main(["predict", "*", "animals", "results=nowhere"]) == 2
    assert "run=*: 0 runs in nowhere/runs fit it: give the name of one" in capsys.readouterr().err
    with pytest.raises(UsageError, match="unknown key alll"):
        trained(*FOLDER).predict("animals", alll=True)


def test_rows_of_a_table_are_given_as_arrays() -> None:
    rows = np.arange(8, dtype=np.float64).reshape(2, 4)
    for given_rows in (rows, torch.from_numpy(rows), list(rows)):
        read = [as_input(raw, (4,)) for part in given(given_rows) for _, raw in part.each()]
        assert torch.equal(torch.stack(read), torch.from_numpy(rows).float())
    with pytest.raises(UserError, match=r"trained on rows of 5 numbers: give them as an array \[n, d\]"):
        as_input(read[0], (5,))
    with pytest.raises(UserError, match="trained on rows of 4 numbers"):
        as_input(Path("animals"), (4,))
