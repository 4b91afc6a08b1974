"""Every path of the program on a pretended CUDA device (tests/pretend_cuda.py): nothing meets a tensor of the wrong
device, and the host waits for no step."""

import contextlib
import copy
import io
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict
from pretend_cuda import Log, pretended
from torch.utils._python_dispatch import TorchDispatchMode

from pubsel import algorithms, cell, models
from pubsel.algorithms import gep
from pubsel.algorithms.dp_sgd import clipped_sum
from pubsel.cli import main
from pubsel.commands import sweep
from pubsel.data import Split, Task
from pubsel.files import sent
from pubsel.gradients import book_keeping, matrix, per_example
from pubsel.gradients.book_keeping import BookKeeping, KeptInputs, LayeredGradients
from pubsel.gradients.factored import FactoredGradients
from pubsel.gradients.matrix import Basis, DenseGradients, PerExampleGradients, Slots, add_products, gpu_precision
from pubsel.gradients.subspace import cholesky_qr, orthonormal
from pubsel.privacy.accountant import ROUNDING
from pubsel.privacy.randomness import stream
from pubsel.privacy.sampling import Schedule, poisson_sample
from pubsel.settings import CONF
from pubsel.settings.keys import Augment, Device, Model
from pubsel.settings.schema import check
from pubsel.training import loop, parallel
from tests.made import interrupted, training, write_npz
from tests.synthetic import secret_named

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one: pytest -m gpu")

