"""The share of all features in the rows of `whitened_head` (`rest_of`) where the spectrum is known:
`scripts/spectra.py [SEEDS]` prints a line for each case.

d features vary in directions that are turned at random, with variances j^-a; a tenth of each is of the class means. A
line has the accuracy on 2,000 other examples in percent, without public labels: with several shares, with that of the
rule, and without public data.
"""

import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from pubsel import algorithms
from pubsel.algorithms import Facts, FirstRelease
from pubsel.algorithms.whitened_head import WhitenedHead
from pubsel.data import Split, Task
from pubsel.privacy import accountant
from pubsel.privacy.randomness import Secret, stream
from pubsel.privacy.sampling import schedule
from pubsel.settings.keys import Training
from pubsel.settings.methods import option
from pubsel.training.loop import Job, fit, noisy_sum

CASES = ((100, 5, 3000), (300, 20, 8000), (1000, 40, 10_000))  # features, classes, private examples; a tenth public
POWERS, EPSILONS, SHARES, DELTA = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5), (0.1, 0.3, 1.0, 3.0), (0.0, 0.3, 0.6, 0.9), 1e-5
OF_MEANS = 0.1  # of the variance


def drawn(d: int, classes: int, power: float, sizes: tuple[int, ...], seed: int) -> list[Split]:
    """Return that many examples each, of one random problem."""
    source = torch.Generator().manual_seed(seed)
    variances = torch.arange(1, d + 1) ** -power
    turn = torch.linalg.qr(torch.randn(d, d, generator=source)).Q
    means = torch.randn(classes, d, generator=source) * (OF_MEANS * variances).sqrt()

    def part(n: int) -> Split:
        y = torch.randint(classes, (n,), generator=source)
        rows = means[y] + torch.randn(n, d, generator=source) * ((1 - OF_MEANS) * variances).sqrt()
        return Split(rows @ turn, y)

    return [part(n) for n in sizes]


def accuracy(parts: list[Split], classes: int, epsilon: float, share: float | None, public: bool, seed: int) -> float:
    """Return the accuracy in percent of a training with this share of all features; None: that of the rule."""
    known, private, test = parts
    n, d = private.x.shape
    mu = accountant.gaussian_mu(epsilon, DELTA)
    facts = Facts(n, d, len(known.x) if public else 0, classes, mu=mu, public=known.x if public else None)
    head = algorithms.build(option("algorithm", "whitened_head") | {"public_labels": "none"})
    assert isinstance(head, WhitenedHead)
    head = head.derived(facts)
    head.rest = head.rest if share is None else share

    # as pubsel.training.once and release.run do
    training = Training(chunk=None, checkpoint_seconds=math.inf, **head.training)
    plan = schedule(n, training)._replace(steps=head.steps)
    noise = math.sqrt(head.steps + head.first_steps) / mu
    frozen = head.frozen(known if public else None, d, lambda purpose, step: stream(purpose, "spectra", step))
    if isinstance(frozen, FirstRelease):
        source = stream(f"{seed}", "first release")
        frozen = noisy_sum(frozen, private.x, noise / math.sqrt(head.first_steps), source)
    private, test = (Split(frozen(part.x), part.y) for part in (private, test))
    model = nn.Linear(private.x.shape[1], classes)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    task = Task(private, None, test, classes, "accuracy", (), (), ())
    with tempfile.TemporaryDirectory() as folder:
        job = Job(head, plan, noise, training, "spectra", Path(folder, "checkpoint.pt"))
        fit(model, task, job, Secret({"seed": f"{seed} {share} {public}"}, {}, ["0 here"], False))
    with torch.no_grad():
        right: Tensor = model(test.x).argmax(1) == test.y
    return 100 * float(right.double().mean())


def main(seeds: int) -> None:
    """Print a line for each case."""
    print(
        "features",
        "classes",
        "a",
        "epsilon",
        *(f"share {share}" for share in SHARES),
        "rule",
        "no public data",
        sep=",",
    )
    for d, classes, n in CASES:
        for power in POWERS:
            parts = [drawn(d, classes, power, (n // 10, n, 2000), seed) for seed in range(seeds)]
            for epsilon in EPSILONS:
                ways = [(share, True) for share in (*SHARES, None)] + [(None, False)]
                means = (
                    statistics.fmean(accuracy(part, classes, epsilon, *way, seed) for seed, part in enumerate(parts))
                    for way in ways
                )
                print(f"{d},{classes},{power},{epsilon}", *(f"{mean:.1f}" for mean in means), sep=",", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
