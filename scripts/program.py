"""How long the program itself takes: its start, going on after a kill, a sweep, a table of many records.

`make bench-program` writes results/program.csv. Each row: what, the median seconds, of how many runs, and the goal.
Nothing else should run meanwhile; the sweep takes about five minutes (ARGS="--cells 20": half a minute).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import measuring

from pubsel import records

PUBSEL = str(Path(sys.executable).with_name("pubsel"))
RUN = ["run", "+experiment=quickstart", "distance=none"]
TAB = {"COMP_LINE": "pubsel run algorithm=no", "COMP_POINT": "23"}
TORCH = """import time; start = time.time()
import torch; there = time.time()
torch.optim.SGD([torch.ones(1)], 1.0); print(there - start, time.time() - there)"""
RECORDS, WORKERS = 10_000, 2


def command(*words: str) -> float:
    """Return seconds of a whole `pubsel` command."""
    began = time.perf_counter()
    done = subprocess.run([PUBSEL, *words], capture_output=True, text=True, env=os.environ | TAB)
    if done.returncode:
        raise RuntimeError(f"pubsel {' '.join(words)}: {done.stderr[-500:]}")
    return time.perf_counter() - began


def to_a_step(folder: Path) -> float:
    """Return seconds from the start of a run, or of one that goes on, to the checkpoint behind its next step. It is
    killed."""
    found = list(folder.glob("runs/*/checkpoint.pt"))
    before = found[0].stat().st_mtime_ns if found else 0
    began = time.time()
    process = subprocess.Popen(
        [PUBSEL, *RUN, "training.checkpoint_seconds=0", f"results={folder}"],
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    try:
        while process.poll() is None:
            for path in folder.glob("runs/*/checkpoint.pt"):
                if path.stat().st_mtime_ns > before:
                    return path.stat().st_mtime - began
            time.sleep(0.002)
        raise RuntimeError(f"{' '.join(RUN)} ended before its first step")
    finally:
        process.kill()
        process.wait()


def start() -> dict[str, float]:
    """Return seconds to the first step, to the next one after a kill, and what of each is torch's."""
    found = subprocess.run([sys.executable, "-c", TORCH], check=True, capture_output=True, text=True).stdout.split()
    of_torch, of_optimizer = map(float, found)
    with tempfile.TemporaryDirectory() as folder:
        first, again = to_a_step(Path(folder)), to_a_step(Path(folder))
    return {
        "import torch": of_torch,
        "first optimizer of torch (it imports torch._dynamo)": of_optimizer,
        "pubsel run, to the first step": first,
        "pubsel run, to the first step, beyond importing torch": first - of_torch,
        "pubsel run, to the first step, beyond importing torch and torch._dynamo": first - of_torch - of_optimizer,
        "pubsel run, to the next step after SIGKILL": again,
    }


def table() -> float:
    """Return seconds of `pubsel table` on RECORDS records."""
    record = json.loads(next(Path("results/records").glob("fashion_mnist*.json")).read_text())
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(RECORDS):
            name = f"{record['identity']}-{seed}"
            settings = record["settings"] | {"seed": seed}
            path = Path(folder) / "runs" / name / "result.json"
            path.parent.mkdir(parents=True)
            records.write_record(path, record | {"identity": name, "seed": seed, "settings": settings})
        return command("table", "gsd_table2", f"results={folder}")


def sweep(cells: int) -> tuple[float, float]:
    """Return seconds of a sweep of cells that train for about a second; and those of the cells, over the workers."""
    settings = ["training.epochs=1", "threads=1", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={WORKERS}"]
    with tempfile.TemporaryDirectory() as folder:
        seeds = ",".join(map(str, range(cells)))
        whole = command(RUN[0], "-m", *RUN[1:], f"seed={seeds}", *settings, f"results={folder}")
        done = list(Path(folder).glob("runs/*/result.json"))
        assert len(done) == cells, f"{len(done)} of {cells} cells have a record"
        inside = [path.stat().st_mtime - path.with_name("settings.json").stat().st_mtime for path in done]
    return whole, sum(inside) / WORKERS


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200, help="of the sweep")
    parser.add_argument("--runs", type=int, default=5, help="of all else")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def row(what: str, seconds: list[float], goal: str) -> None:
        figures = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        texts = {key: f"{value:.3g}" for key, value in figures.items()}
        rows.append({"what": what, **texts, "runs": len(seconds), "goal": goal})
        print("  ".join(map(str, rows[-1].values())), flush=True)

    def repeated(what: Callable[[], float]) -> list[float]:
        return [what() for _ in range(given.runs)]

    row("pubsel --help", repeated(lambda: command("--help")), "0.4 s")
    row("Tab completion", repeated(lambda: command("-sc", "query=bash")), "0.4 s")
    starts = [start() for _ in range(given.runs)]
    for what in starts[0]:
        row(what, [found[what] for found in starts], "4 s" if "beyond" in what else "")
    row(f"pubsel table, {RECORDS} records", repeated(table), "5 s")
    whole, ideal = sweep(given.cells)
    row(f"sweep of {given.cells} cells, {WORKERS} workers", [whole], f"1.3 x {ideal:.0f} s = {1.3 * ideal:.0f} s")
    measuring.write(measuring.target("results/program.csv"), rows, measuring.origin("cpu", WORKERS))


if __name__ == "__main__":
    main()
