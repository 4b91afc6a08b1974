"""Factories that several test files share: algorithms, networks, streams, and the record of a run, datasets."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from pubsel import algorithms, models
from pubsel.data import Source, Split, load, open_dataset
from pubsel.messages import UsageError, UserError
from pubsel.privacy.randomness import stream
from pubsel.settings.compose import composed
from pubsel.settings.keys import SCHEMAS, Model, Norm, Pair, Training
from pubsel.settings.methods import option
from pubsel.settings.schema import check

Cli = Callable[..., tuple[int, str, str]]
FINISHED = "lock log.txt model.json model.pt result.json settings.json".split()  # files of a finished run


def build(name: str, **changes: Any) -> Any:
    """Return the algorithm of conf/algorithm/NAME.yaml, with other settings."""
    return algorithms.build(option("algorithm", name) | changes)


def network(seed: int, name: str = "linear", size: int | None = None) -> nn.Module:
    """Return a network for images of 8 x 8 pixels and ten classes."""
    return models.build(Model(name, None, False, None, Norm.replace, size), (1, 8, 8), 10, (0.3,), (0.4,), seed=seed)


class Scaled(nn.Module):
    """The values of images as numbers, divided by the largest."""

    def __init__(self, dtype: torch.dtype = torch.float32, most: int = 255):
        super().__init__()
        self.dtype, self.most = dtype, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype) / self.most


def secret(purpose: str, step: int) -> Any:
    """Return a stream in place of a secret one."""
    return stream("test", purpose, step)


def hurtful(d: int) -> torch.Tensor:
    """Return rows of any content: tiny, huge, zero, sparse, constant, at the edge of overflow in any column, not
    finite; and of norms on both sides of any clip norm."""
    torch.manual_seed(1)
    scales = (1e-45, 1e-38, 1e-20, 1e-3, 1, 10, 1e3, 1e10, 1e17, 1e20, 1e30, 1e37)
    rows = [torch.randn(d) * scale for scale in scales]
    rows += [torch.full((d,), value) for value in (0.0, 3e38, -3e38, -1e-45)] + [torch.eye(d)[0] * 1e19]
    for value in (math.nan, math.inf, -math.inf):
        rows += [torch.randn(d), torch.full((d,), value)]
        rows[-2][d // 2] = value
    rows += [torch.eye(d)[place] * value for place in (0, -1) for value in (1e17, 3e38)]
    rows += [torch.full((d,), 0.001)]
    rows[-1][512:] *= 3e38
    sized = nn.functional.normalize(torch.randn(31, d)) * torch.logspace(-3, 3, 31)[:, None]
    return torch.cat([torch.stack(rows), sized])


def interrupted(*_: object, **__: object) -> None:
    """Stop, as Ctrl-C does."""
    raise KeyboardInterrupt


def planted(owner: Any, name: str, other: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what plants a fault: `other` makes it of the function that `owner` has under a name."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, other(getattr(owner, name)))


def checked(command: str, *words: str) -> Any:
    """Return the settings of a command as it is typed."""
    with composed(command, words) as values:
        return check(SCHEMAS[command], values)


def done(cli: Cli, *words: str) -> tuple[str, str]:
    """Return what a command says that must succeed: standard output, and standard error."""
    code, out, err = cli(*words)
    assert code == 0, err
    return out, err


def failed(cli: Cli, *words: str, code: int = 2) -> str:
    """Return what a command says that must fail: one line of its own at the end of standard error, and no result."""
    found, out, err = cli(*words)
    assert (found, out) == (code, ""), err
    assert [line for line in err.splitlines() if line.startswith("pubsel: ")] == err.splitlines()[-1:]
    assert "Traceback" not in err
    return err


def only_record(results: Path | str = "results", kind: str = "runs") -> dict[str, Any]:
    """Return the only record of a kind in a results folder."""
    (path,) = Path(results).glob(f"{kind}/*/result.json")
    return json.loads(path.read_text())


def training(**changes: Any) -> Training:
    """Return the settings of a short training, with others."""
    values = {"epochs": 2, "batch_size": 10, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    values |= {"milestones": [0.5], "decay": 0.1, "chunk": 4, "checkpoint_seconds": 1e9}
    return Training(**(values | changes))


def not_opened(
    name: str, root: Path | str, match: str, kind: type = UserError, unit: str | None = None, keep: bool = True
) -> str:
    """Require that a dataset is rejected, in one line, which is returned."""
    with pytest.raises(kind, match=match) as error:
        open_dataset(name, str(root), False, unit, keep)
    assert "\n" not in str(error.value)
    return str(error.value)


def not_loaded(pair: Pair, root: Path | str, match: str, kind: type = UsageError, **more: Any) -> str:
    """Require that a pair of datasets is refused, in one line."""
    with pytest.raises(kind, match=match) as error:
        load(pair, str(root), False, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def random_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open every dataset as twenty training and twenty test images that only it has, of two classes."""

    def opened(name: str, *_: object, **__: object) -> Source:
        draw = np.random.RandomState(zlib.crc32(name.encode()))
        train, test = torch.from_numpy(draw.randint(0, 256, (40, 1, 4, 4), dtype=np.uint8)).split(20)
        y = torch.arange(20) % 2
        return Source(Split(train, y), Split(test, y), 2, "accuracy", (0.5,), (0.5,), ())

    monkeypatch.setattr("pubsel.data.reader.open_dataset", opened)


def picture(path: Path, value: int = 0, size: tuple[int, int] = (30, 40), mode: str = "RGB") -> None:
    """Write an image file of one grey value; its size is (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size[::-1], value).convert(mode).save(path)


def grey_values(split: Split) -> list[int]:
    """Return the grey value of each picture, a multiple of ten, which JPEG may have moved by one."""
    return [round(int(x[0, 5, 5]) / 10) * 10 for x in split.x]


def write_npz(path: Path | str, train: tuple, test: tuple, **more: Any) -> None:
    """Write a dataset: images and labels of both parts."""
    np.savez(path, train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1], **more)


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Write records as those that are kept with the code: one per line, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    """Write rows under the keys of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
