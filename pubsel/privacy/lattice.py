"""Noise whose last digits reveal nothing: exact draws of whole numbers, and Gaussian noise on a lattice.

A sum plus noise in floating point may be a number that no noise can produce from a neighbour's sum, whatever the
deviation (Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy). Here sum and noise are
whole multiples of a step that is fixed beforehand. Their sum, rounded or not, is a function of a whole number. Each
whole number within 8.5 deviations of a sum is possible for it: the normal numbers of `randomness` are no larger, which
leaves out 2e-17 of their probability.

- Counts: `discrete_gaussian` and `discrete_laplace`, drawn exactly by integers alone.
- Sums over private examples: `noised`.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from pubsel.privacy.randomness import Normals, Source, below, normal, of_system

DRAWN = 2**17  # normal numbers at a time, 1 MiB
FINEST = 2.0**-16  # of a sensitivity: the most by which rounding to the lattice moves the difference of two sums


def coin(gamma: Fraction, source: Source) -> bool:
    """Return True with probability exp(-gamma), exactly (Canonne, Kamath, Steinke 2020, arXiv:2004.00010,
    Algorithm 1)."""
    while gamma > 1:
        if not coin(Fraction(1), source):
            return False
        gamma -= 1

    k = 1
    while below(gamma.denominator * k, source) < gamma.numerator:
        k += 1
    return k % 2 == 1


def discrete_laplace(epsilon: Fraction, source: Source) -> int:
    """Return a whole number z with probability proportional to exp(-epsilon |z|), exactly (Canonne, Kamath, Steinke
    2020, Algorithm 2)."""
    s, t = epsilon.numerator, epsilon.denominator
    while True:
        first = below(t, source)
        if not coin(Fraction(first, t), source):
            continue
        more = 0
        while coin(Fraction(1), source):
            more += 1
        size = (first + t * more) // s
        negative = below(2, source) == 1
        if size or not negative:  # zero once, not twice
            return -size if negative else size


def discrete_gaussian(sigma: int, source: Source) -> int:
    """Return a whole number z with probability proportional to exp(-z^2 / (2 sigma^2)), exactly, sigma >= 1 (Canonne,
    Kamath, Steinke 2020, Algorithm 3).

    Counts have steps of 2^-30 (`people.UNIT`), so that sigma is 2^26 or more. A vector of m such numbers is then as
    private as Gaussian noise of this deviation, but for what `accountant.ROUNDING` covers: Gaussian noise that is
    rounded to whole numbers is post-processing of it, since counts are whole. The chance of z is then the integral of
    the density over [z - 1/2, z + 1/2], which is that of z here times exp((z^2 / sigma^2 - 1) / (24 sigma^2)), to first
    order. Up to 40 deviations, beyond which the chance is e^-800, these exponents are below 2^-25 together for a
    million counts.
    """
    t = sigma + 1
    while True:
        z = discrete_laplace(Fraction(1, t), source)
        if coin(Fraction((abs(z) * t - sigma**2) ** 2, 2 * sigma**2 * t**2), source):
            return z


def step_of(p: int, sensitivity: float) -> float:
    """Return the step of the lattice for sums of p numbers: a power of two, at most FINEST * sensitivity / sqrt(p)."""
    return 2.0 ** math.floor(math.log2(FINEST * sensitivity / math.sqrt(p)))


def noised(total: Tensor, scale: float, sensitivity: float, source: Normals) -> Tensor:
    """Return a sum over private examples, float64 [p], plus Gaussian noise of deviation `scale`; in place.

    With noise of the operating system, both are rounded to a lattice before they are added. By its step (`step_of`),
    the rounding moves the difference of two sums by FINEST of the sensitivity at most in L2: with n^2 2^-52 of the
    summation, less than ROUNDING. Both are multiples of the step, a power of two, so their sum in floating point is a
    function of the exact one. Noise is rounded down: each step then contains as many possible draws as the next one,
    unlike with rounding to even.

    Seeded noise is added unchanged, so that its records can be repeated. Its guarantee is against people who cannot
    compute the noise; the float32 of each weight hides the last digits of a float64.
    """
    # what is drawn stays in the cache; on a GPU it comes at once, since it was drawn ahead
    step = step_of(len(total), sensitivity)
    for part in total.split(len(total) if total.is_cuda else DRAWN):
        noise = normal(source, len(part), total.device)
        if not of_system(source):
            part.add_(noise, alpha=scale)
        else:
            torch.round_(part.div_(step)).add_(noise.mul_(scale / step).floor_()).mul_(step)
    return total
