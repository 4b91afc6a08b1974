"""The command line as a person uses it: in a folder of their own, without the data of the papers."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import pubsel
import pubsel.release.run
from pubsel.cli import ENDED_BY_PIPE
from pubsel.files import whole
from tests.made import Cli, done, failed, interrupted, write_npz

pytestmark = pytest.mark.usefixtures("folder")
SCRIPT = Path(sys.executable).parent / "pubsel"
POISSON = ["+experiment=quickstart", "training.epochs=1", "epsilon=2", "distance=none", "download=false"]
TINY = [*POISSON, "training.batch_size=1297", "training.chunk=256", "threads=1"]  # one step; a full
# batch is quick to account for
COMMANDS = [*pubsel.cli.COMMANDS]


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    """The installed console script in a process of its own."""
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, timeout=300)


def records() -> list[Path]:
    return sorted(Path("results").glob("*/*/result.json"))


def run_folders() -> list[Path]:
    """Run folders in which anything lies that was computed."""
    kept = ("lock", "settings.json", "log.txt")
    return sorted({path.parent for path in Path("results").glob("runs/*/*") if path.name not in kept})


# A session


def test_a_session_of_a_new_user(cli: Cli) -> None:
    version, (code, shown, _) = typed("--version"), cli()
    assert (version.returncode, version.stdout) == (0, f"{pubsel.__version__}\n")
    assert (code, shown.count("pubsel run +experiment=quickstart ")) == (2, 1)

    first, _ = done(cli, "run", *POISSON)
    (path,) = records()
    record = json.loads(path.read_text())
    low, high = record["utility_interval"]
    assert low < record["utility"] < high
    shown = f"accuracy {100 * record['utility']:.2f} % [{100 * low:.2f}, {100 * high:.2f}] on 300 test examples. "
    assert first.startswith(f"{record['identity']}: {shown}")
    assert f"are ({record['privacy']['epsilon']:.4g}, 1e-05)-differentially private" in first
    assert 1.9 < record["privacy"]["epsilon"] <= 2
    assert not list(path.parent.glob("checkpoint*"))

    written = path.stat().st_mtime_ns
    assert cli("run", *POISSON) == (0, first, f"{record['identity']}: finished before\n")
    assert path.stat().st_mtime_ns == written
    assert sorted(os.listdir()) == ["results"]  # and nothing else came to lie in the user's folder


def test_a_sweep_goes_on_where_it_stopped(cli: Cli) -> None:
    assert cli("run", *TINY, "seed=1")[0] == 0
    out, err = done(cli, "run", "-m", *TINY, "seed=0,1")
    assert [line.count("differentially private") for line in out.splitlines()] == [1, 1]
    assert err.count("finished before") == 1
    code, same, err = cli("run", "-m", *TINY, "seed=0,1")
    assert (code, same) == (0, out)
    assert err.count("finished before") == 2
    assert len(records()) == 2
    counts = (
        "the best of these 2 runs on digits, what all of them spend counts: for one example epsilon 4 at delta 2e-05"
    )
    assert counts in err.splitlines()[-1]


def test_the_cells_of_a_sweep_that_can_run_do_run(cli: Cli) -> None:
    code, out, err = cli("run", "-m", *TINY, "pair.m=5000,100")
    assert code == 1
    assert out.count("differentially private") == len(records()) == len(run_folders()) == 1
    end = err.splitlines()[-2:]
    assert end[0] == "pubsel: 1 cells failed:"
    assert "pair.m=5000" in end[1]
    assert "use a smaller pair.m" in end[1]
    assert "Traceback" not in err


def test_public_sets_can_be_combined_also_in_a_sweep(cli: Cli) -> None:
    words = [*TINY, "distance=gsd_m200", "distance.initialisations=1", "distance.k=8"]
    out, err = done(cli, "run", "-m", *words, "pair.public=[noise,photo_patches],noise")
    shown = [line.split("-mnist_cnn-")[0] for line in out.splitlines()]
    assert shown == ["digits-noise+photo_patches", "digits-noise"]
    both, one = (json.loads(path.read_text()) for path in records() if path.parts[1] == "runs")
    assert (both["public"], one["public"]) == ("noise+photo_patches", "noise")
    assert both["settings"]["pair"]["public"] == ["noise", "photo_patches"]
    assert len(both["distance"]["values"]) == 1
    assert both["distance"]["identity"].startswith("digits-noise+photo_patches-")
    code, _, err = cli("run", *words, "pair.public=[noise,photo_patches]")
    assert (code, err) == (0, f"{both['identity']}: finished before\n")


def test_rank_takes_combinations_as_candidates(cli: Cli) -> None:
    black = (np.zeros((90, 8, 8), np.uint8), np.zeros(90, np.uint8))
    write_npz("a.npz", black, black)
    words = ["private=digits", "model=digits_cnn", "distance.m=100", "distance.initialisations=1"]
    out, _ = done(cli, "rank", *words, "public=[digits,[digits,noise],[noise,./a.npz]]")
    assert re.findall(r"^\S+", out, re.MULTILINE)[2:5] == ["digits", "digits+noise", "noise+./a.npz"]
    assert cli("rank", *words, "public=[[digits,noise]]")[0] == 0


def test_rank_orders_candidates_and_remembers(cli: Cli) -> None:
    words = ["private=digits", "model=digits_cnn", "distance.m=100", "distance.initialisations=2"]
    out, err = done(cli, "rank", *words, "public=[digits,noise]")
    assert out.index("\ndigits") < out.index("\nnoise")
    assert "not differentially private" in out
    code, same, err = cli("rank", *words, "public=[digits,noise]")
    assert (code, same) == (0, out)
    assert "measured before" in err
    code, out, _ = cli("rank", *words, "public=noise")  # a single candidate needs no brackets
    assert code == 0
    assert "Only one candidate" in out


def test_rank_takes_other_distances_and_says_what_they_cost_and_read(cli: Cli) -> None:
    words = ["private=digits", "model=digits_cnn", "public=[digits,noise]", "distance.m=100"]
    for distance, title, read in (
        ("gsd", "GSD to digits (mnist_cnn, k = 16, m = 100)", "random labels"),
        ("task2vec", "Task2Vec to digits", "images and labels, through gradients"),
        ("otdd", "OTDD to digits (mnist_cnn, m = 100)", "images, as pixels or features, and labels"),
        ("otdd_exact", "OTDD to digits", "and labels"),
        ("frechet", "Fréchet distance to digits", "images, as features"),
        ("mmd", "MMD^2 to digits", "images, as features"),
        ("whitening", "Whitening distance to digits", "images, as features, and labels, through sums"),
    ):
        out, _ = done(cli, "rank", *words, f"distance={distance}", "distance.initialisations=1")
        assert out.startswith(title)
        assert f"{read}. Per network: " in out
        assert "not differentially private" in out
    found = [json.loads(path.read_text()) for path in Path("results").rglob("ranks/*/result.json")]
    assert len(found) == 7
    assert [row["public"] for row in next(r for r in found if r["distance"] == "whitening")["order"]].count("none") == 1
    for record in found:
        assert record["seconds_candidate"] > 0 < record["seconds_private"]
        assert ("k" in record) == ("raw" in record) == (record["distance"] == "gsd")
    assert not list(Path("results").rglob("candidates-*"))


def test_rank_of_equal_candidates_shows_a_tie(cli: Cli) -> None:
    part = [np.random.RandomState(0).randint(0, 5, shape, np.uint8) for shape in ((90, 8, 8), 90)]
    for name in "ab":
        write_npz(f"{name}.npz", part, part)
    words = ["private=digits", "model=digits_cnn", "distance.m=80", "distance.initialisations=2"]
    for distance in ("gsd", "task2vec", "otdd", "frechet", "mmd"):
        out, _ = done(cli, "rank", *words, "public=[./a.npz,./b.npz]", f"distance={distance}")
        assert "in 0 of 2, equal in 2" in out, out


def test_rank_on_features(cli: Cli) -> None:
    """model=pixels: the images themselves, as a backbone's features would be."""
    words = ["private=digits", "public=[digits]", "model=pixels", "distance.m=100", "distance.initialisations=1"]
    for distance in ("gsd", "mmd"):
        out, err = done(cli, "rank", *words, f"distance={distance}")
        assert "(pixels, " in out
    code, _, err = cli("rank", *words, "model.architecture=resnet18")
    assert (code, "model.architecture: with model.backbone" in err) == (2, True)


