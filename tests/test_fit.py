"""pubsel fit: one command from private images to a folder that may be given away, under one guarantee."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

import pubsel
from pubsel.cli import main
from pubsel.commands import fit
from pubsel.data.overlap import Digests, by_content, rows
from pubsel.messages import UserError
from pubsel.privacy import ledger
from pubsel.privacy.randomness import Secret, Source, SystemEntropy
from pubsel.release import onnx
from pubsel.settings.compose import composed
from pubsel.settings.keys import FitConfig, Read
from pubsel.settings.schema import check
from tests.made import interrupted, only_record

FILES = {"model.safetensors", "config.json", "README.md", "privacy.html"}
NOT_FEATURES = ("fmnist_cnn", "resnet20", "linear", "logistic", "timm", "torchvision", "mobilenetv2_layers")
CLASSES = ("cat", "dog", "owl")
WORDS = ("public=[./same,./other]", "epsilon=4", "delta=1e-3", "features=pixels", "download=false", "threads=1")


def draw(folder, kind, n, first=0, people=0):
    """Image files of three classes, in one of two kinds; people: with so many images each, in folders of theirs."""
    random = np.random.RandomState(kind + first)
    for i in range(first, first + n):
        label = random.randint(3)
        image = random.randint(0, 60, (8, 8))
        image[:, 2 * label : 2 * label + 2] += 150
        image = image.T if kind else image
        who = Path(f"person {i // people}") if people else Path()
        path = Path(folder) / CLASSES[label] / who / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(path)


def several(table, folder):
    """A table of the images of a folder, with several labels each."""
    files = sorted(Path(folder).rglob("*.png"))
    rows = [f"{path},{('A|B', 'A', 'B', 'C|A')[i % 4]}" for i, path in enumerate(files)]
    table.write_text("\n".join(["path,label", *rows]))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("fit")
    draw(home / "mine", 0, 600)
    draw(home / "same", 0, 80, first=5000)
    draw(home / "other", 1, 80, first=6000)
    draw(home / "new", 0, 40, first=7000)
    draw(home / "people", 0, 600, people=2)
    (home / "release").mkdir()
    draw(home / "few", 0, 10, first=8000)
    several(home / "several.csv", home / "other")
    (home / "link").symlink_to("mine")
    (home / "flat").mkdir()
    for path in sorted((home / "same" / "cat").iterdir()):
        shutil.copy(path, home / "flat")
    return home


@pytest.fixture(autouse=True)
def here(home, monkeypatch, request):
    monkeypatch.chdir(home)


def fitted(capsys, *words, private="./mine"):
    """The lines of a command that succeeds."""
    code = main(["fit", private, *WORDS, *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out.splitlines(), err


def spent(results):
    return [ledger.cost_of(lines) for lines in ledger.ledgers(results)]


@pytest.fixture(scope="module")
def release(home):
    """The folder of one command, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("builtins.print", lambda *parts, **_: printed.append(" ".join(map(str, parts))))
        printed = list[str]()
        # The noise is the same each time: one interval in twenty does not contain the truth.
        fresh, taken, secret = np.random.default_rng(0).bytes, list[int](), Secret.__call__
        patch.setattr("os.urandom", lambda n: taken.append(n) or fresh(n))
        patch.setattr(Secret, "__call__", lambda self, *of: sources.append(secret(self, *of)) or sources[-1])
        sources = list[Source]()
        assert main(["fit", "./mine", *WORDS]) == 0

    # Each secret number is keyed by the operating system, anew at each step.
    assert {type(source) for source in sources} == {SystemEntropy}
    record = only_record(home / "results")
    assert taken.count(32) == taken.count(16) > record["privacy"]["parts"][1]["steps"]
    return home / "release", "\n".join(printed)


