"""Sweeps: cells side by side on one machine, and as jobs of a cluster."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import joblib
import psutil
import pytest
import slurm
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pubsel import records
from pubsel.cli import main
from pubsel.commands import sweep
from pubsel.messages import stopped_by_signals
from pubsel.settings.compose import composed
from pubsel.training import workers
from tests.forked import PROCESSES, Command, forked
from tests.synthetic import STATED, record

CELL = """+experiment=quickstart training.epochs=1 epsilon=2 distance=none download=false
    training.batch_size=1297 training.chunk=256 device=cpu""".split()
LONG = "training.epochs=100000"
TWO = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test has started, also where it fails, is ended behind it."""
    yield
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(tmp_path):
                process.kill()


def started(tmp_path: Path, *words: str, **environment: str) -> Command:
    """`pubsel run -m`, whose cells may have as many threads as there are cores for them."""
    return Command(tmp_path, "run", "-m", *CELL, *words, **dict.fromkeys(workers.THREADS), **environment)


def states(tmp_path: Path) -> dict[int, dict]:
    return {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("results/sweeps/*/*.json")}


def wait_for(what, seconds: float = 120):
    """Until `what` returns something true, which is returned."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def steps_of(tmp_path: Path, n: int) -> bool:
    """Whether n runs have begun to train."""
    return sum("epoch" in log.read_text() for log in tmp_path.glob("results/runs/*/log.txt")) >= n


def test_a_sweep_of_processes_states_what_the_best_of_its_runs_costs(tmp_path: Path) -> None:
    folder, names = tmp_path / "sweeps" / "time", ("a", "b")
    for number, name in enumerate(names):
        whole = record() | {"identity": name, "private": "digits", "privacy": STATED}
        records.write_record(tmp_path / "runs" / name / "result.json", whole)
        done = {"state": "done", "seconds": 1, "text": f"{name}: accuracy 90 %", "pid": 1}
        records.write_record(folder / f"{number:04}.json", done)
    sweep.finished.clear()
    sweep.Display(folder, names, 0, 1).look()
    (sentence,) = sweep.best_finished()
    assert "best of these 2 runs on digits, what all of them spend counts: for one example epsilon 4 at" in sentence


@pytest.mark.slow
def test_cells_that_fail_or_are_killed_stop_no_other(tmp_path: Path) -> None:
    process = started(tmp_path, *TWO, f"training.epochs=1,{LONG.split('=')[1]}", "pair.m=100,5000")
    family = wait_for(lambda: psutil.Process(process.pid).children(recursive=True))
    running = wait_for(lambda: [one for n, one in states(tmp_path).items() if n == 2 and steps_of(tmp_path, 2)])
    os.kill(running[0]["pid"], signal.SIGKILL)  # as the kernel does where memory runs out
    assert process.code() == 1, process.err
    out, err = process.out, process.err
    assert out.count("differentially private") == len(list(tmp_path.glob("results/runs/*/result.json"))) == 1
    summary = err.split("pubsel: 3 cells failed:\n")[1].splitlines()
    assert [re.sub(r"\s+", " ", line.split(": ")[0]) for line in summary] == [
        " training.epochs=1 pair.m=5000",
        " training.epochs=100000 pair.m=100",
        " training.epochs=100000 pair.m=5000",
    ]
    assert "use a smaller pair.m" in summary[0]
    assert summary[1].endswith("killed by SIGKILL, perhaps since memory ran out")
    assert "Traceback" not in err
    (folder,) = {path.parent for path in tmp_path.glob("results/sweeps/*/*.json")}
    log = (folder / "0000.log").read_text()
    assert log.startswith("+experiment=quickstart")
    assert "epoch    1.0  loss" in log
    assert out.strip() in log
    record = json.loads(next(tmp_path.glob("results/runs/*/result.json")).read_text())
    assert record["threads"] == max(1, joblib.cpu_count() // 2)
    wait_for(lambda: not alive(family), 20)  # joblib's own last process ends a moment later


@pytest.mark.slow
@pytest.mark.attack
def test_a_worker_that_is_killed_fails_its_cell_alone(tmp_path: Path) -> None:
    """It ended the whole sweep, with exit code 2 and a word about keys."""
    process = started(tmp_path, *TWO, f"training.epochs={LONG.split('=')[1]},1", "seed=0,1")
    running = wait_for(lambda: [one for n, one in states(tmp_path).items() if n == 0 and steps_of(tmp_path, 2)])
    second = states(tmp_path)[1]["pid"]
    worker = psutil.Process(running[0]["pid"]).parent()
    assert worker.pid != process.pid
    worker.kill()  # SIGKILL
    wait_for(lambda: states(tmp_path).get(3, {}).get("state") == "done")  # a new worker has taken its place
    assert psutil.Process(second).is_running()  # the other one goes on
    psutil.Process(second).kill()
    assert process.code() == 1, process.err
    assert process.out.count("differentially private") == 2
    summary = process.err.split("pubsel: 2 cells failed:\n")[1].splitlines()
    assert summary == [
        f"  {LONG} seed=0: its worker was killed, perhaps since memory ran out",
        f"  {LONG} seed=1: killed by SIGKILL, perhaps since memory ran out",
    ]
    assert "--help" not in process.err
    assert states(tmp_path)[0]["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_sweep_that_is_stopped_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    process = started(tmp_path, *TWO, LONG, "seed=0,1,2,3")
    wait_for(lambda: steps_of(tmp_path, 2))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4  # two workers, and a cell of each
    os.kill(process.pid, how)
    code = process.code(60)
    wait_for(lambda: not alive(family), 30)
    if how != signal.SIGKILL:
        assert code == 128 + how
        assert len(list(tmp_path.glob("results/runs/*/log.txt"))) == 2
        for log in tmp_path.glob("results/runs/*/log.txt"):
            assert log.read_text().endswith("interrupted\n")
        assert "resumes from the last checkpoint" in process.err
        assert "Traceback" not in process.err


# Its parts


def meet(folder: Path, name: str, other: str) -> str:
    """Ends once a call of the other name has begun."""
    (folder / name).touch()
    wait_for((folder / other).exists)
    return name


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrong() -> None:
    raise ValueError("no such cell\nand more")


def test_calls_run_side_by_side_and_one_whose_worker_is_killed_is_lost_alone(tmp_path: Path) -> None:
    calls = [(meet, tmp_path, "a", "b"), (meet, tmp_path, "b", "a"), (killed,), (wrong,), (str, 4)]
    lost: list[tuple[int, str]] = []
    start = partial(ProcessPoolExecutor, 1, mp_context=PROCESSES)
    assert workers.run_parallel(calls, 2, start, lambda *what: lost.append(what)) == ["a", "b", None, None, "4"]
    assert sorted(lost) == [(2, "its worker was killed, perhaps since memory ran out"), (3, "ValueError: no such cell")]


def task_of(monkeypatch: pytest.MonkeyPatch, folder: Path, work) -> str | None:
    """What a cell that does `work` says, in a process of its own."""
    config = SimpleNamespace(job=SimpleNamespace(num=7), overrides=SimpleNamespace(task=["seed=1"]))
    monkeypatch.setattr(HydraConfig, "get", lambda: config)
    return sweep.CellTask(lambda _: work(), folder, apart=True)(DictConfig({}))


@pytest.mark.parametrize(
    ("work", "state", "text"),
    [
        (lambda: print("accuracy"), "done", "accuracy"),
        (lambda: "no such file", "failed", "no such file"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "failed", "killed by SIGKILL, perhaps since memory ran out"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "failed", "killed by SIGTERM"),
        (lambda: sys.exit(3), "failed", "ended with exit code 1"),
    ],
    ids=["done", "failed", "no memory", "crash", "exit"],
)
def test_the_end_of_a_cell_is_known_however_it_ends(monkeypatch, tmp_path, work, state: str, text: str) -> None:
    failure = task_of(monkeypatch, tmp_path, work)
    found = json.loads((tmp_path / "0007.json").read_text())
    assert (found["state"], found["text"].split(": see")[0]) == (state, text)
    assert failure == (None if state == "done" else found["text"])
    assert (tmp_path / "0007.log").read_text().startswith("seed=1\n")


def hold(folder: Path) -> None:
    """In a process of its own: a cell that goes on and on; its process is noted."""

    def work() -> None:
        (folder / "part").write_text(str(os.getpid()))
        (folder / "part").rename(folder / "pid")
        time.sleep(300)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stopped_by_signals():
        sweep._forked(work, folder / "log", "a cell")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_a_cell_ends_with_the_process_that_started_it(tmp_path: Path, how: signal.Signals) -> None:
    worker = forked(hold, tmp_path)
    wait_for((tmp_path / "pid").exists)
    cell = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(worker.pid, how)
    worker.join(60)
    assert worker.exitcode == (-how if how == signal.SIGKILL else 1)
    wait_for(lambda: not alive([cell]), 60)


def test_a_state_that_is_cut_short_is_no_state(tmp_path: Path, capsys) -> None:
    view = sweep.Display(tmp_path, ["a", "b", "c"], 0, 2)
    (tmp_path / "0000.json").write_text('{"state": "do')
    view.look()
    assert view.states == {}
    (tmp_path / "0000.json").write_text('{"state": "done", "seconds": 2.0, "text": "good"}')
    (tmp_path / "0001.json").write_text('{"state": "running", "seconds": 0, "text": ""}')
    view.look()
    view.look()
    assert view.summary() == "1 of 3 done, 1 running, 0 failed, about 2 s left"
    (tmp_path / "0001.log").write_text("b\n  epoch 3\n")
    assert [[str(cell) for cell in column._cells] for column in view.table().columns][2:] == [["b"], ["epoch 3"]]
    view.lose(1, "job 5 was killed")
    view.lose(0, "not that")
    assert view.failed() == ["b: job 5 was killed"]
    assert capsys.readouterr().out == "good\n"


def test_workers_take_gpus_in_turn(tmp_path: Path) -> None:
    """Three at a time on two GPUs: none twice before all once; the place of one that has died is taken again."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom pubsel.training import workers\n"
        "workers.join(Path(sys.argv[1]), os.getppid(), ['0', 'GPU-x'])\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\nsys.stdin.read()"
    )

    def worker() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code, tmp_path], text=True, stdin=-1, stdout=-1)
        assert process.stdout is not None
        process.gpu = process.stdout.readline().strip()  # type: ignore[attr-defined]
        return process

    workers = [worker() for _ in range(3)]
    assert [one.gpu for one in workers] == ["0", "GPU-x", "0"]  # type: ignore[attr-defined]
    workers[1].kill()
    workers[1].wait()
    workers[1] = worker()
    assert workers[1].gpu == "GPU-x"  # type: ignore[attr-defined]
    for one in workers:
        one.communicate("")