QUICK = "run +experiment=quickstart training.steps=3"
NO_GSD = f"{QUICK} distance=none"
PIXELS = (
    "run model=pixels pair.private=digits pair.public=digits pair.take=train pair.m=300 distance=none training=adamix "
    "training.steps=3"
)
OWN = "run pair.private=own.npz pair.public=own.npz pair.m=20 distance=none training.steps=2 training.batch_size=20"
RANK = "rank private=digits public=[digits,photo_patches] model=digits_cnn distance.m=60 distance.initialisations=2"
ATTACK = (
    "private=digits public=[photo_patches] model=digits_cnn distance.m=60 distance.k=4 known=[30] trials=1 "
    "distance.initialisations=1"
)
AUDIT = NO_GSD.replace("run", "audit", 1)
PATHS = {
    "gep": NO_GSD,
    "gep with GSD": f"{QUICK} seed=5",
    "gep in slices": f"{NO_GSD} algorithm.groups=slices algorithm.redraw=false",
    "gep bfloat16": f"{NO_GSD} algorithm.public_precision=bfloat16",
    "gep ieee": f"{NO_GSD} algorithm.public_precision=ieee",
    "biased gep": f"{NO_GSD} algorithm.residual=false",
    "dp_sgd": f"{NO_GSD} algorithm=dp_sgd",
    "dp_sgd, secure noise": f"{NO_GSD} algorithm=dp_sgd privacy.secure_noise=true",
    "dp_sgd, adam and average": f"{NO_GSD} algorithm=dp_sgd training.optimizer=adam training.average=true",
    "dp_sgd, views and moving average": f"{NO_GSD} algorithm=dp_sgd training.augment=[flip,crop] training.views=2 "
    "training.average=ema",
    "dp_md": f"{NO_GSD} algorithm=dp_md",
    "dope_sgd": f"{NO_GSD} algorithm=dope_sgd",
    "linear dope_sgd": f"{PIXELS} algorithm=dope_sgd",
    "second phase": f"{NO_GSD} algorithm=second_phase algorithm.public_epochs=1",
    "second phase, own head": f"{NO_GSD} algorithm=second_phase algorithm.public_epochs=1 algorithm.head=own",
    "dp_randp": f"{NO_GSD} algorithm=dp_randp algorithm.public_epochs=1 pair.public=[photo_patches,noise]",
    "non_private": f"{NO_GSD} algorithm=non_private",
    "auto": f"{QUICK} distance=gsd pair.public=auto pair.candidates=[digits,photo_patches] epsilon_select=1 "
    "distance.m=60 distance.k=4",
    "adadps": f"{PIXELS} algorithm=adadps",
    "pillar": f"{PIXELS} algorithm=pillar algorithm.k=10",
    "jl": f"{PIXELS} algorithm=jl algorithm.k=10",
    "dp_sgd_standardised": f"{PIXELS} algorithm=dp_sgd_standardised",
    "whitened_head": f"{PIXELS} algorithm=whitened_head",
    "whitened_head, no public data": f"{PIXELS} algorithm=whitened_head pair.public=null pair.take=test",
    "whitened_head_once": f"{PIXELS} algorithm=whitened_head_once",
    "whitened_head_start": f"{PIXELS} algorithm=whitened_head_start",
    "dp_pca": f"{PIXELS} algorithm=dp_pca algorithm.k=10",
    "adamix": f"{PIXELS} algorithm=adamix algorithm.rank=20",
    "ngd": f"{PIXELS} algorithm=ngd",
    "adamix_theory": f"{PIXELS} algorithm=adamix_theory training=adamix_theory",
    "only_public": f"{PIXELS} algorithm=only_public",
    "ppgd": f"{PIXELS} algorithm=ppgd",
    "linear gep": f"{PIXELS} algorithm=gep_k100",
    "linear dp_sgd": f"{PIXELS} algorithm=dp_sgd",
    "features": f"{OWN} model=mobilenetv2_coral model.backbone.pretrained=false model.backbone.checkpoint=null "
    "model.backbone.options={} model.backbone.input_size=32 algorithm=dp_sgd training=adamix",
    "scattering": f"{OWN} model=scattering algorithm=dp_sgd training=adamix",
    "frozen layers once": f"{OWN} model=timm model.architecture=resnet10t model.norm=freeze "
    "model.trained=[fc,layer4.0.conv2] algorithm=dp_sgd training=fine_tune model.once=true",
    "a network by vmap": f"{OWN} model=timm model.architecture=convnext_atto model.norm=replace algorithm=dp_sgd "
    "training=fine_tune",
    "vit with lora": f"{OWN} model=timm model.architecture=vit_tiny_patch16_224 model.options={{img_size:32,depth:2}} "
    "model.lora={layers:[qkv],r:2,alpha:2} algorithm=dp_sgd training=fine_tune",
    "noisy_sgd": "run model=pixels pair.private=own.npz pair.public=own.npz pair.m=20 distance=none training=adamix "
    "algorithm=noisy_sgd algorithm.k=5 algorithm.steps=10",
    "rank gsd": f"{RANK} distance.k=8",
    "rank gsd, given labels": f"{RANK} distance.k=8 distance.labels=given public=[digits]",
    "rank dp_gsd": f"{RANK} distance=dp_gsd distance.k=8 distance.epsilon=1 distance.delta=1e-5",
    "rank dp_gsd by bingham": f"{RANK} distance=dp_gsd distance.k=8 distance.mechanism=bingham distance.epsilon=1 "
    "distance.sketch=16",
    "private choice": f"{RANK} distance.k=8 epsilon_select=1",
    "rank task2vec": f"{RANK} distance=task2vec public=[digits]",
    "rank otdd": f"{RANK} distance=otdd public=[digits]",
    "rank otdd_exact": f"{RANK} distance=otdd_exact public=[digits]",
    "rank frechet": f"{RANK} distance=frechet",
    "rank mmd": f"{RANK} distance=mmd",
    "attack on GSD, white box": f"attack gsd_white_box {ATTACK} targets=2",
    "attack on GSD, black box": f"attack gsd_black_box {ATTACK}",
    "audit, white box": f"{AUDIT} audit.canaries=20",
    "audit, white box, dp_sgd": f"{AUDIT} audit.canaries=20 algorithm=dp_sgd",
    "audit, black box": f"{AUDIT} audit.kind=black_box audit.canaries=20 algorithm=dp_sgd",
    "audit, black box, pillar": PIXELS.replace("run", "audit", 1)
    + " audit.kind=black_box audit.canaries=20 algorithm=pillar algorithm.k=10",
    "audit, black box, dp_pca": PIXELS.replace("run", "audit", 1)
    + " audit.kind=black_box audit.canaries=20 algorithm=dp_pca algorithm.k=10",
    "audit by instance": f"{AUDIT} audit.kind=per_instance algorithm=dp_sgd",
    "audit by instance, pillar": PIXELS.replace("run", "audit", 1)
    + " audit.kind=per_instance algorithm=pillar algorithm.k=10",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, folder: Path) -> Path:
    """An empty folder, but for a small data set of one's own."""
    random = np.random.RandomState(0)
    parts = ((random.randint(255, size=(n, 32, 32, 3)).astype(np.uint8), np.arange(n) % 2) for n in (60, 40))
    write_npz("own.npz", *parts)
    return tmp_path