def test_run_measures_any_distance_once(cli: Cli) -> None:
    words = [*TINY, "pair.public=digits", "pair.m=100", "distance.m=100", "distance.initialisations=2"]
    for distance in ("otdd", "mmd"):
        _, err = done(cli, "run", *words, f"distance={distance}")
        assert len(re.findall(r"initialisation \d: ", err)) == 2
    _, err = done(cli, "run", *words, "distance=mmd", "seed=1")
    assert "initialisation" not in err  # measured for the other seed
    found = [json.loads(path.read_text()) for path in records() if path.parts[1] == "runs"]
    assert sorted(record["distance"]["name"] for record in found) == ["mmd", "mmd", "otdd"]
    assert len({record["distance"]["identity"] for record in found}) == 2


def test_data_check_says_what_is_read(cli: Cli) -> None:
    x = 50 * np.arange(5)[:, None, None, None] * np.ones((5, 4, 5, 3), np.uint8)
    x[4] = x[0]
    x = x.astype(np.uint8)
    np.savez("of_two.npz", train_images=x[:4], train_labels=[0, 0, 1, 1], test_images=x[4:], test_labels=[0])
    assert cli("data", "check", "./of_two.npz")[1].splitlines() == [
        "./of_two.npz: 4 training and 1 test images of 4x5x3, 2 classes, measured by accuracy",
        "of these, 3 training and 1 test images remain: see below",
        "training images of a class: 2 to 2",
        "./of_two.npz: train was sorted by class, shuffled by content",
        "warning: ./of_two.npz: 1 training images that are test images too left the private data",
        "warning: ./of_two.npz: classes with fewer than 50 training images may be lost in the noise: 0 has 1, 1 has 2",
        "warning: ./of_two.npz: classes without a test image, which are not measured: 1",
    ]