@pytest.mark.parametrize(("given", "found"), [("", []), ("2,GPU-1", ["2", "GPU-1"]), ("-1", [])])
def test_gpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch, given: str, found: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert workers.visible_gpus() == found


LISTINGS = {
    "GPU 0: NVIDIA H100 (UUID: GPU-a)\n": ["0"],
    "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n" for i in range(8)): [str(i) for i in range(8)],
    "GPU 0: NVIDIA A100 (UUID: GPU-a)\n  MIG 3g.20gb Device 0: (UUID: MIG-1)\n  MIG 3g.20gb Device 1: (UUID: MIG-2)\n"
    "GPU 1: NVIDIA A100 (UUID: GPU-b)\n": ["MIG-1", "MIG-2", "1"],
    "No devices were found\n": [],
    None: [],
}


@pytest.mark.parametrize(
    ("listing", "devices"), LISTINGS.items(), ids=["one", "eight", "two parts and a whole", "none", "no nvidia-smi"]
)
def test_gpus_and_parts_of_gpus_are_listed_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listing: str | None, devices: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if listing is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '%s' '{listing}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert workers.visible_gpus() == devices


# A cluster

submitit = pytest.importorskip("submitit")
STEPS = ["training.epochs=40", "training.checkpoint_seconds=0", "threads=1", "pair.m=100"]