def run(words: str, device: str = "cuda") -> str:
    """What a command prints, which must succeed."""
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        code = main([*words.split(), f"device={device}", "threads=1", "debug=true"])
    assert code == 0, told.getvalue()
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("words", PATHS.values(), ids=PATHS)
def test_every_path_stays_on_its_device(words: str) -> None:
    with pretended() as log:
        run(words)
    assert log.operations > 0 or "otdd" in words  # which compares images on the host


def test_precision_is_set_when_the_device_is_chosen() -> None:
    """Before anything is computed; torch would convolve in tf32."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    with pretended():
        assert cell.choose_device(Device.auto).type == "cuda"
    assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_run_of_a_gpu_is_resumed_and_read_without_one() -> None:
    """Its checkpoint and its weights hold tensors of the GPU."""
    words = f"{NO_GSD} training.checkpoint_seconds=0 training.steps=40 pair.private_share=0.2"
    with pretended(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Progress", interrupted)
        assert main([*words.split(), "device=cuda", "threads=1"]) == 130
    with pretended(available=False):
        run(words, "cpu")
    (weights,) = Path("results/runs").glob("*/model.pt")
    with pretended(available=False):
        assert torch.load(weights, map_location="cpu", weights_only=True)


def test_memory_that_ran_out_is_no_sign_that_layers_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(per_example, "by_layers", full)
    model = torch.nn.Linear(4, 3)
    with pytest.raises(torch.OutOfMemoryError):
        per_example.why_vmap(model, torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), ["weight"])


def test_rows_of_a_pass_follow_from_the_memory_of_the_gpu() -> None:
    """Of the whole of it, not of what is free: rounding depends on how many pass together."""
    with pretended() as log:
        small = PerExampleGradients(torch.nn.Linear(10, 10).to("cuda"))
        large = PerExampleGradients(torch.nn.Linear(10_000, 10_000).to("cuda"))
        log.reset()
        x = torch.zeros(2, 10, device="cuda")
        assert small.chunk(x) == 500
        assert large.chunk(x) == 140 * 2**30 // 8 // 4 // large.size == 46
    assert not log.waits


# Times that the host waits for a step


def resnet20() -> torch.nn.Module:
    """For images of 8 pixels."""
    return models.build(check(Model, option("model", "resnet20")), (3, 8, 8), 10, (0.5,) * 3, (0.5,) * 3, 0)


def option(group: str, name: str) -> dict[str, Any]:
    """The values of conf/GROUP/NAME.yaml, with those of its defaults."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("run", [f"{group}={name}"])[group])  # type: ignore[return-value]


def counted(
    name: str,
    model: torch.nn.Module,
    shape: tuple[int, ...],
    n: int,
    m: int,
    rate: float = 1.0,
    people: torch.Tensor | None = None,
    views: int = 0,
    **changes: int,
) -> Log:
    """The log of the second step of an algorithm on n private and m public examples, as `loop.fit` takes it."""
    algorithm = algorithms.build(option("algorithm", name) | changes)
    generator = torch.Generator().manual_seed(0)
    plan = Schedule(n, rate, 2, round(n * rate)) if people is None else Schedule(len(people), rate, 2, len(people))

    def split(count: int) -> Split:
        x = torch.randint(256, (count, *shape), generator=generator).to(
            torch.uint8 if len(shape) > 1 else torch.float32
        )
        return Split(x, torch.arange(count) % 10)

    private, public = split(n), split(m)
    with pretended() as log, gpu_precision("tf32"):
        task = Task(private, public, private, 10, "accuracy", (0.5,) * 3, (0.5,) * 3, ())._replace(people=people)
        task = loop.on_device(task, torch.device("cuda"))
        gradients = loop.engine(model.to("cuda"), None)
        augment = [Augment.flip, Augment.crop] if views else None
        job = loop.Job(algorithm, plan, 1.0, training(augment=augment, views=max(1, views)), "key", Path())
        task, slots = loop.in_slots(task, gradients, job, loop.ONE_PROCESS)
        view = loop.view_of(model, gradients, task, "key", plan)
        for step in range(2):
            log.reset()
            chosen = poisson_sample(stream("key", "sample", step), plan.n, rate) if rate < 1 else None
            of_step = loop.views_of(job, secret_named(), step, chosen)
            chosen, summed = loop.by_unit(chosen, task.people, gradients, slots, of_step)
            make = partial(algorithm.mechanism, view, step)
            mechanism, batch = loop.ONE_PROCESS.begin(step, task.private, chosen, make)
            log.products.clear()
            mean, _ = loop.noisy_mean(mechanism, summed, batch, 1.0, stream("key", "noise", step), plan.batch_size)
            assert {precision for *_, precision in log.products} == {"ieee"}  # passes, norms and sums
            mechanism.decode(mean)
        # what crosses is the noise, labels that are drawn anew, the sample, and where its rows are in slots; or what
        # decides each view
        assert sum(log.bytes.values()) <= 8 * (mechanism.size + m + (4 + 5 * views) * n)
    return log