def test_help_and_cfg_teach_and_run_nothing(cli: Cli) -> None:
    for command, words in (
        ("run", ["+experiment=quickstart", "algorithm=NAME", "b_gep", "algorithm.clip_embedding=10", "result.json"]),
        ("predict", ["pubsel predict NAME ./new_images", "to=answers.csv", "model.json"]),
        ("export", ["pubsel export NAME to=./model", "anyway=false", "privacy.html"]),
        ("rank", ["pubsel rank private=digits", "distance=NAME", "dp_gsd, frechet", "convert=resize"]),
        ("attack", ["pubsel attack loss run=NAME", "trials=5", "pubsel table gsd_table8"]),
        ("audit", ["pubsel audit +experiment=quickstart", "audit.canaries=1000"]),
        ("table", ["pubsel table gsd_table2", "results=results"]),
        ("make", ["pubsel make pillar_ours hydra/launcher=joblib", "dry=false"]),
        ("figure", ["pubsel figure pillar_k", "points=null"]),
        ("report", ["pubsel report results=", "to=null"]),
        ("runs", ["pubsel runs show NAME", "action=list"]),
        ("data", ["pubsel data prepare", "PUBSEL_DATA"]),
        ("models", ["pubsel models dinov2", "pattern=null", "checkpoint=FILE"]),
        ("pool", ["pubsel pool pool=[./embeddings]", "shard=null", "img_emb/*.npy"]),
    ):
        out, _ = done(cli, command, "--help")
        assert out.startswith(f"pubsel {command}")
        for word in words:
            assert word in out, (command, word)
        assert "Hydra" not in out
    assert cli("--help") == cli("help") == (0, cli()[1], "")
    out, _ = done(cli, "run", "--cfg", "job", "+experiment=quickstart", "epsilon=7.5")
    assert "epsilon: 7.5\n" in out
    assert "private: digits\n" in out
    assert os.listdir() == []