def record_of(folder: Path) -> dict:
    """The one record below, without what every run has differently."""
    (path,) = folder.glob("**/runs/*/result.json")
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in ("seconds", "finished", "commit")}


def uninterrupted(tmp_path: Path) -> dict:
    whole = Command(tmp_path, "run", *CELL, *STEPS, "results=whole")
    assert whole.code() == 0, whole.err
    return record_of(tmp_path / "whole")


def stop(tmp_path: Path, before: int) -> int:
    """Send the signal of preemption to a job, not `before`, once it has trained a step that none did; its process."""

    def running() -> list[int]:
        return [s["pid"] for s in states(tmp_path).values() if s["state"] == "running" and s["pid"] != before]

    (job,) = wait_for(running)
    checkpoints = list(tmp_path.glob("results/runs/*/checkpoint.pt"))
    seen = checkpoints[0].stat().st_mtime_ns if checkpoints else 0
    wait_for(lambda: [p for p in tmp_path.glob("results/runs/*/checkpoint.pt") if p.stat().st_mtime_ns != seen])
    os.kill(job, signal.SIGUSR2)
    return job


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """PATH with a Slurm of stand-ins."""
    (tmp_path / "slurm").mkdir()
    slurm.install(tmp_path / "slurm")
    return {"PATH": f"{tmp_path / 'slurm'}{os.pathsep}{os.environ['PATH']}"}