def test_a_folder_becomes_a_model_under_one_guarantee(release):
    folder, printed = release
    assert {path.name for path in folder.iterdir()} == FILES
    assert "  public data, chosen privately: ./same" in printed
    assert re.search(r"chosen privately from .*, none \|", (folder / "README.md").read_text())
    assert "This is not private, and not in the folder." in printed

    record = only_record("results")
    privacy = record["privacy"]
    assert privacy["epsilon"] <= 4
    assert privacy["epsilon"] == pytest.approx(4, abs=0.01)
    assert (privacy["delta"], privacy["noise_source"]) == (1e-3, "operating system")
    assert [part["what"] for part in privacy["parts"]] == ["selection of the public set", "training"]
    assert privacy["parts"][0]["epsilon"] == pytest.approx(0.2)

    # The measurement has all of the budget, and of one image it is not more than that.
    assert record["quality"]["privacy"]["epsilon"] == pytest.approx(4, abs=0.01)
    assert record["quality"]["privacy"]["epsilon"] <= 4
    ((epsilon, delta, releases),) = spent("results")
    assert epsilon <= 4
    assert (delta, releases) == (1e-3, 3)
    quality, stated = record["quality"], [*privacy["parts"], record["quality"]["privacy"]]
    listed = ledger.of_cell("results", record["identity"])  # of each data set, in any order
    spends = [sorted((each["epsilon"], each["delta"]) for each in lines) for lines in (listed, stated)]
    assert spends[0] == spends[1]
    error = quality["figures"]["accuracy"][0] - record["selection"]["validation"]
    assert abs(error) < 7 * quality["deviation"] / quality["examples"]
    assert record["utility"] > 0.8


def test_labels_of_public_folders_with_the_same_class_names_are_used_if_their_owner_says_so(release, capsys):
    assert only_record("results")["derived"]["public_labels"] is False
    for words, said in (
        (
            (),
            "public labels: not used; classes of the same names: ./same, ./other; if they mean the same, set ",
        ),
        (("public_labels=given",), "public labels: used, as those of your classes in this order: cat, dog, owl"),
        (("public_labels=none",), ""),
    ):
        lines, _ = fitted(capsys, "dry=true", "to=labels", *words)
        text = "\n".join(lines)
        assert said in text
        assert ("public labels" in text) == bool(said)


def test_examples_of_a_pool_are_chosen_under_the_same_guarantee(home, capsys):
    words = ("public=null", "pool=[./same,./other]", "choice=0.5", "to=pooled", "results=pooled_results")
    lines, err = fitted(capsys, *words)
    assert "same (80 images), ./other (80 images): examples of them, or none, chosen privately" in err
    record = only_record("pooled_results")
    drawn = record["pool"]["examples"]
    assert drawn["./same"] > 20
    (line,) = (line for line in lines if "public examples, chosen privately: " in line)
    assert f"{drawn['./same']} of ./same" in line
    assert record["privacy"]["epsilon"] <= 4
    ((epsilon, delta, releases),) = spent("pooled_results")
    assert (round(epsilon, 2), delta, releases) == (4, 1e-3, 3)
    assert re.search(r"chosen privately from .*, none \|", (home / "pooled" / "README.md").read_text())
    assert "choice of the public examples" in (home / "pooled" / "privacy.html").read_text()


def test_the_release_says_what_it_may_and_nothing_else(release):
    folder, _ = release
    record = only_record("results")
    texts = [(folder / name).read_text() for name in FILES - {"model.safetensors"}]
    for text in texts:
        assert "mine" not in text.replace("determine", "")
        assert f"{100 * record['utility']:.2f} %" not in text
    assert "(4, 0.001)" in texts[0] + texts[1] + texts[2]
    config = json.loads((folder / "config.json").read_text())
    assert config["classes"] == list(CLASSES)
    assert config["quality"]["figures"]["accuracy"]


