"""Streams that repeat and never meet; Gaussian noise by tests that also reject wrong scales.

The operating system's draws differ each time: what is tested of them fails by chance once in 1e9 runs.
"""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from pubsel.privacy import randomness
from pubsel.privacy.randomness import Ahead, SystemEntropy, content, normal, secret, stream, without_gaps
from tests.synthetic import secret_named


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
        return min(stats.kstest(z, "norm").pvalue, scale) > 1e-9

    assert fits(z)
    for wrong in (z * 1.02, z * 0.98, z + 0.02, np.sign(z)):
        assert not fits(wrong)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.015


def test_system_entropy_is_uniform_and_never_repeats():
    u = SystemEntropy().random(100_000)
    assert stats.kstest(u, "uniform").pvalue > 1e-9
    assert 0 <= u.min() < u.max() < 1
    assert not np.array_equal(SystemEntropy().random(8), SystemEntropy().random(8))


def keys(monkeypatch):
    """What the operating system is asked for from now on."""
    urandom, taken = os.urandom, list[bytes]()
    monkeypatch.setattr(os, "urandom", lambda n: (taken.append(urandom(n)), taken[-1])[1])
    return taken


def in_a_fork(source):
    """The bytes that a forked process draws from a source."""
    mine, other = os.pipe()
    if not (child := os.fork()):
        os.write(other, source.bytes(64))
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(mine, 64)


def test_no_two_streams_of_the_operating_system_share_a_key(monkeypatch):
    """A new key of 256 bits and a counter for each purpose and step, for a copy, and after a fork."""
    taken, secret = keys(monkeypatch), secret_named(secure=True)
    sources = [secret("noise", 3), secret("noise", 3), secret("noise", 4), secret("sample", 3)]
    drawn = [source.bytes(64) for source in sources]
    again = [pickle.loads(pickle.dumps(sources[0])), copy.copy(sources[0]), copy.deepcopy(sources[0])]
    drawn += [source.bytes(64) for source in again]
    assert sorted(map(len, taken)) == [16] * 7 + [32] * 7
    drawn += [in_a_fork(sources[0]), in_a_fork(sources[0]), sources[0].bytes(64)]
    assert len(set(drawn)) == 10


def test_the_stream_is_that_of_aes_256_in_counter_mode(monkeypatch):
    """NIST SP 800-38A, F.5.5: the key stream is the ciphertext of zeros."""
    given = {
        32: "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        16: "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
    }
    monkeypatch.setattr(os, "urandom", lambda n: bytes.fromhex(given[n]))
    stream_of = "0bdf7df1591716335e9a8b15c860c502" + "5a6e699d536119065433863c8f657b94"
    source = SystemEntropy()
    assert (source.bytes(7) + source.bytes(25)).hex() == stream_of
    first = int.from_bytes(bytes.fromhex(stream_of)[:8], "little")
    assert SystemEntropy().random(1).tolist() == [(first >> 11) * 2.0**-53]


def test_what_no_lattice_follows_is_the_sum_of_four(monkeypatch):
    monkeypatch.setattr(SystemEntropy, "standard_normal", lambda self, n: np.arange(float(n)))
    assert without_gaps(SystemEntropy(), 3).tolist() == [9, 11, 13]
    assert np.array_equal(without_gaps(stream("a", "b"), 3), stream("a", "b").standard_normal(3))


CHANGES = {  # all that decides a release, and another value of it
    "what": ("training", "choice"),
    "settings": ({"seed": 0}, {"seed": 1}),
    "private": ([torch.arange(6)], [torch.arange(1, 7)]),
    "public": ([torch.ones(2)], [torch.zeros(2)]),
    "weights": ({"weight": torch.ones(3)}, {"weight": torch.zeros(3)}),
    "plan": ({"steps": 3}, {"steps": 4}),
    "code": ("a digest", "another"),
    "place": ("cpu", "cuda"),
}


