"""`pubsel predict RUN IMAGES`: what a trained model says of new images, as a table or as `Predictions`."""

import csv
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel import records
from pubsel.data.given import IMAGES, Given, as_input, at_path, given
from pubsel.data.images import Span, narrow
from pubsel.files import ProgressLine
from pubsel.messages import UsageError, UserError, say
from pubsel.release.classifier import Classifier, files_of, read_facts, takes_of
from pubsel.release.reopen import LEFT, folder_of, opened
from pubsel.settings import outputs
from pubsel.settings.keys import PredictConfig

BATCH, PIXELS = 256, 2**26  # the most images that are read at a time, and the most numbers that they may have in all
LEAST = 32  # of them, whatever their size
READERS = 8  # threads that read images while the model works
THRESHOLD = 0.5  # of the probability from which an image has a label


@dataclass(frozen=True)
class Predictions:
    """Answers of a model about n images. files: the path of each, or its place among those given; classes: their names;
    probabilities: of each class, [n, classes], whose rows sum to 1; with `multi_label`, of each label by itself."""

    files: list[str]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    multi_label: bool = False

    @property
    def answers(self) -> list[Any]:
        """Return the name of the most probable class of each image; with several labels an image, a list of those whose
        probability is at least 0.5."""
        if self.multi_label:
            return [[self.classes[i] for i in np.flatnonzero(row >= THRESHOLD)] for row in self.probabilities]
        return [self.classes[i] for i in self.probabilities.argmax(1)]

    def __len__(self) -> int:
        return len(self.files)

    def header(self, every: bool) -> list[str]:
        """Return the names of the columns of `rows`."""
        columns = list(self.classes) if every or self.multi_label else []
        return ["file", *columns] if self.multi_label else ["file", "class", "probability", *columns]

    def rows(self, every: bool) -> Iterator[list[str]]:
        """Return a row of the table for each image: file, class and its probability, and that of each class if `every`;
        with several labels an image, file and the probability of each."""
        for file, answer, row in zip(self.files, self.answers, self.probabilities, strict=True):
            each = [f"{value:.6g}" for value in row]
            if self.multi_label:
                yield [file, *each]
            else:
                yield [file, answer, f"{row.max():.6g}", *(each if every else [])]


def run(settings: PredictConfig) -> str:
    """Write the table of the answers, whole or not at all, and return a line about it. Only its owner may read it.
    UsageError without images."""
    if not settings.images:
        raise UsageError("pubsel predict RUN IMAGES: give folders, image files, CSV or npz files after the run")
    # nothing that the command reads may be written over
    files = files_of(folder_of(settings.run, Path(settings.results)))
    takes = takes_of(read_facts(files[1])) if files else IMAGES
    images = [at_path(name, takes) for name in settings.images]
    output = outputs.output(settings.to, inputs(settings, images))
    classifier = opened(settings)

    n = 0
    with output.open(private=True) as file:
        table = csv.writer(file, lineterminator="\n")
        for part in predicted(classifier, images, settings.skip):
            if not n:
                table.writerow(map(records.as_cell, part.header(settings.all)))
            table.writerows(map(records.as_cell, row) for row in part.rows(settings.all))
            n += len(part)
    what = "labels" if classifier.multi_label else "classes"
    kind = "texts" if classifier.takes.text else "rows" if classifier.takes.rows else "images"
    return output.report(f"{settings.to}: {n:,} {kind}, {len(classifier.classes)} {what}")


def inputs(settings: PredictConfig, images: list[Given]) -> Iterator[Path]:
    """Yield the files that the command reads: images, those of the run, and the weights of its backbone."""
    # the run, the weights before its classifier, and the images themselves
    folder = folder_of(settings.run, Path(settings.results))
    yield from (folder / name for name in LEFT)
    files = files_of(folder)
    kept = records.at(read_facts(files[1]), "model.backbone.checkpoint") if files else None
    for checkpoint in filter(None, (settings.checkpoint, kept)):
        yield from (Path(checkpoint).expanduser(), Path(settings.data_root).expanduser() / checkpoint)
    for part in images:
        yield from part.files()


def predict(settings: PredictConfig, images: Any) -> Predictions:
    """Return what the model of `settings.run` says of images as `data.given.given` takes them. UsageError
    for none."""
    # an empty list would give an empty answer, and hide a wrong path
    if isinstance(images, Sequence) and not len(images):
        raise UsageError("images: none given: give paths, PIL images, arrays or tensors")
    classifier = opened(settings)
    parts = list(predicted(classifier, given(images, classifier.takes), settings.skip))
    files = [file for part in parts for file in part.files]
    return Predictions(
        files, parts[0].classes, np.concatenate([part.probabilities for part in parts]), parts[0].multi_label
    )


def predicted(classifier: Classifier, images: list[Given], skip: bool) -> Iterator[Predictions]:
    """Yield what a classifier says of images, in their order, a batch at a time; memory does not grow with their
    number. skip: leave out those that are not readable, with a line for each; UserError names the first one otherwise,
    or says that none is readable."""
    progress = ProgressLine("predict", sum(part.n for part in images))
    for files, x, seen in batches(images, classifier, skip):
        yield Predictions(files, classifier.classes, classifier.probabilities(x), classifier.multi_label)
        progress.add(seen)


def batches(images: list[Given], of: Classifier, skip: bool) -> Iterator[tuple[list[str], Tensor | list[str], int]]:
    """Yield names, inputs [n, *of.shape] and how many images they are of, a batch at a time: threads read the next one
    while this one is used. UserError if no image could be read."""
    # batches of a few megapixels, whatever the size of an image
    size = max(LEAST, min(BATCH, PIXELS // int(np.prod(of.shape))) // LEAST * LEAST)
    listed = (item for part in images for item in part.each())
    left, kept, spans = enumerate(listed), 0, list[Span]()

    waiting: deque[list[tuple[str, Future[Tensor | str]]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            while True:
                part = list(islice(left, size))
                if part:
                    waiting.append(
                        [
                            (name or str(i), pool.submit(as_input, raw, of.shape, of.bits, spans, of.takes.text))
                            for i, (name, raw) in part
                        ]
                    )
                if not waiting:
                    break
                if part and len(waiting) < 2:
                    continue

                # one batch is computed while the threads read the next
                reading = waiting.popleft()
                names, inputs = _read(reading, skip)
                kept += len(names)
                if names:
                    texts = [raw for raw in inputs if isinstance(raw, str)]
                    yield names, texts or torch.stack([x for x in inputs if isinstance(x, Tensor)]), len(reading)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if not kept:
        raise UserError("no image could be read: see the lines above")

    # what training would have stopped at
    if of.bits is None and (text := narrow(spans)):
        say(f"warning: {text}, and this model was trained without bits=: convert them to 8 bits, or train with bits=12")


def _read(reading: list[tuple[str, Future[Tensor | str]]], skip: bool) -> tuple[list[str], list[Tensor | str]]:
    """Return names and inputs of a batch, without those that are not readable if `skip`."""
    names, inputs = list[str](), list[Tensor | str]()
    for name, future in reading:
        try:
            inputs.append(future.result())
            names.append(name)
        except UserError as error:
            if not skip:
                raise UserError(f"{error}, or set skip=true") from None
            say(f"left out: {error}")
    return names, inputs
