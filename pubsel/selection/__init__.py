"""Private selection: which of several public sets is nearest to the private data, with differential privacy.

Neighbours differ by one private example, which is there or counts as nothing; their number n stays. What is released
is one name, by permute-and-flip (McKenna and Sheldon: Permute-and-Flip, NeurIPS 2020) on scores that one example hardly
moves:

1. Of a Poisson sample of the private examples, with random labels, the gradient g_i at each of T random networks
   (DP-GSD, steps 1 and 2: `dp_gsd.Side`). V_j: the top-k subspace of candidate j's gradients at the same network,
   public.
2. u_ij = |V_j^T g_i|^2 / |g_i|^2, averaged over the networks, in [0, 1]: the share of example i's gradient that lies in
   candidate j's subspace. 0 for all candidates where the gradient is zero. Up to the weights of its directions this is
   what GSD compares: sum_i u_ij = tr(V_j^T A V_j), A = sum_i g_i g_i^T / |g_i|^2.
3. `contributions`: what example i adds to score j, from 0 to 1: how far u_ij lies above or below the median of example
   i over all candidates, as a share of `cap`, between -1/2 and 1/2, plus 1/2. It counts steps of 1 / UNIT, so that sums
   are exact whatever their order.
4. q_j = sum_i a_ij, and `permute_and_flip` with epsilon'.

**Sensitivity.** One example more adds a_j, each in [0, 1], to all scores; the others' contributions do not change,
since each is computed of its own example, its own label, and public things. Permute-and-flip is the same as adding
noise z_j with P(z > t) = e^(-epsilon' t) to each score and taking the largest (Ding, Kifer, Saghaian, Steinke, Wang,
Xiao, Zhang, 2021, arXiv:2105.07260). Given the noise of all others, j is chosen if z_j > t = max_{l != j}(q_l + z_l) -
q_j. The example turns t into t' with t' - t in [min_l a_l - a_j, max_l a_l - a_j], so |t' - t| <= 1, and P(z_j > t') =
min(1, e^(-epsilon' t')) changes by a factor in [e^-epsilon', e^epsilon']. So the choice is epsilon'-private, without
the factor 2 of scores that may move in opposite directions; and epsilon-private by sampling (`privacy.pure`). It costs
the same for any number of candidates.

**In floating point.** Scores and choice are exact integers and coins. The shares of an example are rounded by
processors in one of several ways, depending on the others computed beside it; they are therefore computed in float64,
where that is some 1e-15, far below a step of 1 / UNIT, and can move a contribution by one step at most. One example
more thus moves a score by at most 1 + n / UNIT of n others, and epsilon' is divided by this (`exponent`).
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pubsel.data import Split
from pubsel.distances import Build, Distance
from pubsel.distances.dp_gsd import Side, sampling_rate
from pubsel.distances.gsd import GSD
from pubsel.messages import UsageError
from pubsel.privacy import accountant
from pubsel.privacy.lattice import coin
from pubsel.privacy.people import UNIT
from pubsel.privacy.randomness import Source, Sources, below, content
from pubsel.privacy.sampling import poisson_sample
from pubsel.settings.keys import Select

SURE = 0.95  # probability of the margin that is told


def contributions(energies: Tensor, cap: float) -> Tensor:
    """Return what each example adds to each candidate's score: int64 [n, J] in 0, ..., UNIT, from energies u [n, J] in
    [0, 1].

    Differences between candidates of at most cap / 2 from the example's median count in full. Whatever u is, NaN
    included, the result is in that range: the sensitivity of a score, in steps.
    """
    energies = energies.double().nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)

    candidates = energies.shape[1]
    ordered = energies.sort(dim=1).values
    median = (ordered[:, (candidates - 1) // 2] + ordered[:, candidates // 2]) / 2
    return (((energies - median[:, None]) / cap + 0.5).clamp(0, 1) * UNIT).round().long()


def permute_and_flip(scores: list[int], epsilon: Fraction, source: Source) -> int:
    """Return the place of one of the scores, in steps of 1 / UNIT: candidates in random order, the first whose coin
    with probability p_j = exp(-epsilon (max q - q_j) / UNIT) shows heads. It is exact, since it uses only integers."""
    # Fisher and Yates: each order is exactly as likely as any other.
    order = list(range(len(scores)))
    for i in range(len(order) - 1, 0, -1):
        j = below(i + 1, source)
        order[i], order[j] = order[j], order[i]

    best = max(scores)
    return next(j for j in order if coin(epsilon * (best - scores[j]) / UNIT, source))


def exponent(plan: accountant.Plan, n: int) -> Fraction:
    """Return epsilon' of a choice among n private examples: that of the plan over the sensitivity of a score, 1 + n /
    UNIT."""
    return Fraction(1 / plan.noise_multiplier) / (1 + Fraction(n, UNIT))


def probabilities(scores: list[int], epsilon: float) -> NDArray[np.float64]:
    """Return the probability [J] with which permute_and_flip chooses each: p_j times the integral over the moment x in
    [0, 1] of its turn of the product over l != j of 1 - x p_l, that no earlier one was taken. The integrand is a
    polynomial, so Gauss's rule with J nodes is exact."""
    q = np.array(scores, dtype=np.float64) / UNIT
    p = np.exp(-epsilon * (q.max() - q))

    nodes, weights = np.polynomial.legendre.leggauss(len(p))
    factors = 1 - np.outer((nodes + 1) / 2, p)  # [nodes, J]
    others = np.stack([np.delete(factors, j, axis=1).prod(1) for j in range(len(p))], axis=1)
    chosen: NDArray[np.float64] = p * (weights / 2 @ others)
    return chosen


