"""Workers: processes that share calls on one machine, with its cores and GPUs divided. Imports no torch."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from pubsel.files import hold

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
GRACE = 10.0  # seconds that a worker has to clean up when it is stopped

_place: list[object] = []  # of this worker, held as long as it lives


# In the process of a worker


def leave_to_parent() -> None:
    """Ignore what a terminal sends to all of its processes: the parent gets it too, and ends its children by
    SIGTERM."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies, however it does (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # it is dead already


def join(folder: Path, parent: int, gpus: Sequence[str]) -> None:
    """Make this process a worker: it dies with its parent, and takes the first free place and the GPU of that place,
    before torch is imported."""
    # a worker must not outlive the sweep, nor end before its cell has cleaned up
    die_with_parent(parent)
    leave_to_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    place = 0
    while not _place:
        lock = hold(folder / f"worker{place}.lock")
        if lock is None:
            place += 1
        else:
            _place.append(lock)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: of one that is divided (MIG), its
    parts. They are listed without torch: a process that has touched CUDA cannot be forked."""
    # the user's choice of GPUs comes first
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []

    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    devices: list[list[str]] = []
    for line in listing.stdout.splitlines():
        if line.startswith("GPU "):
            devices.append([str(len(devices))])
        elif (part := re.search(r"\bMIG .*\(UUID: (\S+)\)", line)) and devices:
            devices[-1] = [*(name for name in devices[-1] if name.startswith("MIG-")), part[1]]
    return [name for names in devices for name in names]


# In the process that leads them


def places_for(
    folder: Path, calls: int, most: int | None, device: str, threads: int | None
) -> tuple[int, Callable[[], Any]]:
    """Return the number of workers for `calls` calls, at least one, and a function that makes the pool of one worker
    (`run_parallel`).

    There is one for each GPU, or without a GPU for each `threads` cores, but not more than calls, nor than `most`. Each
    has its part of the cores, and a place in `folder`. threads: of each worker; None: its part of the cores.
    """
    import joblib
    from joblib.externals.loky.process_executor import ProcessPoolExecutor

    gpus = [] if device == "cpu" else visible_gpus()
    places = len(gpus) or max(1, joblib.cpu_count() // (threads or 1))
    workers = max(1, min(most or places, calls))
    part = str(max(1, joblib.cpu_count() // workers))
    environment = {name: os.environ.get(name, part) for name in THREADS}
    return workers, partial(
        ProcessPoolExecutor, 1, initializer=join, initargs=(folder, os.getpid(), gpus), env=environment
    )


def run_parallel(
    calls: Sequence[tuple[Any, ...]], workers: int, start: Callable[[], Any], lost: Callable[[int, str], None]
) -> list[Any]:
    """Return the result of each call (a function and its arguments), `workers` at a time; None for one that is lost.

    start: makes a pool of one process. Each worker has its own pool, so that one that is killed takes no other with it:
    its call is lost(place, why), and a new one takes its place.
    """
    # a thread for each worker hands out the cells in order
    waiting, results = deque(enumerate(calls)), [None] * len(calls)
    pools, over = set[Any](), threading.Event()

    def begin(pool: Any, call: tuple[Any, ...]) -> tuple[Any, Any]:
        with contextlib.suppress(BrokenProcessPool):  # killed while it had nothing to do
            if pool is not None:
                return pool, pool.submit(*call)
        pools.discard(pool)
        pool = start()
        pools.add(pool)
        return pool, pool.submit(*call)

    def work() -> None:
        pool = None
        while waiting and not over.is_set():
            with contextlib.suppress(IndexError):  # another thread took the last one
                place, call = waiting.popleft()
                try:
                    pool, result = begin(pool, call)
                    results[place] = result.result()
                except KeyboardInterrupt:
                    return  # of a worker that was stopped
                except BrokenProcessPool:
                    lost(place, "its worker was killed, perhaps since memory ran out")
                except Exception as error:
                    lost(place, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        if pool is not None:
            pool.shutdown()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # Each worker ends its cell as Ctrl-C would; what has not ended after a while is killed.
        over.set()
        for pool in list(pools):
            for worker in list(pool._processes or ()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGTERM)
        until = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0, until - time.monotonic()))
        for pool in list(pools):
            pool.shutdown(wait=False, kill_workers=True)
        raise
    return results