def test_a_linear_cell_imports_nothing_that_it_has_no_use_for(tmp_path: Path) -> None:
    """Networks, tables, and what compiles: most of the seconds of a cell of 30 steps were their imports."""
    words = "pair=digits_digits model=pixels distance=none training=pillar training.steps=30 device=cpu".split()
    code = (
        "import sys\n"
        "from pubsel.cli import main\n"
        f"assert main(['run', *{words}, 'algorithm=dp_sgd', 'results={tmp_path}']) == 0\n"
        "unused = 'timm torchvision torch._dynamo sklearn pandas matplotlib joblib opacus'.split()\n"
        "assert sys.modules.keys().isdisjoint(unused), sys.modules.keys() & set(unused)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    """And help imports nothing else that computes."""
    code = (
        "import sys\n"
        "from pubsel.cli import main\n"
        "for words in ('runs', 'data list', 'export --help', 'run --help', 'run --help training=adamix'):\n"
        "    assert main(words.split()) == 0\n"
        "    assert ('hydra' in sys.modules) == (words.startswith('run '))\n"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'matplotlib', 'joblib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "commands = ('--help', 'table gsd_table2', 'make --help', 'figure nothing', 'run --cfg job', 'run epsilon=0')\n"
        "for words in commands:\n"
        "    assert main(words.split()) == (2 if 'epsilon' in words or 'nothing' in words else 0)\n"
        "    assert 'torch' not in sys.modules, words\n"
        "import pubsel.settings.command_line, pubsel.papers.join\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# What goes wrong


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["train"], 2, ["train", ", ".join(COMMANDS)]),
        (["run", "--epsilon", "4"], 2, ["--epsilon", "key=value"]),
        (["run", "epsilon"], 2, ["'epsilon'", "key=value"]),
        (["run", "pair.public=[a"], 2, ["pair.public=[a", "quote"]),
        (["run", "epsilonn=1"], 2, ["epsilonn", "--help"]),
        (["run", "seed=0,1"], 2, ["seed=0,1", "--multirun"]),
        (["run", "epsilon=0"], 2, ["epsilon=0", "greater than 0"]),
        (["run", "label=null"], 2, ["label", "None"]),
        (["run", "+experiment=nope"], 2, ["experiment/nope", "quickstart", "gep_cifar10"]),
        (["run", "algorithm=nope"], 2, ["algorithm/nope", "dp_sgd", "gep"]),
        (["run", "--help", "algorithm=nope"], 2, ["algorithm/nope", "dp_sgd", "gep"]),
        (["run", *TINY, "pair.unit="], 2, ["pair.unit is empty: give the column that names people"]),
        (["run", "algorithm=null"], 2, ["override"]),
        (["run", *TINY, "training=5"], 2, ["Got int: each group takes the name of an option"]),
        (["run", *TINY, "training.augment=flip"], 2, ["training.augment: not a list: write [A] or [A,B]"]),
        (["run", "~algorithm"], 2, ["algorithm=NAME"]),
        (["run", "-m", "model=probe,nope"], 2, ["model/nope", "resnet20"]),
        (["run", "pair.private=./mine"], 2, ["pair.private=./mine: give its public data too, pair.public=NAME"]),
        (["audit", "pair.private=digits", "epsilon=1"], 2, ["give its public data too"]),
        (["run", *TINY, "training.epoch=1"], 2, ["unknown key training.epoch (did you mean training.epochs?)"]),
        (["run", *TINY, "pair.private=cifar11"], 2, ["cifar11", "cifar10", "path"]),
        (["run", *TINY, "pair.private=cifar10"], 1, ["cifar10", "pubsel data prepare cifar10", "data_root="]),
        (["run", *TINY, "algorithm.k=500", "pair.m=100"], 2, ["algorithm.k=500", "pair.m=100", "lower"]),
        (["run", *TINY, "pair.m=501"], 2, ["pair.m=501", "smaller pair.m"]),
        (["run", *TINY, "pair.private=corrupt.npz"], 1, ["corrupt.npz", "prepare it again"]),
        (["run", *TINY, "pair.public=other.npz"], 1, ["other.npz", "images"]),
        (["run", *TINY, "pair.private=absent.npz"], 1, ["absent.npz", "no such file"]),
        (["run", *TINY, "pair.private=./empty"], 1, ["empty", "no images"]),
        (["run", *TINY, "model=pixels", "model.trained=[head]"], 2, ["model.trained", "model.backbone"]),
        (["run", *TINY, "model=pixels", "model.once=true"], 2, ["model.once", "model.backbone"]),
        (["run", *TINY, "model.lora={layers:[fc],r:0,alpha:8}"], 2, ["model.lora.r", "at least 1"]),
        (["run", *TINY, "results=a_file/x"], 1, ["a_file/x", "results="]),
        (["run", "-m", *TINY, "seed=0,1", "results=a_file/x"], 1, ["a_file/x", "permissions"]),
        (["rank"], 2, ["private", "private=..."]),
        (["rank", "private=digits"], 2, ["public", "public=..."]),
        (["rank", "private=digits", "public=[[noise,mnist],[noise,mnist]]"], 2, ["public=[...]", "once"]),
        (["rank", "private=digits", "public=[[noise,noise],digits]"], 2, ["public=[noise,noise]", "once"]),
        (["rank", "private=digits", "public=[null,noise]"], 2, ["public=[null]", "a name or path"]),
        (["rank", "private=digits", "public=noise", "distance=none"], 2, ["distance=none", "distance=gsd"]),
        (["rank", "private=digits", "public=noise", "results=a_file/x"], 1, ["a_file/x", "results="]),
        (["table"], 2, ["table", "table=..."]),
        (["runs", "-m"], 2, ["nothing to sweep over"]),
        (["runs", "show", "x", "++action"], 2, ["'++action'", "key=value"]),
        (["table", "gsd_table2", "epsilon=1"], 2, ["epsilon: no setting of this command;"]),
        (["rank", "private=digits", "public=noise", "epsilon=1"], 2, ["command (did you mean epsilon_select?)"]),
        (["fit", "a", "public=b,c"], 2, ["'public=b,c': for several, public=[A,B]"]),
        (["fit", "a", "public=[b,[c]"], 2, ["cannot read", "both kinds of quotes"]),
        (["fit", "a", "epsilon=four"], 2, ["epsilon: Value 'four'"]),
        (["run", "like=absent"], 1, ["absent: no such file"]),
        (["table", "nope"], 2, ["nope", "gsd_table2"]),
        (["data"], 2, ["list", "prepare NAME"]),
        (["data", "fetch"], 2, ["fetch", "prepare NAME"]),
        (["data", "prepare"], 2, ["name", "cifar10"]),
        (["data", "check"], 2, ["name=...", "a path"]),
        (["data", "check", "./empty"], 1, ["empty", "no images"]),
        (["data", "prepare", "cifar11"], 2, ["cifar11", "cifar10"]),
    ],
    ids=lambda value: " ".join(word for word in value if word not in TINY) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_in_one_line(cli: Cli, words: list[str], code: int, expected: list[str]) -> None:
    Path("a_file").write_text("")
    Path("corrupt.npz").write_bytes(b"PK\x03\x04 and no more")
    np.savez("other.npz", x=np.zeros(3))
    Path("empty").mkdir()
    got, out, err = cli(*words)
    assert got == code, err
    assert err.startswith("pubsel: ")
    assert len(err.splitlines()) == 1, err
    assert out == ""
    for word in expected:
        assert word in err
    assert records() == run_folders() == []


@pytest.mark.parametrize(
    ("part", "overrides", "words"),
    [
        ("test", [], "the test set has one"),
        ("train", ["algorithm=dp_sgd", "pair.validation=0.5"], "pair.validation=0.5 has one"),
    ],
)
def test_auc_of_one_class_is_refused_before_training(cli: Cli, part: str, overrides: list[str], words: str) -> None:
    both = np.random.default_rng(0).integers(256, size=(800, 8, 8), dtype=np.uint8)
    labels = {name: np.tile([[0, 1], [1, 1]], (200, 1)) for name in ("train", "test")}
    labels[part][:] = (0, 1)
    write_npz("labels.npz", (both[:400], labels["train"]), (both[400:], labels["test"]))
    err = failed(cli, "run", *TINY, "pair.private=labels.npz", *overrides, code=1)
    assert f"pubsel: AUC needs examples of at least two classes, {words}" in err.splitlines()[-1]
    assert "epoch" not in err
    assert "steps" not in err  # nothing was accounted for either
    assert run_folders() == []


def test_the_interval_of_a_run_is_the_same_whenever_it_is_trained(cli: Cli) -> None:
    assert cli("run", *TINY, "results=one")[0] == cli("run", *TINY, "results=two")[0] == 0
    one, two = (json.loads(next(Path(folder).glob("runs/*/result.json")).read_text()) for folder in ("one", "two"))
    assert one["utility_interval"] == two["utility_interval"]
    assert cli("run", *TINY, "results=two")[1] == cli("run", *TINY, "results=one")[1]
    del one["utility_interval"]  # as older records are
    next(Path("one").glob("runs/*/result.json")).write_text(json.dumps(one))
    out, _ = done(cli, "run", *TINY, "results=one")
    assert f"{100 * one['utility']:.2f} % on 300 test examples" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(cli: Cli) -> None:
    err = failed(cli, "run", *TINY, "device=cuda")
    assert err == "pubsel: device=cuda: no CUDA device is available here; use device=cpu or device=auto\n"
    assert run_folders() == []


@pytest.mark.parametrize(
    ("overrides", "code", "expected"),
    [
        (["model=resnet20", "model.name=nope"], 2, ["model.name=nope", "resnet20"]),
        (["algorithm=adadps", "pair.public=[digits,noise]"], 2, ["public labels of the private task"]),
        (
            ["algorithm=dp_sgd", "training.epochs=3", "training.learning_rate=1e38"],
            1,
            ["diverged", "lower training.learning_rate"],
        ),
    ],
)
def test_a_run_that_fails_ends_with_one_line_and_leaves_no_record(
    cli: Cli, overrides: list[str], code: int, expected: list[str]
) -> None:
    err = failed(cli, "run", *TINY, *overrides, code=code)
    assert [line for line in err.splitlines() if line.startswith("pubsel: ")] == err.splitlines()[-1:]
    for word in expected:
        assert word in err.splitlines()[-1]
    assert records() == []
    if code == 2:  # nothing was started
        assert run_folders() == []


def test_debug_shows_where(cli: Cli) -> None:
    code, _, err = cli("run", *TINY, "debug=true", "pair.private=absent.npz")
    assert code == 1
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("pubsel: absent.npz: ")


def test_an_interrupted_run_says_how_to_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsel.release.run, "fit", interrupted)
    code, out, err = cli("run", *TINY)
    assert (code, out) == (130, "")
    assert "resumes from the last checkpoint" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
@pytest.mark.parametrize("words", ["rank private=a public=b", "fit a", "pool", "export a to=b"])
def test_a_signal_to_stop_cleans_up(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, how: signal.Signals
) -> None:
    command = words.split()[0]

    def stopped(_: object) -> None:
        with whole(tmp_path / "b", folder=True):
            os.kill(os.getpid(), how)
            time.sleep(10)

    monkeypatch.setitem(pubsel.cli.COMMANDS, command, stopped)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    code, _, err = cli(*words.split())
    assert (code, list(tmp_path.glob(".b*"))) == (128 + how, [])
    assert ("resumes" in err) == (command in ("fit", "pool"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        ("--version", ">/dev/full", 1),
        ("nope", "2>/dev/full", 2),
        ("--version", ">/dev/full 2>/dev/full", 1),
        ("--version", "<&- >&- 2>&-", 0),
        ("nope", "<&- >&- 2>&-", 2),
        ("--version", "2>&-", 0),
    ],
)
def test_streams_that_are_closed_or_full_change_no_exit_code(words: str, streams: str, code: int) -> None:
    command = f"{sys.executable} -m pubsel {words} {streams}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    full = "pubsel: a file or standard output: No space left on device: make room"
    assert done.stderr.startswith(full) == (streams == ">/dev/full")


def test_nothing_is_printed_into_a_file_that_has_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pubsel import cli; cli.main = lambda: os.dup2(os.open('a', 65), 3) and "
        "(os.write(2, b'of a library'), print('x'), 0)[2]; cli.entry()"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(f"exec {shlex.join(command)} <&- >&- 2>&-", shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "a").read_bytes() == b""


def test_without_download_the_network_is_not_asked(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import open_clip
    import timm

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asked"))
    failed: list[str] = []

    def ask(_: object) -> None:
        for question in (
            lambda: urllib.request.urlopen("http://127.0.0.1:9/a"),
            lambda: torch.hub.load_state_dict_from_url("http://127.0.0.1:9/b", "weights"),
            lambda: timm.create_model("resnet10t", pretrained=True),
            lambda: open_clip.create_model("RN50", pretrained="openai", cache_dir="weights"),
            lambda: huggingface_hub.hf_hub_download("a/b", "c", cache_dir="weights"),
        ):
            with pytest.raises((OSError, RuntimeError)):
                question()
            failed.append("")

    monkeypatch.setitem(pubsel.cli.COMMANDS, "rank", ask)
    assert cli("rank", "private=digits", "public=[noise]", "download=false")[0] == 0
    assert len(failed) == 5
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_closed_pipe_ends_a_command_silently() -> None:
    command = [sys.executable, "-m", "pubsel", "--help"]
    for words in (command, [*command[:-1], "figure", "--help"]):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == ENDED_BY_PIPE


def test_commands_in_the_help_of_rank_run(cli):
    """Those that need no files of the reader."""
    _, said, _ = cli("rank", "--help")
    lines = [line.split() for line in said.splitlines() if "pubsel rank private=digits" in line]
    assert len(lines) == 4
    for words in lines:
        given = [word for word in words[2:] if "=" in word]
        done(cli, "rank", *given, "distance.m=100", "distance.initialisations=1")


# Tab

ASK = """
eval "$(pubsel -sc install=bash)"
complete -p pubsel
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE}
    COMP_WORDS=($COMP_LINE)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    hydra_bash_completion
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes() -> None:
    expected = {
        "pubsel r": "run rank report runs",
        "pubsel run algo": "algorithm. algorithm=",
        "pubsel run algorithm=no": "algorithm=noisy_sgd algorithm=non_private",
    }
    environment = {**os.environ, "PATH": f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", *expected], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.stderr == ""
    rule, *answers = done.stdout.splitlines()
    assert rule.endswith("-F hydra_bash_completion pubsel")
    assert answers == list(expected.values())


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("pubsel ", COMMANDS),
        ("pubsel run", ["run", "runs"]),
        ("pubsel nope ", []),
        ("pubsel run pair=digits", ["pair=digits_digits"]),
        ("pubsel run -m +experiment=quickstart  pair.pub", ["pair.public=", "pair.public_share="]),
        ("pubsel run +experiment=qui", ["+experiment=quickstart"]),
        ("pubsel run bad=[ al", []),
        ("pubsel rank private=digits pub", ["public="]),
        ("pubsel attack ", ["gsd_white_box", "gsd_black_box", "loss"]),
        ("pubsel attack loss ru", ["run="]),
        ("pubsel table gsd_table2", ["gsd_table2"]),
        ("pubsel make gsd_f", ["gsd_figure4"]),
        ("pubsel make gsd_table13", ["gsd_table13a", "gsd_table13b"]),
        ("pubsel make gsd_table1 dr", ["dry="]),
        ("pubsel figure gsd_fig", ["gsd_figure1", "gsd_figure3"]),
        ("pubsel data ", ["list", "prepare", "check", "forget"]),
        ("pubsel data prepare cifar", ["cifar10", "cifar100", "cifar10_1"]),
    ],
)
def test_what_tab_offers(cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, choices: list[str]) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    code, out, err = cli("-sc", "query=bash")
    assert (code, out.split(), err) == (0, choices, "")
