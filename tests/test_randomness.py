"""Streams that repeat and never meet; Gaussian noise by tests that also reject wrong scales."""

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.privacy.randomness import SystemEntropy, normal, stream


def test_streams_repeat_and_differ():
    a = stream("run", "noise", 3).standard_normal(100)
    assert np.array_equal(a, stream("run", "noise", 3).standard_normal(100))
    for other in (stream("run2", "noise", 3), stream("run", "sample", 3), stream("run", "noise", 4)):
        assert abs(np.corrcoef(a, other.standard_normal(100))[0, 1]) < 0.4
    assert not np.array_equal(stream("a", "bc").random(3), stream("ab", "c").random(3))


@pytest.mark.parametrize("source", [stream("test", "noise"), SystemEntropy()], ids=["seeded", "system"])
def test_noise_is_standard_normal_and_the_test_rejects_other_scales(source):
    z = normal(source, 400_000, torch.device("cpu")).numpy()

    def fits(z):
        """Shape by Kolmogorov and Smirnov; scale by the chi-squared law of the sum of squares."""
        total = (z**2).sum()
        scale = 2 * min(stats.chi2.cdf(total, len(z)), stats.chi2.sf(total, len(z)))
        return min(stats.kstest(z, "norm").pvalue, scale) > 1e-6

    assert fits(z)
    for wrong in (z * 1.02, z * 0.98, z + 0.02, np.sign(z)):
        assert not fits(wrong)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.015


def test_system_entropy_is_uniform_and_never_repeats():
    u = SystemEntropy().random(100_000)
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    assert 0 <= u.min() < u.max() < 1
    assert not np.array_equal(SystemEntropy().random(8), SystemEntropy().random(8))
