"""What a run will take, before it takes it: memory by counting, time by one step on random images.

No private example is read here, only how many there are and what shape they have.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn

from pubsel.algorithms import Algorithm, Mechanism, View
from pubsel.config import SHARED_GPU, Distance, UserError
from pubsel.data import Split, Task
from pubsel.gradients import Engine
from pubsel.randomness import stream
from pubsel.terminal import say
from pubsel.training import Schedule, noisy_mean

MOST = 0.75  # of a GPU that cells share, for one of them
WAIT_SECONDS = 5


class Memory(NamedTuple):
    """Bytes that a run holds at once beside what is loaded already, by what holds them."""

    training: int  # gradients and bases
    distance: int
    passes: int  # of one chunk through the network

    @property
    def peak(self) -> int:
        return self.passes + max(self.training, self.distance)


def memory(gradients: Engine, algorithm: Algorithm, view: View, task: Task, distance: Distance) -> Memory:
    """Bytes for a run on `task`, from the sizes of what is held; activations from one forward pass of two images."""
    chunk = gradients.chunk(task.private.x)
    item = next(view.model.parameters()).element_size()
    measured = _distance(gradients, task, distance) if task.public is not None else 0
    vectors = chunk + 6  # rows; float64 sum and noise, direction, momentum
    return Memory(
        training=(algorithm.numbers(view) + vectors * gradients.size) * item,
        distance=measured * item,
        passes=2 * _activations(view.model, task.private) * chunk,  # outputs, and gradients at them
    )


def _distance(gradients: Engine, task: Task, distance: Distance) -> int:
    """Numbers that measuring the distance holds: of gsd and dp_gsd, G and four bases; of the others, the examples of
    both sides and four matrices [m, m], in float64."""
    match distance.name:
        case "none":
            return 0
        case "gsd" | "dp_gsd":
            return (distance.m + 4 * distance.k) * gradients.size
        case _:
            return 4 * distance.m * (task.private.x[0].numel() + 2 * distance.m)


def free(device: torch.device) -> int:
    """Bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def refuse(needs: Memory, device: torch.device) -> None:
    """UserError, with the setting to change, where `needs` is more than the device has free."""
    available = free(device)
    if needs.peak <= available:
        return
    held = needs._asdict()
    remedy = {
        "training": "lower algorithm.k, if it has one, or training.chunk, or take a smaller model",
        "distance": "lower distance.m, or set distance=none",
        "passes": "lower training.chunk",
    }[max(held, key=lambda part: held[part])]
    raise UserError(
        f"this run needs about {gib(needs.peak)} of memory and {gib(available)} are free on {device}: {remedy} "
        "(estimate=false starts it all the same)"
    )


def claim(needs: Memory, device: torch.device) -> None:
    """`refuse`, where this process has the device to itself. Among cells of a sweep that share a GPU: take the memory,
    and wait until the others leave enough. UserError where a cell has no room beside others: what those who wait hold
    already might then be lacking for ever."""
    if device.type != "cuda" or SHARED_GPU not in os.environ:
        return refuse(needs, device)
    if needs.peak > MOST * total(device):
        raise UserError(
            f"this run needs about {gib(needs.peak)} of the {gib(total(device))} of {device}: too much to share it; "
            "set hydra.launcher.per_gpu=1 (estimate=false starts it all the same)"
        )
    waits = False
    while not taken(needs.peak, device):
        if not waits:
            say(f"  waits for {gib(needs.peak)} of {device}, where {gib(free(device))} are free")
        waits = True
        time.sleep(WAIT_SECONDS)


def total(device: torch.device) -> int:
    """Bytes of a GPU."""
    return torch.cuda.mem_get_info(device)[1]


def taken(size: int, device: torch.device) -> bool:
    """Take so many bytes of a GPU for this process, for which torch keeps them; False where they are not free. Of two
    processes that want the same memory one has it."""
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def step_seconds(
    gradients: Engine, algorithm: Algorithm, view: View, private: Split, plan: Schedule, trace: Path | None
) -> float:
    """Seconds that a step will take: its public part, and random images in place of the private batch.

    private: read for its shape alone. trace: a file for torch's profiler to write the same step to, in Chrome's format;
    the five costliest parts go to costliest.txt beside it.
    """
    device = next(view.model.parameters()).device
    source = stream("estimate", "images")
    made: list[Mechanism] = []

    def public() -> None:
        made[:] = [algorithm.mechanism(view, 0)]

    seconds = _seconds(public, device)
    mechanism = made[0]
    rows = min(max(mechanism.rows, gradients.chunk(private.x)), plan.batch_size)
    x = torch.from_numpy(source.integers(256, size=(rows, *private.x.shape[1:]))).to(device, private.x.dtype)
    y = torch.zeros(rows, *private.y.shape[1:], dtype=private.y.dtype, device=device)

    def block() -> None:
        noisy_mean(mechanism, gradients, Split(x, y), 1.0, source, rows)

    seconds += _seconds(block, device) * plan.batch_size / rows
    if trace is not None:
        with torch.profiler.profile() as profiler:
            public()
            block()
        profiler.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=5, max_name_column_width=40)
        trace.with_name("costliest.txt").write_text(table)
    return seconds


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of the second of two calls, or of a long first one: a first call is slower."""
    taken = 0.0
    for _ in range(2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - began
        if taken > 5:
            break
    return taken


def _activations(model: nn.Module, private: Split) -> int:
    """Bytes for one image of all layers' outputs from the first trained layer on, and of the largest two below it."""
    held: list[int] = []
    below: list[int] = [0, 0]
    layers = [module for module in model.modules() if not list(module.children())]

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            trains = held or any(p.requires_grad for p in module.parameters())
            (held if trains else below).append(output.numel() * output.element_size())

    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            model(torch.zeros(2, *private.x.shape[1:], dtype=private.x.dtype, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return (sum(held) + sum(sorted(below)[-2:])) // 2