def gsd_of(distance: Distance | None) -> GSD:
    """Return the settings of GSD, by which a private choice is made; UsageError if another distance, or none, is
    given."""
    if not isinstance(distance, GSD):
        name = "none" if distance is None else distance.name
        raise UsageError(f"epsilon_select: choosing privately goes by GSD alone: give distance=gsd, not {name}")
    return distance


class Comparison(NamedTuple):
    """Sets to compare, and the networks and streams that they are compared with.

    build(i): the network of initialisation i. key: names the public streams. source(purpose, step): sample, labels and
    coins, which nobody may know.
    """

    build: Build
    private: Split
    candidates: Mapping[str, Split]
    classes: int
    key: str
    source: Sources


def energies(
    distance: GSD,
    sketch: int,
    sets: Comparison,
    chosen: Tensor,
    report: Callable[[int, str], None] = lambda i, name: None,
) -> Tensor:
    """Return u [n', J], float64: the share of the gradient of each private example in `chosen` [n'] that lies in the
    subspace of each candidate, averaged over `distance.initialisations` networks. NOT private.

    In memory at once: the sketched rows of the sample at one network, float64 [n', s], and one candidate's [m, s].
    """
    private = sets.private
    shares = torch.zeros(len(chosen), len(sets.candidates), dtype=torch.float64)

    for i in range(distance.initialisations):
        side = Side(distance, sets.build(i), sets.classes, private.y.dim() == 2, sketch, sets.key, i)
        blocks = side.private(private, chosen, sets.source("labels of the selection", i))
        rows = torch.cat([torch.zeros(0, side.sketch.s, dtype=torch.float64), *blocks])

        # Rows have norm 1, or are zero: a squared length in a subspace is the share of it.
        for j, (name, split) in enumerate(sets.candidates.items()):
            shares[:, j] += (rows @ side.public(name, split)).square().sum(1)
            report(i, name)

    return shares / distance.initialisations


def select(
    distance: GSD,
    settings: Select,
    epsilon: float,
    sets: Comparison,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[str, accountant.Plan]:
    """Return the name of one candidate, and what the choice spends; nothing else that is computed here may be shown.

    A single candidate is chosen without reading anything. Identical candidates are equally likely. UsageError if the
    margin that is asked for (select.margin) needs more private examples than there are.
    """
    names = sorted(sets.candidates)
    if len(names) == 1:
        say(f"  {names[0]} is the only candidate: no private example is read, epsilon 0")
        return names[0], accountant.NOTHING

    # What the choice costs, and whether it can tell what is asked of it: of numbers that are public.
    n = len(sets.private.x)
    expected = distance.m if settings.private_m is None else settings.private_m
    plan = accountant.pure(epsilon, sampling_rate(expected, n), 1, "permute-and-flip")
    check_margin(settings, epsilon, plan, len(names), n)

    # Identical candidates are no error, but whoever gave them should know.
    seen: dict[str, str] = {}
    for name in names:
        first = seen.setdefault(content(sets.candidates[name].x[: distance.m]), name)
        if first != name:
            say(f"  {first} and {name} hold the same images: either is as likely as the other")

    # From here on private examples are read, and one name comes out.
    chosen = poisson_sample(sets.source("sample of the selection", 0), n, plan.rate)
    sets = sets._replace(candidates={name: sets.candidates[name] for name in names})
    shares = energies(distance, settings.sketch, sets, chosen, lambda i, name: say(f"  initialisation {i}: {name}"))
    scores = contributions(shares, settings.cap).sum(0).tolist()
    place = permute_and_flip(scores, exponent(plan, n), sets.source("selection", 0))
    return names[place], plan


def margin(candidates: int, cap: float, examples: float, epsilon: float) -> float:
    """Return by how much of its gradients' energy, on average over `examples`, a candidate must be better than each
    other (differences up to cap / 2 from an example's median count) to be chosen with probability SURE.

    permute_and_flip chooses j with p_j times at most the integral of 1 - x, since the best one's p is 1: all others
    together with at most (J - 1) / 2 e^(-epsilon examples margin / cap).
    """
    return cap * math.log((candidates - 1) / (2 * (1 - SURE))) / (epsilon * examples)


def check_margin(settings: Select, epsilon: float, plan: accountant.Plan, candidates: int, n: int) -> None:
    """Raise UsageError if select.margin is less than what n private examples, or the sample of them, can show."""
    if settings.margin is None:
        return
    shown = margin(candidates, settings.cap, plan.rate * n, 1 / plan.noise_multiplier)
    if shown <= settings.margin:
        return

    # No sample shows more than all private examples at the whole epsilon do.
    needed = math.ceil(margin(candidates, settings.cap, 1, epsilon) / settings.margin)
    what = f"select.margin={settings.margin:g} at epsilon_select={epsilon:g} between {candidates} candidates"
    if needed > n:
        raise UsageError(f"{what} takes {needed} private examples, and there are {n}: raise one of the two")
    raise UsageError(f"{what} takes a larger sample: set select.private_m, to inf for all {n} private examples")