WIDE = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))  # kept as factors
PEOPLE = torch.arange(400) % 4 + 1  # how many of 1,000 examples each of them has
LAYERS = (100, 1), (1340, 9), (2580, 25)  # where the columns of a layer begin, and its positions
TYPES = torch.float32, torch.float64
STEPS = {
    "dp_sgd": lambda: counted("dp_sgd", resnet20(), (3, 8, 8), 1000, 1),
    "gep": lambda: counted("gep", resnet20(), (3, 8, 8), 100, 200, k=100),
    "dp_sgd, linear": lambda: counted("dp_sgd", torch.nn.Linear(64, 10), (64,), 1000, 100),
    "gep, linear": lambda: counted("gep", torch.nn.Linear(64, 10), (64,), 1000, 100, k=20),
    "dp_sgd, wide layers": lambda: counted("dp_sgd", copy.deepcopy(WIDE), (784,), 1000, 1),
    "a sample, linear": lambda: counted("dp_sgd", torch.nn.Linear(64, 10), (64,), 1000, 100, rate=0.3),
    "a sample, wide layers": lambda: counted("dp_sgd", copy.deepcopy(WIDE), (784,), 1000, 1, rate=0.3),
    "people, linear": lambda: counted("dp_sgd", torch.nn.Linear(64, 10), (64,), 1000, 1, 0.5, PEOPLE),
    "views": lambda: counted("dp_sgd", resnet20(), (3, 8, 8), 700, 1, 0.5, views=3),
    "people, wide layers": lambda: counted("dp_sgd", copy.deepcopy(WIDE), (784,), 1000, 1, 0.5, PEOPLE),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_host_waits_for_no_step(step: Callable[[], Log]) -> None:
    log = step()
    assert not log.waits
    assert log.operations > 10


def test_a_step_of_a_linear_classifier_copies_its_features_once() -> None:
    """To the slots, which are three quarters full: none is emptied of rows that are not finite, since none has any."""
    log = counted("dp_sgd", torch.nn.Linear(2000, 10), (2000,), 500, 1)
    assert 500 * 2000 < log.numbers < 2 * 500 * 2000


@pytest.mark.attack
def test_passes_in_tf32_would_let_an_example_move_all_others() -> None:
    """If one more in a pass makes cuBLAS take a kernel without TF32: rows that are all the same then add up what they
    are rounded by. In ieee that is 2^-13 of it."""

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                bits = (part.contiguous().view(torch.int32) + 2**12 for part in args)
                args = tuple((part & -(2**13)).view(torch.float32) for part in bits)
            return func(*args, **(kwargs or {}))

    x, y = torch.rand(1, 784, generator=torch.Generator().manual_seed(0)), torch.zeros(1, dtype=torch.long)
    sums = []
    for mode in (contextlib.nullcontext(), Rounding()):
        with mode:
            (block,) = BookKeeping(copy.deepcopy(WIDE)).blocks(x, y)
        sums.append(clipped_sum(block, 1e-3))
    assert 499 * (sums[1] - sums[0]).norm() > 20 * ROUNDING


def test_the_host_waits_for_a_copy_but_of_pinned_memory() -> None:
    with pretended() as log:
        values = torch.arange(6.0).pin_memory()
        device = torch.zeros(6, device="cuda")
        device.copy_(values, non_blocking=True)
        assert sent(torch.arange(3), torch.device("cuda")).is_cuda
        assert not log.waits
        for copied in (
            lambda: values.to("cuda"),
            lambda: torch.ones(6).to("cuda", non_blocking=True),
            lambda: device.copy_(values),
            lambda: device[torch.arange(2)],
            lambda: torch.tensor([1.0], device="cuda"),
            lambda: device.to("cpu", non_blocking=True),
        ):
            log.reset()
            copied()
            assert log.waits.total() == 1
        assert device.tolist() == list(range(6))


def test_sums_by_slots_are_those_of_float64() -> None:
    """Of full, empty and other slots, with rows that are in none, in any order."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(150, width, generator=generator) for width in (3, 5))
    weights = torch.rand(150, generator=generator, dtype=torch.float64)
    want = (left.double() * weights[:, None]).T @ right.double()
    with pretended() as log:
        rows = [part.to("cuda") for part in (left, weights, right)]
        for order in (None, torch.randperm(150, generator=generator).to("cuda")):
            total = torch.zeros(3, 5, dtype=torch.float64, device="cuda")
            log.reset()
            add_products(total, *rows, Slots([64, 0, 7, 48], order))
            assert not log.waits
            torch.testing.assert_close(total.cpu(), want, rtol=1e-5, atol=1e-5)


def test_a_basis_takes_one_float64_product_and_its_error_is_measured() -> None:
    """Of columns that nearly depend on each other; and of a basis that is not orthonormal."""
    p, k = 40_000, 12
    start = torch.randn(p, k, generator=torch.Generator().manual_seed(0)).cumsum(1).cumsum(1)
    start[:, 1] = start[:, 0] * (1 + 1e-6)
    with pretended() as log:
        block = cholesky_qr(start.to("cuda"))
        log.reset()
        cholesky_qr(start.to("cuda"))
        for wrong in (1.0, 1.01):
            basis, error = orthonormal(Basis([slice(0, p)], [block * wrong]))
            excess = basis.blocks[0].cpu().double().T @ basis.blocks[0].cpu().double() - torch.eye(k)
            assert error.cpu() == pytest.approx(float(excess.norm()), rel=1e-2, abs=1e-6)
            assert error.cpu() <= 1e-5 if wrong == 1 else error.cpu() > 0.02
    counts = {kind: sum(n for (_, *of, _), n in log.products.items() if of == [kind]) for kind in TYPES}
    assert counts == {torch.float64: p * k**2, torch.float32: (3 + 2) * p * k**2}
    assert {precision for *_, precision in log.products} == {"ieee"}


def test_no_block_is_copied_to_float64_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and sums of rows that are written out, of wide layers and of a linear classifier, at some sizes."""
    for module in (matrix, book_keeping):
        monkeypatch.setattr(module, "GPU_ENTRIES", 2**13)
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    dense, r, x = rows(40, 9000), rows(500, 12), rows(500, 90)
    kept = [
        KeptInputs(slice(i, i + 1200), slice(i + 1200, i + 1240), rows(40, t, 30), rows(40, t, 40)) for i, t in LAYERS
    ]

    def numbers(device: str) -> list[torch.Tensor]:
        layers = [layer._replace(a=layer.a.to(device), e=layer.e.to(device)) for layer in kept]
        blocks = (
            DenseGradients(dense.clone().to(device)),
            LayeredGradients(dense[:, :100].to(device), [slice(0, 100)], layers, LAYERS[-1][0] + 1240),
            FactoredGradients(r.to(device), x.to(device), False),
        )
        sums = (block.combine(torch.linspace(0, 1, len(block), dtype=torch.float64, device=device)) for block in blocks)
        return [*(block.row_norms().cpu() for block in blocks), *(total.cpu() for total in sums)]

    with pretended() as log:
        pieces = numbers("cuda")
    assert 2**12 < log.float64 <= 9000 * 1.1  # one sum
    for piece, whole in zip(pieces, numbers("cpu"), strict=True):
        torch.testing.assert_close(piece, whole, rtol=1e-12, atol=1e-12)


def test_residuals_near_the_basis_are_clipped_as_on_a_cpu() -> None:
    """Where nobody asks which rows these are: near rows, far ones and zero rows, and one of them more or less."""
    generator = torch.Generator().manual_seed(0)
    block = torch.linalg.qr(torch.randn(300, 8, generator=generator)).Q
    inside = torch.randn(40, 8, generator=generator) @ block.T
    shares = torch.tensor([0.0, 1e-6, 1e-3, 0.05, 0.2, 5.0]).repeat(7)[:40, None]
    rows = 30 * (inside + shares * torch.randn(40, 300, generator=generator))
    rows[7] = 0

    def total(device: str, count: int) -> torch.Tensor:
        g, basis = DenseGradients(rows[:count].to(device)), Basis([slice(0, 300)], [block.to(device)])
        error = torch.zeros(1, dtype=torch.float64, device=device)
        return gep.residual_sum(g, basis, g.project(basis), 1.0, error)

    with pretended():
        sums = [total("cuda", count).cpu() for count in range(1, 41)]
    for count, pretended_sum in enumerate(sums, 1):
        torch.testing.assert_close(pretended_sum, total("cpu", count), rtol=1e-4, atol=1e-6)
    assert max((b - a).norm() for a, b in pairwise(sums)) <= 1 + ROUNDING


def test_private_data_cross_to_the_device_once() -> None:
    """Twice as many steps bring across no more than their noise and their sample, and none is waited for."""
    crossed, waits = [], []
    for steps in (3, 6):
        with pretended() as log:
            run(f"{NO_GSD} algorithm=dp_sgd training.steps={steps}")
            crossed.append(sum(n for where, n in log.bytes.items() if where.startswith("to the device")))
            waits.append({why: n for why, n in log.waits.items() if "_local_scalar" not in why})  # what is reported
    assert waits[0] == waits[1]
    with pretended(available=False):
        weights = torch.load(next(Path("results/runs").glob("*/model.pt")), map_location="cpu", weights_only=True)
    p = sum(tensor.numel() for name, tensor in weights.items() if name.endswith(("weight", "bias")))
    assert 3 * 8 * p < crossed[1] - crossed[0] < 3 * (8 * p + 8 * 400)  # normals of 8 bytes; some 100 indices


def test_a_worker_leaves_cuda_to_the_child_that_it_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun with CUDA cannot be forked. The task, in the child, may use it."""
    parent = os.getpid()

    def touched(*_: object) -> bool:
        assert os.getpid() != parent, "CUDA is touched before the fork"
        return True

    for name in ("is_available", "device_count", "current_device", "_lazy_init", "mem_get_info", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, touched)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = compose("run", ["+experiment=quickstart"], return_hydra_config=True)
    with open_dict(whole):
        whole.hydra.job.num = 0
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(whole)

    def task(_: object) -> str | None:
        return None if torch.cuda.is_available() and os.getpid() != parent else "no CUDA in the child"

    assert sweep.CellTask(task, tmp_path, apart=True)(whole) is None
    assert json.loads((tmp_path / "0000.json").read_text())["state"] == "done"


def test_what_goes_to_another_process_leaves_the_gpu_and_arrives_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Network, public data and the start of the training; the second process of a machine takes its second GPU."""
    split = Split(torch.zeros(5, 4), torch.zeros(5, dtype=torch.long))
    moves = []
    with pretended():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(parallel.torchrun, "on_this_machine", lambda: 1)
        task = loop.on_device(Task(split, split, split, 2, "accuracy", (0.5,), (0.5,), ()), torch.device("cuda"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to("cuda")
        view = loop.view_of(model, loop.engine(model, None), task, "key", Schedule(5, 5, 1.0, 2))
        view = view._replace(start=torch.zeros(2, device="cuda"))

        packed = parallel._placed(view, torch.device("cpu"))
        assert not any(tensor.is_cuda for tensor in (*packed.model.state_dict().values(), *packed.public, packed.start))
        names = list(view.gradients.offsets)
        job = parallel.Assignment(packed, names, None, "key", None, "cuda", 1, [])
        to = torch.nn.Module.to
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: moves.append(device) or to(module, device))
        unpacked, private = parallel._unpacked(job, split)
        everything = (*unpacked.model.parameters(), *unpacked.public, unpacked.start, *private)
        assert all(tensor.is_cuda for tensor in everything)
    assert moves == [torch.device("cuda", 1)]
