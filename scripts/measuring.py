"""Seconds and memory of some work, in processes that have computed nothing before; and the CSV that they go into."""

import argparse
import csv
import ctypes
import gc
import importlib.metadata
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pubsel import records
from pubsel.cli import keep_memory
from pubsel.messages import UserError
from pubsel.settings.outputs import Output, output

Run = Callable[[], object]

PROCESSES = multiprocessing.get_context("forkserver")  # of a server that has imported, and computed nothing
PROCESSES.set_forkserver_preload(
    ["opacus", "backpack.extensions", "dp_accounting.pld", "torchvision.models.resnet", "pubsel.training.loop"]
)


def seconds(run: Run) -> float:
    """Return the seconds of one run: of the processor if a single thread works, since other programs hardly change
    these, otherwise of the clock."""
    gpu = torch.cuda.is_initialized()
    synchronise: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
    clock = time.process_time if torch.get_num_threads() == 1 and not gpu else time.perf_counter
    synchronise()
    start = clock()
    run()
    synchronise()
    return clock() - start


def peak_mib(run: Run) -> float:
    """Return MiB above the level before: of the GPU where it is used, else resident, by the kernel's own high-water
    mark."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    start = _status("VmRSS")
    run()
    return (_status("VmHWM") - start) / 2**10


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key + ":")))


def _prepare(threads: int, keep: bool) -> None:
    if keep:
        keep_memory()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # hooks of opacus and BackPACK


def process(threads: int, keep: bool = True) -> ProcessPoolExecutor:
    """Return a process that has computed nothing before. keep: with huge pages and kept memory, as pubsel's command
    has."""
    return ProcessPoolExecutor(1, PROCESSES, initializer=_prepare, initargs=(threads, keep))


def fresh(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments) in such a process."""
    with process(threads) as pool:
        return pool.submit(function, *arguments).result()


def origin(device: str, threads: int) -> dict[str, Any]:
    """Return where it was measured: columns for every row."""
    here = records.provenance()
    cpu = f"{here['hardware']}, {torch.backends.cpu.get_cpu_capability()}"  # its vectors, such as AVX2
    hardware = torch.cuda.get_device_name() if device == "cuda" else cpu
    versions = {name: importlib.metadata.version(name) for name in ("torch", "opacus")}
    versions["backpack"] = importlib.metadata.version("backpack-for-pytorch")
    return {"device": device, "threads": threads, "hardware": hardware} | versions | {"commit": here["commit"]}


def target(to: str) -> Output:
    """Return the file of an option --to, for argparse; an error of the command line if it cannot be written."""
    try:
        return output(to)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write(to: Output, rows: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """Write rows, each with where it was measured, as a CSV."""
    with to.open() as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows(row | where for row in rows)
