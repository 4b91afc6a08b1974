"""What a run says it will take, against what it took; and what does not fit is refused before it starts."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from pubsel import algorithms, estimate
from pubsel.config import CONF, SHARED_GPU, Distance, Labels, Parameters, UserError
from pubsel.data import Split, Task
from pubsel.gradients import PerExampleGradients
from pubsel.models import small
from pubsel.training import Schedule, schedule, view_of
from tests.test_training import training

GSD = Distance("gsd", 16, 200, 1, True, Labels.random, Parameters.weights)
NONE = Distance("none", 1, 2, 1, True, Labels.random, Parameters.weights)

# Peak memory above what is loaded, in a process of its own: one step of GEP with p = 61,450 and k = 300.
MEASURE = """
import json, re, torch
from tests.test_estimate import needs, work

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

torch.set_num_threads(1)
work(20)  # what a first step loads stays
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
work(300)
print(json.dumps([status("VmHWM") - before, needs(300).training]))
"""


def task(n=400, side=32):
    x, y = torch.randint(256, (n, 6, side, side), dtype=torch.uint8), torch.randint(10, (n,))
    return Task(Split(x, y), Split(x, y), Split(x, y), 10, "accuracy", (0.5,), (0.5,), ())


def setup(name="gep", **changes):
    torch.manual_seed(0)
    problem = task()
    network = torch.nn.Sequential(Float(), small.linear(6, 32, 32, 10)).eval()
    settings = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    gradients = PerExampleGradients(network)
    view = view_of(network, gradients, problem, "test", Schedule(400, 0.05, 1, 20))
    return gradients, algorithms.build(settings | changes), view, problem


def test_frozen_layers_below_hold_nothing():
    """Their outputs are gone when the next layer has its own."""
    network = torch.nn.Sequential(Float(), *(torch.nn.Conv2d(6, 6, 3, padding=1) for _ in range(10))).eval()
    whole = estimate._activations(network, task().private)
    network[:10].requires_grad_(False)
    image = 4 * 6 * 32 * 32
    assert whole == 11 * image
    assert estimate._activations(network, task().private) == 3 * image


class Float(torch.nn.Module):
    def forward(self, x):
        return x.float() / 255


def needs(k, distance=NONE):
    gradients, algorithm, view, problem = setup(k=k)
    return estimate.memory(gradients, algorithm, view, problem, distance)


def work(k):
    gradients, algorithm, view, problem = setup(k=k)
    plan = schedule(400, training(batch_size=256))
    estimate.step_seconds(gradients, algorithm, view, problem.private, plan, None)


@pytest.mark.slow
def test_estimated_memory_is_near_what_is_taken():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    taken, said = json.loads(done.stdout)
    assert 0.6 < said / taken < 1.7


def test_more_of_anything_takes_more():
    assert needs(40).training > needs(20).training
    assert needs(20, GSD).distance == (200 + 4 * 16) * 61_450 * 4
    small_passes, large_passes = (
        estimate.memory(PerExampleGradients(view.model, chunk), algorithm, view, problem, NONE).passes
        for chunk in (8, 64)
        for _, algorithm, view, problem in [setup(k=20)]
    )
    assert large_passes == 8 * small_passes


@pytest.mark.parametrize(
    ("held", "remedy"),
    [((2**50, 0, 0), r"algorithm\.k"), ((0, 2**50, 0), r"distance\.m"), ((0, 0, 2**50), r"training\.chunk")],
)
def test_what_cannot_fit_is_refused_with_the_setting_to_change(held, remedy):
    with pytest.raises(UserError, match=rf"1048576\.0 GiB of memory and .* free on cpu.*{remedy}"):
        estimate.refuse(estimate.Memory(*held), torch.device("cpu"))
    estimate.refuse(estimate.Memory(0, 0, 0), torch.device("cpu"))


def test_a_cell_that_shares_a_gpu_waits_for_its_memory(monkeypatch, capsys):
    """On a GPU that is made up: 8 GiB, of which the others leave 3, then 5, then 6."""
    left, slept, gpu = [3, 5, 6], [], torch.device("cuda")
    monkeypatch.setattr(estimate, "total", lambda device: 8 * 2**30)
    monkeypatch.setattr(estimate, "free", lambda device: left[0] * 2**30)
    monkeypatch.setattr(estimate, "taken", lambda size, device: size <= left[0] * 2**30)
    monkeypatch.setattr(estimate.time, "sleep", lambda seconds: slept.append((seconds, left.pop(0))))
    needed = estimate.Memory(2 * 2**30, 5 * 2**30, 2**29)
    with pytest.raises(UserError, match=r"5\.5 GiB of memory and 3\.0 GiB are free"):
        estimate.claim(needed, gpu)
    monkeypatch.setenv(SHARED_GPU, "1")
    estimate.claim(needed, gpu)
    assert (left, len(slept)) == ([6], 2)
    assert capsys.readouterr().err == "  waits for 5.5 GiB of cuda, where 3.0 GiB are free\n"
    with pytest.raises(UserError, match=r"6\.5 GiB of the 8\.0 GiB of cuda.*per_gpu=1"):
        estimate.claim(needed._replace(distance=6 * 2**30), gpu)
    with pytest.raises(UserError, match="free on cpu"):
        estimate.claim(needed._replace(distance=6 * 2**30), torch.device("cpu"))


@pytest.mark.gpu
def test_memory_that_is_taken_stays_with_the_process():
    gpu = torch.device("cuda")
    assert not estimate.taken(2 * estimate.total(gpu), gpu)
    before = estimate.free(gpu)
    assert estimate.taken(2**30, gpu)
    assert estimate.free(gpu) <= before - 2**30
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["gep", "dp_sgd", "non_private"])
def test_a_step_is_timed_and_profiled_without_private_examples(name, tmp_path):
    changes = {"k": 20} if name == "gep" else {}
    gradients, algorithm, view, problem = setup(name, **changes)
    private = Split(problem.private.x, problem.private.y)
    before = private.x.clone()
    trace = tmp_path / "trace.json"
    seconds = estimate.step_seconds(gradients, algorithm, view, private, schedule(400, training(batch_size=100)), trace)
    assert seconds > 0
    assert "aten::" in trace.read_text()
    table = (tmp_path / "costliest.txt").read_text().splitlines()
    assert len([line for line in table if "%" in line and "Name" not in line]) == 5
    assert torch.equal(private.x, before)
