"""One run on several processes: what they train together is what one trains alone, whatever happens to one of them."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from test_faults import die, replaced
from test_split import images, network
from torch import nn

from pubsel import algorithms
from pubsel.algorithms import Solves, View
from pubsel.cli import main
from pubsel.commands import list_runs
from pubsel.data import Split, Task
from pubsel.gradients.factored import LinearGradients
from pubsel.gradients.matrix import PerExampleGradients
from pubsel.messages import UsageError, UserError
from pubsel.models import small
from pubsel.models.layers import split
from pubsel.privacy import randomness
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import schedule
from pubsel.settings import CONF
from pubsel.settings.keys import Lora
from pubsel.settings.methods import option
from pubsel.training import loop, parallel, torchrun
from pubsel.training.loop import ONE_PROCESS, Job, fit
from pubsel.training.parallel import places_in_share, share
from tests.forked import forked
from tests.made import Scaled, build, training
from tests.synthetic import secret_named

WORDS = """+experiment=quickstart training.epochs=20 pair.private_share=0.3 training.batch_size=1000 training.chunk=64
    pair.m=100 distance=none download=false threads=1 training.checkpoint_seconds=0 device=cpu""".split()
STEPS = 6


# Processes


def together(target: Callable[..., None], *arguments: Any, size: int = 2) -> list[int]:
    """Exit codes of `size` processes that do `target`, each in the environment that torchrun would give it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [forked(placed, rank, size, port, target, arguments) for rank in range(size)]
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes  # type: ignore[return-value]