def test_the_release_answers_without_the_rest(release, tmp_path, monkeypatch):
    folder, _ = release
    shutil.copytree(folder, tmp_path / "release")
    shutil.copytree("new", tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    answers = pubsel.load("release").predict("new")
    right = [answer == Path(file).parent.name for answer, file in zip(answers.answers, answers.files, strict=True)]
    assert np.mean(right) > 0.8


def test_the_same_command_again_changes_and_spends_nothing(release, capsys):
    folder, _ = release
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    _, told = fitted(capsys)
    assert "finished before" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert spent("results")[0].releases == 3

    # A folder that was lost, or never made because the command was killed, is made again, without the private images.
    shutil.rmtree(folder)
    program = f"import sys; from pubsel.cli import main; sys.exit(main({['fit', './mine', *WORDS]!r}))"
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert spent("results")[0].releases == 3


def test_a_dry_run_tells_what_is_left_of_the_budget(capsys, tmp_path):
    words = ["dry=true", f"results={tmp_path}/r", f"to={tmp_path}/release"]
    (tmp_path / "r").mkdir()
    planned, _ = fitted(capsys, *words, "budget=9")
    assert "  budget 9: epsilon 0 is spent for one example, 9 is left" in planned
    assert not any((tmp_path / "r").iterdir())
    release = ledger.Entry("cell", "./mine", "training", 2.5, 1e-5, None, cap=ledger.Cap(9.0))
    ledger.note(tmp_path / "r", "content", release)
    planned, _ = fitted(capsys, *words)
    assert "  budget 9: epsilon 2.5 is spent for one example, 6.5 is left" in planned


def test_a_dry_run_tells_the_plan_and_reads_no_noise(capsys, tmp_path):
    lines, _ = fitted(capsys, "dry=true", f"results={tmp_path}/r", f"to={tmp_path}/release")
    text = "\n".join(lines)
    assert "budget" not in text
    for part in (
        "plan for ./mine",
        "8x8x1, 3 classes",
        "./same (80 images)",
        "or none",
        "epsilon 4, delta 0.001",
        "0.2 for the choice, 3.8 for the weights",
        "features: 64 of each",
    ):
        assert part in text
    assert not list(tmp_path.iterdir())


def test_without_a_public_set_that_is_alike_it_goes_on_and_says_so(capsys, tmp_path):
    words = ("public=./other", f"results={tmp_path}/r", f"to={tmp_path}/release")
    lines, _ = fitted(capsys, *words)
    assert "  public data, chosen privately: none: your images do not resemble" in "\n".join(lines)
    assert only_record(tmp_path / "r")["public"] is None
    lines, _ = fitted(capsys, "public=null", f"results={tmp_path}/s", f"to={tmp_path}/other")
    assert "public data" not in "\n".join(lines)
    record = only_record(tmp_path / "s")
    assert record["privacy"]["epsilon"] == pytest.approx(4, abs=0.01)


def test_several_labels_are_released_and_measured(capsys, tmp_path):
    several(tmp_path / "several.csv", Path("mine").resolve())
    words = ("public=null", f"results={tmp_path}/results", f"to={tmp_path}/to")
    lines, _ = fitted(capsys, *words, private=f"{tmp_path}/several.csv")
    assert lines[-1].startswith("  Use it: pubsel predict")
    assert only_record(tmp_path / "results")["metric"] == "auc"


def test_people_are_protected_and_measured(capsys, tmp_path):
    words = ("unit=folder", f"results={tmp_path}/r", f"to={tmp_path}/release")
    lines, told = fitted(capsys, *words, private="./people")
    text, record = "\n".join(lines), only_record(tmp_path / "r")
    people = record["private_units"] + record["quality"]["units"]
    images = record["private_examples"] + record["quality"]["examples"]
    assert f"  of the {people} people with {images} images {record['private_units']} for training" in told
    assert "it is of other people than the weights" in told
    assert [cost.epsilon <= 4 for cost in spent(tmp_path / "r")] == [True]
    assert "for a person with all their examples" in text
    assert "Measured privately: accuracy" in text
    assert f"private images of {record['quality']['units']} people" in (tmp_path / "release" / "README.md").read_text()


def test_a_finished_model_is_not_released_for_other_files(capsys, tmp_path):
    draw(tmp_path / "own", 0, 90)
    words = ["fit", str(tmp_path / "own"), *WORDS, f"results={tmp_path}/r", "delta=1e-3", "public=null"]
    assert main([*words, f"to={tmp_path}/a"]) == 0
    next((tmp_path / "own").rglob("*.png")).unlink()
    capsys.readouterr()
    for more in ([], ["dry=true"]):
        assert main([*words, f"to={tmp_path}/b", *more]) == 1
        assert "its files are not those that" in (err := capsys.readouterr().err)
        assert "delete" in err
    assert not (tmp_path / "b").exists()
    assert len(spent(tmp_path / "r")) == 1


def test_the_plan_says_what_leaves_if_a_set_is_chosen(capsys, tmp_path):
    draw(tmp_path / "own", 0, 120)
    draw(tmp_path / "public", 0, 120, first=500)
    shared = sorted((tmp_path / "own").rglob("*.png"))[::4]
    for i, file in enumerate(shared):
        shutil.copy(file, tmp_path / "public" / file.parent.name / f"shared{i}.png")
    words = ["dry=true", f"public=[{tmp_path}/public]", f"to={tmp_path}/release"]
    lines, _ = fitted(capsys, *words, private=str(tmp_path / "own"))
    counts = [[int(word) for word in re.findall(r"(\d+) (?:for|to)", line)] for line in lines if "to measure" in line]
    assert len(counts) == 2
    assert sum(counts[0]) - sum(counts[1]) == len(shared)


def test_small_classes_and_wide_intervals_are_told_before_anything_is_spent(capsys, tmp_path):
    draw(tmp_path / "few", 0, 90)
    folder = str(tmp_path / "few")
    lines, told = fitted(capsys, "dry=true", "epsilon=0.5", f"to={tmp_path}/release", private=folder)
    assert "few: classes with fewer than 50 training images may be lost in the noise: cat has " in told
    assert "warning: the measured accuracy will be uncertain by up to " in "\n".join(lines)


SPELLED = ("./mine", "./mine/", "mine/../mine/.", "./link", "~/mine", "~/link/cat/..")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["private=./nowhere"], "nowhere: no such file or folder"),
        (["public=[[./same,./other]]"], "give each set by itself"),
        (["pool=[./same]"], "public=[...] and pool=[...]: give one: a whole set is chosen, or examples"),
        *(([f"public=['{name}']"], f"public=[{name}]: this is the private data: take another set") for name in SPELLED),
        (["public=null", f"pool=[{SPELLED[0]}]"], f"pool=[{SPELLED[0]}]: this is the private data: take another set"),
        (["to=same"], "to=same: it is there already: give a new folder, or delete it"),
        (["to=mine/new"], "which this command uses: give a folder elsewhere"),
        (["to=same/new"], "which this command uses: give a folder elsewhere"),
        (["to=elsewhere"], "which this command uses: give a folder elsewhere"),
        *[([f"features={name}"], f"features={name}: it has no backbone: take one of clip_") for name in NOT_FEATURES],
        (["features=no_such"], "features=no_such: take one of clip_rn50,"),
        (["keep=maybe"], "keep: "),
        (["held_out=0.001"], " private examples would be held out; on one side are no examples: take another share"),
        (["public=[./few]"], "public=[./few]: 10 images are too few: give 20 or more"),
        (
            ["public=[./same,./several.csv]", "public_labels=given"],
            "public=[./several.csv]: public_labels=given needs public",
        ),
        (
            ["public=null", "pool=[./same]", "public_labels=given"],
            "public_labels=given: examples of a pool have labels",
        ),
        (["private=./flat"], "private=./flat: one class only"),
        (["delta=0.1"], "delta=0.1 is above 1/n = 0.002"),
        (["delta=0.1", "dry=true"], "pubsel: delta=0.1 is above 1/n = 0.002"),
        (["epsilon=0"], "epsilon=0.0: must be greater than 0"),
        (["choice=1"], "choice=1.0: must be less than 1"),
    ],
)
def test_errors_name_keys_of_this_command(words, message, capsys, home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    private = [word.partition("=")[2] for word in words if word.startswith("private")] or ["./mine"]
    code = main(["fit", *private, *WORDS, "results=elsewhere", "to=fresh", *[w for w in words if "private" not in w]])
    assert code in (1, 2)
    err = capsys.readouterr().err
    assert message in err
    assert "pair." not in err.splitlines()[-1]
    assert not list(Path("elsewhere").glob("ledger/*.jsonl"))
    assert not Path("fresh").exists()


REACH = {  # key -> another value, and what it changes in the settings of the run
    "seed": (3, "seed"),
    "budget": (7, "budget"),
    "threads": (2, "threads"),
    "download": ("false", "download"),
    "device": ("cuda", "device"),
    "debug": ("true", "debug"),
    "results": ("r", "results"),
    "data_root": ("d", "data_root"),
    "epsilon": (2.5, "epsilon epsilon_select"),
    "delta": (1e-4, "privacy.delta"),
    "choice": (0.5, "epsilon epsilon_select"),
    "private": ("./other", "pair.private"),
    "public": ("[./b]", "pair.candidates"),
    "held_out": (0.4, "pair.validation"),
    "metric": ("auc", "pair.metric"),
    "unit": ("folder", "pair.unit"),
    "public_labels": ("none", "algorithm.public_labels"),
}


def test_each_setting_reaches_the_run_and_changes_nothing_else():
    def leaves(values, prefix=""):
        if not isinstance(values, dict):
            return {(prefix, str(values))}
        return set().union(*(leaves(value, f"{prefix}.{key}" if prefix else key) for key, value in values.items()))

    def of_run(**changes):
        given = {"private": "./x", "public": "[./a]", "epsilon": 1.0} | changes
        with composed("fit", [f"{key}={value}" for key, value in given.items()]) as values:
            settings = check(FitConfig, values)
        with composed("run", fit.words(settings, "pixels", fit.divided(settings))) as values:
            return leaves(OmegaConf.to_container(values))

    others = {"to", "format", "dry", "keep", "features", "checkpoint", "pool"} | {
        f.name for f in dataclasses.fields(Read)
    }
    assert REACH.keys() | others == {f.name for f in dataclasses.fields(FitConfig)}
    before = of_run()
    changed = {key: {path for path, _ in before ^ of_run(**{key: value})} for key, (value, _) in REACH.items()}
    assert changed == {key: set(paths.split()) for key, (_, paths) in REACH.items()}

    # how files are read reaches the run in one group
    of_reading = {"accept": "[conflict]", "skip": "true", "labels": "fold", "size": 9, "channels": 1, "bits": 12}
    of_reading |= dict.fromkeys(("path", "label", "split", "text"), "column") | {"bounds": "[0,1]", "scale": "none"}
    assert of_reading.keys() == {f.name for f in dataclasses.fields(Read)}
    for key, value in of_reading.items():
        assert {path for path, _ in before ^ of_run(**{key: value})} == {f"pair.read.{key}"}


def test_without_the_packages_of_onnx_nothing_is_spent(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["fit", "./mine", *WORDS, "results=never", "to=fresh", "format=onnx"]) == 1
    assert "format=onnx needs onnx: python -m pip install" in capsys.readouterr().err
    assert not Path("never").exists()


def test_an_encoder_that_onnx_does_not_have_is_refused_before_anything_is_spent(capsys, monkeypatch):
    written = Mock(side_effect=UserError("torch cannot write this network"))
    monkeypatch.setattr(onnx, "check_installed", lambda: None)
    monkeypatch.setattr(onnx, "_written", written)
    words = ["fit", "./mine", *WORDS, "results=never", "to=fresh", "format=onnx"]
    assert main(words) == 1
    assert "torch cannot write this network" in capsys.readouterr().err
    assert not Path("never").exists()
    (of,) = written.call_args.args
    assert of.net(of.inputs["images"]).shape == (3, 3)  # of a head for the three classes
    assert main([*words, "dry=true"]) == 0


@pytest.mark.parametrize("choice", [0.01, 0.05, 0.1, 0.3, 0.999])
def test_parts_of_the_budget_are_not_more_than_the_whole(choice):
    for epsilon in (1e-3, 0.1, 0.3, 0.7, 1, 1.1, 3, 8, 1e3 / 7):
        with composed("fit", ["private=./x", "public=[./a]", f"epsilon={epsilon}", f"choice={choice}"]) as values:
            budget = fit.divided(check(FitConfig, values))
        assert budget.choice + budget.training <= epsilon
        assert budget.choice + budget.training == pytest.approx(epsilon)


# Images that are on several sides


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_side_of_an_image_depends_on_its_pixels_alone(share):
    random = np.random.RandomState(0)
    values = random.randint(-(2**62), 2**62, 4000)
    digests = Digests(values, values)
    held = by_content(digests, share, 0)
    assert held.mean() == pytest.approx(share, abs=0.03)
    some = np.flatnonzero(random.rand(4000) < 0.1)
    assert (by_content(rows(digests, some), share, 0) == held[some]).all()
    other = by_content(digests, share, 1)  # another seed, another share, independent of the first
    assert (other & held).mean() == pytest.approx(share**2, abs=0.03)


@pytest.mark.parametrize("place", ["fit", "measurement.measure"])
def test_a_command_that_is_interrupted_goes_on_and_draws_nothing_twice(place, tmp_path, capsys, monkeypatch):
    words = (f"results={tmp_path}/r", f"to={tmp_path}/release")
    with monkeypatch.context() as patch:
        patch.setattr(f"pubsel.release.run.{place}", interrupted)
        assert main(["fit", "./mine", *WORDS, *words]) == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert not (tmp_path / "release").exists()

    fitted(capsys, *words)
    (lines,) = ledger.ledgers(tmp_path / "r")
    drawn = [line["what"] for line in lines]
    assert (drawn.count("choice"), drawn.count("measurement")) == (1, 1)
    assert drawn.count("training") == 1
    assert {path.name for path in (tmp_path / "release").iterdir()} == FILES


def test_weights_that_are_at_hand_later_make_no_other_release(tmp_path, capsys, monkeypatch):
    draw(tmp_path / "mine", 0, 300)
    for path in (tmp_path / "mine").glob("*/*.png"):
        Image.open(path).convert("RGB").save(path)
    words = [
        "fit",
        str(tmp_path / "mine"),
        "public=null",
        "delta=1e-3",
        f"results={tmp_path}/r",
        f"to={tmp_path}/release",
    ]
    monkeypatch.setattr(fit, "_at_hand", lambda *_: False)
    assert main([*words, "threads=1"]) == 0
    assert "the weights of resnet50_sl are not at hand: features=scattering" in capsys.readouterr().err
    monkeypatch.setattr(fit, "_at_hand", lambda *_: True)
    assert main([*words, "threads=1"]) == 0
    assert "finished before" in capsys.readouterr().err
    assert only_record(tmp_path / "r")["model"] == "scattering"


@pytest.mark.slow
def test_of_two_same_commands_the_second_waits_and_is_content(home):
    """One run, one folder, one epsilon."""
    words = [sys.executable, "-m", "pubsel", "fit", "./mine", *WORDS, "results=twice", "to=of_two"]
    two = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    ((epsilon, _, releases),) = spent("twice")
    assert (round(epsilon, 2), releases) == (4, 3)
    assert {path.name for path in Path("of_two").iterdir()} == FILES