def test_slurm_is_asked_for_what_the_settings_say(
    cluster: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", cluster["PATH"])
    scripts: list[str] = []
    ended = SimpleNamespace(return_value=None)

    def map_array(self, job: object, *arguments: list) -> list[SimpleNamespace]:
        scripts.append(self._executor._make_submission_file_text("command", "name"))
        return [SimpleNamespace(done=lambda: True, exception=lambda: None, result=lambda: ended) for _ in arguments[0]]

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", map_array)
    launcher = """hydra/launcher=submitit_slurm hydra.launcher.partition=gpu hydra.launcher.gpus_per_node=2
        hydra.launcher.mem_gb=7 hydra.launcher.timeout_min=90 +hydra.launcher.additional_parameters.mail-type=END"""
    assert main(["run", "-m", *CELL, "seed=0,1", *launcher.split()]) == 0
    (script,) = scripts
    for asked in """partition=gpu gpus-per-node=2 mem=7GB time=90 mail-type=END signal=USR2@120
        job-name=pubsel cpus-per-task=8""".split():
        assert f"#SBATCH --{asked}\n" in script


@pytest.mark.slow
def test_a_run_that_is_preempted_three_times_ends_with_the_same_record(tmp_path: Path, cluster: dict[str, str]) -> None:
    process = started(tmp_path, "hydra/launcher=submitit_slurm", *STEPS, **cluster)
    job = 0
    for _ in range(3):
        job = stop(tmp_path, job)
    assert process.code(300) == 0, process.err
    assert process.out.count("differentially private") == 1
    (known,) = wait_for(lambda: [job for job in slurm.jobs(tmp_path / "slurm").values() if job["state"] == "COMPLETED"])
    assert known["requeued"] == 3
    assert record_of(tmp_path / "results") == uninterrupted(tmp_path)
    log = next(tmp_path.glob("results/runs/*/log.txt")).read_text()
    assert log.count("interrupted") == 3


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_too_often_fails_its_cell_alone(tmp_path: Path, cluster: dict) -> None:
    limits = ("hydra.launcher.timeout_min=1", "hydra.launcher.max_num_timeout=1", "training.epochs=100000,1")
    process = started(tmp_path, "hydra/launcher=submitit_slurm", *STEPS, *limits, **cluster)
    wait_for(lambda: states(tmp_path).get(1, {}).get("state") == "done")
    job = 0
    for _ in range(2):
        job = stop(tmp_path, job)
    assert process.code(300) == 1
    assert process.out.count("differentially private") == 1
    (failed,) = process.err.split("pubsel: 1 cells failed:\n")[1].splitlines()
    why = "Job not requeued because: timed-out too many times"
    assert failed == f"  training.epochs=100000: {why}: raise hydra.launcher.max_num_timeout or timeout_min"


@pytest.mark.slow
def test_jobs_of_submitit_on_this_machine(tmp_path: Path) -> None:
    process = started(tmp_path, "hydra/launcher=submitit_local", "pair.m=100,5000")
    assert process.code(300) == 1
    assert process.out.count("differentially private") == 1
    (failed,) = process.err.split("pubsel: 1 cells failed:\n")[1].splitlines()
    assert failed.startswith("  pair.m=5000: pair.m=5000: digits has only 500 images")


def test_without_slurm_it_says_so(tmp_path: Path) -> None:
    process = started(tmp_path, "hydra/launcher=submitit_slurm", "seed=0,1", PATH="")
    assert process.code() == 1
    why = 'Could not detect "srun", are you indeed on a slurm cluster?'
    assert process.err == f"pubsel: hydra/launcher=submitit_slurm: {why}\n"


def test_a_worker_imports_what_its_cell_uses() -> None:
    def late(words: str) -> set[str]:
        with composed("run", words.split()) as values:
            return {*sweep.late_imports(values)} & {"timm", "torch._dynamo"}

    assert late("+experiment=pillar_ours") == set()
    assert late("+experiment=pillar_ours training.optimizer=adam") == {"torch._dynamo"}
    assert late("+experiment=gep_cifar10") == {"timm", "torch._dynamo"}
    with composed("attack", []) as values:
        assert {"timm", "torch._dynamo"} <= {*sweep.late_imports(values)}