def placed(rank: int, size: int, port: int, target: Callable[..., None], arguments: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    target(*arguments)


# The loop


class Watching:
    """An algorithm that notes in each process, by its number, the weights that it sees, and what comes of `act`."""

    def __init__(self, name: str, folder: Path, act: Callable[[int, Any], None] | None = None):
        self.inner = build(name, **({"k": 6, "power_iterations": 2} if name == "gep" else {}))
        self.folder, self.act = folder, act

    def mechanism(self, view: View, step: int) -> algorithms.Mechanism:
        weights = torch.cat([p.detach().flatten() for p in view.model.parameters()]).numpy().tobytes().hex()
        with (self.folder / f"weights{torchrun.place()[0]}").open("a") as file:
            file.write(f"{step} {weights}\n")
        made = self.inner.mechanism(view, step)
        if self.act is not None:
            self.act(step, made)
        return made


def trained(folder: Path, name: str, act: Callable | None = None, secure: bool = False, rate: float = 0.3) -> list:
    """Weights after STEPS steps by this process and those that help it, and the losses that it showed."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    net = small.linear if name == "gep" else small.mnist_cnn  # where a layer's gradients span less than k, rounding
    model = nn.Sequential(Scaled(torch.float64), net(1, 16, 16, 3)).double().eval()  # decides what else the basis spans
    x, y = torch.randint(256, (61, 1, 16, 16), dtype=torch.uint8), torch.randint(3, (61,))
    task = Task(Split(x[:47], y[:47]), Split(x[47:], y[47:]), Split(x, y), 3, "accuracy", (0.5,), (0.5,), ())
    settings = training(batch_size=round(rate * 47), learning_rate=0.3, milestones=[], checkpoint_seconds=0)
    plan = schedule(47, settings)._replace(steps=STEPS)
    seen: list[float] = []

    def keep(now: loop.Progress) -> None:
        if now.step % round(1 / rate) == 0:  # the end of an epoch
            seen.append(now.loss)

    with parallel.processes() as processes:
        watching: Any = Watching(name, folder, act)
        job = Job(watching, plan, 0.5, settings, "name", folder / "checkpoint.pt")
        fit(model, task, job, secret_named("key", secure), keep, processes=processes)
    return [torch.cat([p.detach().flatten() for p in model.parameters()]), torch.tensor(seen)]


def shared(folder: Path, *arguments: Any) -> None:
    """`trained` by several processes; the first writes the result, or the error, into the folder."""

    def work() -> int:
        try:
            torch.save(trained(folder, *arguments), folder / "trained.pt")
        except UserError as error:
            (folder / "error").write_text(str(error))
        return 0

    sys.exit(parallel.assist() if torchrun.place()[0] else parallel.lead(work))


def drift(step: int, made: algorithms.Mechanism) -> None:
    """What rounding does on GPUs, enlarged: each process has another basis."""
    for values in made.shared:
        values += torchrun.place()[0] * torch.randn(values.shape, dtype=values.dtype)


@pytest.mark.parametrize(
    ("name", "size", "rate", "act"),
    [("dp_sgd", 2, 0.3, None), ("dp_sgd", 3, 1.0, None), ("gep", 2, 0.3, drift), ("adadps", 3, 0.3, drift)],
)
def test_several_processes_train_what_one_does(tmp_path: Path, name: str, size: int, rate: float, act) -> None:
    """Up to the order of a sum of float64 numbers, with the same sample and noise; and all have the same weights."""
    want, losses = trained(tmp_path / "one", name, None, False, rate)
    (tmp_path / "all").mkdir()
    assert together(shared, tmp_path / "all", name, act, False, rate, size=size) == [0] * size
    found = torch.load(tmp_path / "all" / "trained.pt")
    torch.testing.assert_close(found[0], want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found[1], losses, rtol=1e-9, atol=1e-11)
    seen = [(tmp_path / "all" / f"weights{rank}").read_text() for rank in range(size)]
    assert len(set(seen)) == 1
    assert len(set(seen[0].split()[1::2])) == STEPS


def test_an_example_lies_in_one_process_and_is_summed_there() -> None:
    private = Split(torch.arange(47), torch.arange(47) % 3)
    chosen = loop.poisson_sample(stream("test", "sample"), 47, 0.4)
    for size in (2, 3, 5):
        parts = [share(private, rank, size).x for rank in range(size)]
        assert sorted(torch.cat(parts).tolist()) == list(range(47))
        found = [parts[rank][places_in_share(chosen, rank, size)] for rank in range(size)]
        assert sorted(torch.cat(found).tolist()) == chosen.tolist()


def entropy_of_the_leader(folder: Path) -> None:
    """`shared` with noise of the operating system, where only the first process may ask it; its answers are fixed."""
    drawn = iter(range(1000))
    leads = torchrun.place()[0] == 0
    randomness.SystemEntropy = lambda: stream("fixed", "entropy", next(drawn)) if leads else 1 / 0  # type: ignore
    shared(folder, "dp_sgd", None, True)


def test_secure_samples_and_noise_are_the_leaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(1000))
    monkeypatch.setattr(randomness, "SystemEntropy", lambda: stream("fixed", "entropy", next(drawn)))
    want = trained(tmp_path / "one", "dp_sgd", None, True)[0]
    (tmp_path / "all").mkdir()
    assert together(entropy_of_the_leader, tmp_path / "all") == [0, 0]
    torch.testing.assert_close(torch.load(tmp_path / "all" / "trained.pt")[0], want, rtol=1e-9, atol=1e-11)


# Faults


def fail(step: int, made: algorithms.Mechanism, rank: int) -> None:
    if step == 3 and torchrun.place()[0] == rank:
        raise ValueError("the tensor is broken")


def three_in_turn(folder: Path) -> None:
    """As cells of a sweep: one in which a helper fails, one in which the leader does, and one that comes to its end."""

    def work() -> int:
        for rank, kind in ((1, UserError), (0, ValueError)):
            with pytest.raises(kind, match="the tensor is broken") as caught:
                trained(folder / f"{rank}", "dp_sgd", partial(fail, rank=rank))
            (folder / f"{rank}.txt").write_text(str(caught.value))
        torch.save(trained(folder / "good", "dp_sgd"), folder / "trained.pt")
        return 0

    sys.exit(parallel.assist() if torchrun.place()[0] else parallel.lead(work))


def test_a_failure_in_any_process_is_told_by_the_first_and_stops_no_later_cell(tmp_path: Path) -> None:
    assert together(three_in_turn, tmp_path) == [0, 0]
    assert (tmp_path / "1.txt").read_text() == "process 1 of 2: ValueError: the tensor is broken"
    want = trained(tmp_path / "one", "dp_sgd")[0]
    torch.testing.assert_close(torch.load(tmp_path / "trained.pt")[0], want, rtol=1e-9, atol=1e-11)


def command(folder: Path, fault: Callable[[], None] | None = None) -> None:
    """`pubsel run` in `folder`, with a fault. All that is said goes to files."""
    os.chdir(folder)
    sink = os.open(f"said{torchrun.place()[0]}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if fault is not None:
        fault()
    code = main(["run", *WORDS])
    sys.stdout.flush()
    os._exit(code)


def at_call(place: str, call: int, rank: int, act: Callable[..., None]) -> None:
    """In one process, the n-th call of module.name does `act` first."""
    if torchrun.place()[0] == rank:
        replaced(place, call, act)


def broken(*_: object) -> None:
    raise MemoryError("no memory is left")


break_helper = partial(at_call, "pubsel.training.parallel.clipped_sum", 4, 1, broken)
kill_helper = partial(at_call, "pubsel.training.parallel.clipped_sum", 4, 1, die)
kill_leader = partial(at_call, "pubsel.training.loop.noisy_mean", 4, 0, die)


def record(folder: Path) -> dict:
    """The one record, without what each run has differently."""
    (path,) = folder.glob("results/runs/*/result.json")
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in ("seconds", "finished", "commit")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The record of two processes to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    assert together(command, folder) == [0, 0]
    return record(folder)


def test_a_run_goes_on_whichever_process_failed(tmp_path: Path, whole: dict) -> None:
    """One run: a helper fails, a helper is killed, the leader is killed; each time no record, and then the record."""
    for fault, codes, state, said in (
        (break_helper, [1, 0], "failed", "process 1 of 2: MemoryError: no memory is left"),
        (kill_helper, [1, -signal.SIGKILL], "failed", "another process of torchrun has died"),
        (kill_leader, [-signal.SIGKILL, 1], "unfinished", ""),
    ):
        assert together(command, tmp_path, fault) == codes
        (folder,) = tmp_path.glob("results/runs/*/")
        found = list_runs.look(folder)
        assert (found.state, found.record.get("utility")) == (state, None)
        assert said in found.why + found.state
        assert said in (tmp_path / "said0").read_text()
        assert "Traceback" not in "".join((tmp_path / f"said{i}").read_text() for i in (0, 1))
    assert "in broken\n" in (folder / "log.txt").read_text()  # of the traceback
    assert together(command, tmp_path) == [0, 0]
    assert record(tmp_path) == whole
    assert whole["processes"] == 2


def test_what_is_wrong_with_the_settings_ends_all(tmp_path: Path) -> None:
    assert together(wrong, tmp_path) == [2, 0]
    assert (tmp_path / "said").read_text() == "pubsel: unknown key typo; pubsel run --help lists them\n"


def wrong(folder: Path) -> None:
    with (folder / "said").open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        code = main(["run", "typo=1"])
    os._exit(code)


@pytest.mark.slow
def test_torchrun_itself(tmp_path: Path, whole: dict) -> None:
    """Its leader is killed; no process is left; the same command in two processes ends with the record of a run that
    nothing happened to, and one process alone finds it finished."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pubsel"]
    process = subprocess.Popen([*words, "run", *WORDS], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "2 processes, each with its part" not in process.stderr.readline():
        assert process.poll() is None
    while not any(torch.load(path)["step"] > 2 for path in tmp_path.glob("results/runs/*/checkpoint.pt")):
        assert process.poll() is None  # the first epoch is over
        time.sleep(0.01)
    family = psutil.Process(process.pid).children()
    next(one for one in family if one.environ()["RANK"] == "0").kill()
    process.communicate(timeout=60)
    assert process.returncode == 1
    psutil.wait_procs(family, 10)
    assert not any(one.is_running() for one in family)
    assert not list(tmp_path.glob("results/runs/*/result.json"))
    assert together(command, tmp_path) == [0, 0]
    assert "epoch    1.0" not in (tmp_path / "said0").read_text()  # it went on
    assert record(tmp_path) == whole
    assert together(command, tmp_path, size=1) == [0]
    assert "finished before" in (tmp_path / "said0").read_text()


# Its parts


def test_the_environment_counts_only_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, rank, place in (("1", "0", (0, 1)), ("4", "3", (3, 4)), ("4", "", (0, 1)), ("", "", (0, 1))):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", rank)
        assert torchrun.place() == place
        assert (parallel.processes() is ONE_PROCESS) == (place[1] == 1)


def test_torchrun_is_for_run_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["audit", *WORDS]) == 2
        assert capsys.readouterr().err.count("pubsel: torchrun is for pubsel run alone") == lines
    from hydra_plugins.pubsel_launchers import Joblib

    with pytest.raises(UsageError, match="leave hydra/launcher out"):
        Joblib(None).prepared(None, [[]], True)


