"""Wavelet scattering: the transform against convolutions written out and against kymatio's values, and the model that
needs no weights."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from pubsel.cli import main
from pubsel.data import Source, Split
from pubsel.data.features import embed, load_backbone, of_source
from pubsel.messages import UsageError, UserError
from pubsel.models.scattering import grouped, scattering
from pubsel.settings.keys import Backbone, Convert
from pubsel.settings.keys import Scattering as Settings
from pubsel.settings.schema import check

CPU = torch.device("cpu")
DEFAULT = Settings(2, 8, 2, True, 27)


def backbone(size=None, **changes):
    return Backbone("scattering", input_size=size, scattering=dataclasses.replace(DEFAULT, **changes))


def pictures(*shape, seed=0):
    return torch.from_numpy(np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8))


def features_of(x, like=None, **changes):
    return embed(x, load_backbone(backbone(**changes), "", CPU, like))


# The transform


def gaussian_wave(h, w, sigma, angle, frequency, slant):
    """A wave under a Gaussian at every place of a torus, [h, w], summed over its windings."""
    total = np.zeros((h, w), complex)
    for a in range(-3, 4):
        for b in range(-3, 4):
            y, x = np.mgrid[a * h : a * h + h, b * w : b * w + w].astype(float)
            along, across = y * np.cos(angle) + x * np.sin(angle), x * np.cos(angle) - y * np.sin(angle)
            total += np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2) + 1j * frequency * along)
    return total * slant / (2 * np.pi * sigma**2)


def convolved(u, kernel):
    """A circular convolution, one shift at a time."""
    result = np.zeros(u.shape, complex)
    for a, row in enumerate(kernel):
        for b, value in enumerate(row):
            result += value * np.roll(u, (a, b), (0, 1))
    return result


def at_every(kernel, step):
    """The kernel for signals at every `step`-th place: its lowest frequencies."""
    spectrum = np.fft.fft2(kernel)
    for side in (0, 1):
        n = spectrum.shape[side]
        frequencies = np.rint(np.fft.fftfreq(n) * n)
        low = (frequencies >= -(n // step / 2)) & (frequencies < n // step / 2)
        spectrum = np.compress(low, spectrum, side)
    return np.fft.ifft2(spectrum)


def by_convolutions(x, J, L, order):
    """Scattering of an image [h, w] by its definition (Bruna and Mallat, Section 2)."""
    sides = [(side // 2**J + 2) * 2**J for side in x.shape]
    x = np.pad(x, [((m - n) // 2, (m - n + 1) // 2) for m, n in zip(sides, x.shape, strict=True)], mode="reflect")

    def wavelet(j, t):
        settings = (0.8 * 2**j, (L // 2 - 1 - t) * math.pi / L)
        wave, bump = (gaussian_wave(*sides, *settings, xi, 4 / L) for xi in (0.75 * math.pi / 2**j, 0))
        return wave - wave.sum() / bump.sum() * bump

    def smooth(u, j):
        step = 2 ** (J - j)
        low = gaussian_wave(*sides, 0.8 * 2 ** (J - 1), 0, 0, 1)
        return convolved(u, at_every(low, 2**j)).real[::step, ::step][1:-1, 1:-1]

    first, second = [smooth(x, 0)], []
    for i in range(J):
        for t in range(L):
            u = np.abs(convolved(x, wavelet(i, t)))[:: 2**i, :: 2**i]
            first.append(smooth(u, i))
            for j in range(i + 1, J) if order == 2 else ():
                for s in range(L):
                    step = 2 ** (j - i)
                    v = np.abs(convolved(u, at_every(wavelet(j, s), 2**i)))[::step, ::step]
                    second.append(smooth(v, j))
    return np.stack(first + second)


@pytest.mark.parametrize(
    ("h", "w", "J", "L", "order"), [(9, 12, 2, 3, 2), (8, 8, 2, 4, 1), (6, 5, 1, 2, 2), (17, 12, 3, 2, 2)], ids=str
)
def test_it_is_what_its_convolutions_give(h, w, J, L, order):
    x = np.random.RandomState(0).rand(2, h, w)
    want = np.stack([by_convolutions(image, J, L, order) for image in x])
    channels = 1 + J * L + (L * L * J * (J - 1) // 2 if order == 2 else 0)
    assert want.shape == (2, channels, h >> J, w >> J)
    given = scattering(torch.from_numpy(x).float(), J, L, order)
    torch.testing.assert_close(given, torch.from_numpy(want).float(), rtol=1e-4, atol=1e-6)


# of kymatio 0.3.0, Scattering2D(J, (16, 12), L)(x)[0, :, 0, 0], eight of all, for x[a, b] = sin(a^2 + 3 b) / 2 + 1 / 2
KYMATIO = {
    (1, 8): [0.534415, 0.0773899, 0.061763, 0.00740783, 0.00615718, 0.00758791, 0.0614666, 0.0763537],
    (2, 8): [0.502323, 0.0031935, 0.00556828, 0.0020424, 0.000873736, 0.000177201, 0.00274737, 0.00596001],
    (3, 6): [0.499823, 0.000431614, 0.00375984, 0.000213508, 0.00117928, 0.0135397, 0.00716165, 0.000199951],
}


@pytest.mark.parametrize(("J", "L"), KYMATIO)
def test_it_is_kymatios(J, L):
    a, b = torch.arange(16.0)[:, None], torch.arange(12.0)
    x = (torch.sin(a**2 + 3 * b) / 2 + 0.5)[None]
    given = scattering(x, J, L, 2)[0, :, 0, 0]
    want = torch.tensor(KYMATIO[J, L])
    torch.testing.assert_close(given[:: len(given) // 8][:8], want, rtol=2e-4, atol=1e-7)


def test_groups_are_those_of_group_normalisation():
    s = torch.rand(3, 81, 7, 7)
    torch.testing.assert_close(grouped(s, 27), torch.nn.functional.group_norm(s, 27))
    uneven = grouped(s[:, :7], 3)  # 3, 2 and 2 channels
    for part in uneven.split([3, 2, 2], 1):
        assert part.mean((1, 2, 3)).abs().max() < 1e-5
        torch.testing.assert_close(part.var((1, 2, 3), correction=0), torch.ones(3), rtol=1e-2, atol=0)


# The model


def test_an_example_has_the_same_features_in_any_company():
    x = pictures(70, 1, 28, 28)
    torch.testing.assert_close(features_of(x)[40:41], features_of(x[40:41]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "d"),
    [
        ((1, 28, 28), 81 * 49),
        ((3, 32, 32), 3 * 81 * 64),
        ((1, 8, 8), 81 * 4),
        ((3, 512, 512), 3 * 81 * 64),
        ((1, 20, 31), 81 * 35),
        ((1, 33, 8), 81 * 64),
        ((3, 5, 5), 3 * 81),
    ],
    ids=str,
)
def test_images_of_any_side_have_so_many_features(shape, d):
    given = features_of(pictures(2, *shape))
    assert given.shape == (2, d)
    assert torch.isfinite(given).all()
    assert not torch.equal(given[0], given[1])


def test_each_setting_has_its_effect():
    x = pictures(2, 3, 32, 32)
    assert features_of(x, J=3, groups=7).shape == (2, 3 * 217 * 16)
    assert features_of(x, L=4).shape == (2, 3 * 25 * 64)
    assert features_of(x, order=1).shape == (2, 3 * 17 * 64)
    assert features_of(x, colour=False).shape == (2, 81 * 64)
    assert features_of(x, size=16).shape == (2, 3 * 81 * 16)
    assert features_of(pictures(2, 1, 28, 28), groups=None).min() > -1e-6  # moduli, and a mean of pixels
    grey = x[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(features_of(grey, colour=False), features_of(x[:, :1]), rtol=1e-3, atol=1e-3)


def test_each_setting_and_the_version_decide_the_key(monkeypatch):
    changes = ({}, {"J": 1}, {"L": 4}, {"order": 1}, {"colour": False}, {"groups": 9}, {"groups": None}, {"size": 16})
    keys = [load_backbone(backbone(**change), "", CPU).key for change in changes]
    keys.append(load_backbone(backbone(), "", CPU, (1, 28, 28)).key)
    monkeypatch.setattr("pubsel.models.scattering.VERSION", 0)
    keys.append(load_backbone(backbone(), "", CPU).key)
    assert len(set(keys)) == len(keys) == 10


def test_public_images_come_in_the_shape_of_the_private_ones(tmp_path):
    x = pictures(6, 3, 40, 36)
    y = torch.arange(6) % 2
    source = Source(Split(x, y), Split(x[:3], y[:3]), 2, "accuracy", (0.5,) * 3, (0.5,) * 3, ())
    given = of_source("some", source, backbone(), str(tmp_path), CPU, print, (1, 28, 28))
    assert given.train.x.shape == (6, 81 * 49)
    assert given.notes == ("some 40x36x3 -> 28x28x1, scaled to cover, bilinear",)
    as_it_is = of_source("some", source, backbone(), str(tmp_path), CPU, print, (3, 40, 36))
    assert as_it_is.train.x.shape == (6, 3 * 81 * 64)
    assert as_it_is.notes == ()
    with pytest.raises(UsageError, match="convert=exact: some has images 40x36x3, the private data 28x28x1"):
        of_source("some", source, backbone(), str(tmp_path), CPU, print, (1, 28, 28), Convert.exact)


@pytest.mark.parametrize(
    ("changes", "shape", "says"),
    [
        ({"J": 3}, (1, 8, 8), r"scattering\.J=3: images of 8x8x1 are too small.*exceed 2\^J=8: lower J"),
        ({"J": 4, "size": 16}, (1, 28, 28), r"scattering\.J=4: images of 28x28x1"),
        ({"J": 1}, (1, 28, 28), r"scattering\.groups=27: there are 9 channels: lower it"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_images(changes, shape, says):
    with pytest.raises(UsageError, match=says):
        features_of(pictures(1, *shape), **changes)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architecture": "scattering"}, r"architecture=scattering: take model=scattering"),
        ({"architecture": "scattering", "scattering": dataclasses.asdict(DEFAULT), "crop": 0.5}, r"crop: .* ignores"),
        ({"architecture": "resnet18", "scattering": dataclasses.asdict(DEFAULT)}, r"not for resnet18"),
        ({"architecture": "scattering", "scattering": dataclasses.asdict(DEFAULT) | {"order": 3}}, r"order=3.*at most"),
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused(values, says):
    with pytest.raises(UsageError, match=says):
        load_backbone(check(Backbone, values), "", CPU)


def test_a_missing_weight_file_is_told_what_needs_none(tmp_path):
    asked = check(Backbone, {"architecture": "mobilenetv2_100", "checkpoint": "nowhere.safetensors"})
    with pytest.raises(UserError, match=r"nowhere.*no such file.*; model=mobilenetv2 fetches .*; model=scattering"):
        load_backbone(asked, str(tmp_path), CPU)


PAIR = ["pair.private=digits", "pair.m=100"]
WORDS = ["model=scattering", "distance=none", "training=pillar", "training.steps=20", "threads=1"]


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm=pillar", "algorithm.k=20", "pair.public=digits", "pair.take=train"],
        ["algorithm=pillar", "algorithm.k=20", "pair.public=photo_patches"],  # larger images
        ["algorithm=dp_sgd_clip1", "pair.public=null"],
    ],
    ids=str,
)
def test_a_private_classifier_learns_from_it(more, folder, capsys):
    words = ["run", *PAIR, *WORDS, *more, "epsilon=8", f"data_root={folder}", "training.learning_rate=2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    accuracy = float(text.partition("accuracy ")[2].split(" %")[0])
    assert accuracy > 60


def test_a_rank_by_it_finds_the_private_set_itself_nearest(folder, capsys):
    words = ["private=digits", "public=[photo_patches,digits]", "model=scattering", "distance=frechet"]
    assert main(["rank", *words, "distance.m=100", f"data_root={folder}", "threads=1"]) == 0
    order = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith(("digits", "photo_"))]
    assert order == ["digits", "photo_patches"]