@pytest.mark.attack
@pytest.mark.parametrize("name", CHANGES)
def test_each_thing_that_decides_a_release_decides_its_noise_alone(name):
    """Two releases that differ in one of them only would otherwise share their noise."""

    def noise(changed=""):
        values = {key: pair[key == changed] for key, pair in CHANGES.items()}
        streams = {key: values.pop(key) for key in ("code", "place")}
        return secret(**values, streams=streams, secure=False)("noise", 3).standard_normal(20_000)

    assert np.array_equal(noise(), noise())
    assert abs(np.corrcoef(noise(), noise(name))[0, 1]) < 0.05


def test_a_fingerprint_tells_numbers_shapes_and_types_apart():
    """The same bytes may be other examples."""
    tensors = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(6, dtype=torch.int32), torch.ones(6)]
    assert len({content(tensor) for tensor in tensors}) == len(tensors)
    assert content(torch.zeros(2), torch.zeros(4)) != content(torch.zeros(4), torch.zeros(2))
    assert content(torch.zeros(6)) == content(torch.zeros(6))


def test_a_fingerprint_is_of_all_rows(monkeypatch):
    monkeypatch.setattr(randomness, "HASHED", 64)
    x = torch.arange(100.0).reshape(50, 2)
    for row in (0, 7, 8, 49):
        other = x.clone()
        other[row, 1] += 1
        assert content(other) != content(x)


def test_noise_that_is_drawn_ahead_is_the_same_noise():
    """Also where a step needs more numbers than the thread has drawn for it, and none is drawn beyond the last."""
    steps = []

    def source(purpose, step):
        steps.append(step)
        return stream("key", purpose, step)

    ahead = Ahead(source, 4)
    for step, n in enumerate([5, 5, 7, 7]):
        drawn = normal(ahead("noise", step), n, torch.device("cpu"))
        assert torch.equal(drawn, normal(stream("key", "noise", step), n, torch.device("cpu")))
    assert sorted(set(steps)) == [0, 1, 2, 3]


def test_several_steps_are_drawn_ahead_as_far_as_memory_allows(monkeypatch):
    """One core of the host draws slower than a GPU computes a step: 0.23 s for 10 million numbers of the system."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)

    def drawn_at_first(n):
        steps = []
        ahead = Ahead(lambda purpose, step: (steps.append(step), stream("key", purpose, step))[1], 100)
        ahead("noise", 0).standard_normal(n)
        first = list(steps)
        ahead("noise", 1).standard_normal(n)
        assert steps == [*first, len(first)]  # one more, which is one step further
        return len(first) - 1

    assert drawn_at_first(10) == randomness.DRAWERS
    monkeypatch.setattr(randomness, "AHEAD", 3 * 80)
    assert drawn_at_first(10) == 3
    assert drawn_at_first(1000) == 1


def test_an_error_of_the_thread_that_draws_is_raised_where_the_noise_is_used():
    class Broken:
        def standard_normal(self, n):
            raise OSError("no entropy")

    ahead = Ahead(lambda purpose, step: Broken() if step else stream("key", purpose, step), 3)
    ahead("noise", 0).standard_normal(2)
    with pytest.raises(OSError, match="no entropy"):
        ahead("noise", 1).standard_normal(2)


def test_numbers_by_place_are_those_of_the_cipher_whatever_other_places_there_are():
    """The block of NIST FIPS 197, C.3, and the uniform law."""
    key, block = bytes(range(32)), bytes.fromhex("00112233445566778899aabbccddeeff")
    place = np.frombuffer(block, dtype="<i8")[None]
    want = np.frombuffer(bytes.fromhex("8ea2b7ca516745bfeafc49904b496089"), dtype="<u4") / 2**32
    assert np.array_equal(randomness.by_place(key, place)[0], want)
    places = np.stack([np.arange(50_000) // 7, np.arange(50_000) % 7], 1)
    numbers = randomness.by_place(key, places)
    assert np.array_equal(randomness.by_place(key, places[123:124]), numbers[123:124])
    assert all(stats.kstest(column, "uniform").pvalue > 1e-9 for column in numbers.T)
    assert len(np.unique(numbers[:, 0])) > 49_900