def linear(seed: int) -> View:
    """What an algorithm sees of features; the public ones depend on the seed, the weights do not."""
    torch.manual_seed(0)
    model = nn.Linear(9, 4)
    torch.manual_seed(seed)
    public = Split(torch.randn(30, 9), torch.arange(30) % 4)
    source = partial(stream, str(seed))
    return View(model, LinearGradients(model), public, 4, False, source, same_task=True)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml")))
def test_a_mechanism_shares_all_that_its_sum_owes_to_public_data(name: str) -> None:
    """Two views of other public data sum alike once one has the shared tensors of the other."""
    algorithm = build(name, **({"k": 5} if "k" in option("algorithm", name) else {}))
    if isinstance(algorithm, Solves) or algorithm.sensitivity() == 0:
        pytest.skip("it takes no step")
    one, two = (algorithm.mechanism(linear(seed), 0) for seed in (1, 2))
    for values, others in zip(one.shared, two.shared, strict=True):
        others.copy_(values)
    torch.manual_seed(3)
    x, y = torch.randn(20, 9), torch.arange(20) % 4
    sums = [made.clipped_sum(LinearGradients(linear(1).model).matrix(x, y)) for made in (one, two)]
    assert torch.equal(*sums)


@pytest.mark.parametrize(
    ("name", "once"),
    [("resnet18", False), ("resnet18", True), ("densenet121", True), ("vit_tiny_patch16_224", False)],
)
def test_a_network_arrives_as_it_was_sent(name: str, once: bool) -> None:
    """Its outputs, and what trains, in the same order."""
    lora = {"trained": None, "lora": Lora(["qkv"], 2, 2.0)} if name.startswith("vit") else {}
    net, (x, _) = network(name, **lora, options={"img_size": 32, "depth": 2}) if lora else network(name), images()
    if once:
        below, net = split(net, x)
        x = below(x)
    view = View(net, PerExampleGradients(net), None, 5, False, lambda what, step: stream("k", what, step))
    names = list(view.gradients.offsets)
    job = parallel.Assignment(parallel._placed(view, torch.device("cpu")), names, None, "name", None, "cpu", 1, [])  # type: ignore[arg-type]
    found, _ = parallel._unpacked(pickle.loads(pickle.dumps(job)), Split(x, x))
    assert torch.equal(found.model(x), net(x))
    assert found.gradients.offsets == view.gradients.offsets


def test_a_process_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    job = SimpleNamespace(threads=1, device="cuda")
    with pytest.raises(UsageError, match="process 7 of this machine has no GPU, there are 4"):
        parallel._unpacked(job, Split(torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]


def test_large_examples_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PIECE", 100)
    values = torch.arange(70, dtype=torch.float32).view(10, 7)
    pieces = parallel._pieces(values)
    assert [len(piece) for piece in pieces] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(pieces), values)
    assert parallel._pieces(values[:0]) == ()
