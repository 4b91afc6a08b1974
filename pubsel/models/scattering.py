"""Wavelet scattering: features of images without weights, for a linear classifier.

Bruna and Mallat: Invariant Scattering Convolution Networks, TPAMI 2013. Filters, padding and the order of channels are
those of kymatio (Andreux et al., JMLR 2020), which the transform equals; features are normalised as in Tramèr and
Boneh: Differentially Private Learning Needs Better Features, ICLR 2021.
"""

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

VERSION = 1  # raised if other features come out: those that are kept are then computed again
EPSILON = 1e-5  # added to the variance of a group, as torch's GroupNorm does


class Filters(NamedTuple):
    """The filters for images of one size, padded to sides that are multiples of 2^J.

    pad: left, right, top, bottom. psi[i, j]: [L, H / 2^i, W / 2^i], the wavelets of scale 2^j in the Fourier domain,
    for signals that are subsampled by 2^i. low[j]: matrices [h, H / 2^j] and [w, W / 2^j], from left and right the
    Gaussian of scale 2^J on signals that are subsampled by 2^j, subsampled to [h, w], the padding cut off.
    """

    pad: tuple[int, int, int, int]
    psi: dict[tuple[int, int], Tensor]
    low: list[tuple[Tensor, Tensor]]


def scattering(x: Tensor, J: int, L: int, order: int) -> Tensor:
    """Return scattering coefficients [n, K, h / 2^J, w / 2^J] of x [n, h, w], whose sides are above 2^J.

    K = 1 + J L, with order 2 also L^2 J (J - 1) / 2: the image, |image * psi_j|, and ||image * psi_i| * psi_j| for
    i < j, all smoothed by the same Gaussian; angles last.
    """
    # filters depend on the size alone, and are made once for it
    pad, psi, low = filters(x.shape[-2], x.shape[-1], J, L, x.device)

    def smooth(u: Tensor, j: int) -> Tensor:
        rows, columns = low[j]
        return rows @ (u @ columns.T)

    u = F.pad(x[:, None], pad, mode="reflect")
    first, second = [smooth(u, 0)], []
    spectrum = torch.fft.fft2(u)
    for i in range(J):
        u = modulus(spectrum, psi[0, i], 2**i)  # [n, L, H / 2^i, W / 2^i]
        first.append(smooth(u, i))

        # The modulus of a wavelet's output has lower frequencies: only coarser wavelets find anything in it.
        if order == 2 and i < J - 1:
            inner = torch.fft.fft2(u[:, :, None])
            coarser = [smooth(modulus(inner, psi[i, j], 2 ** (j - i)), j) for j in range(i + 1, J)]
            second.append(torch.cat(coarser, 2).flatten(1, 2))

    return torch.cat([*first, *second], 1)


def modulus(spectrum: Tensor, psi: Tensor, k: int) -> Tensor:
    """Return |u * psi| at every k-th place, [..., L, h / k, w / k], for the spectrum [..., 1, h, w] of u and wavelets
    psi [L, h, w] in the Fourier domain."""
    h, w = spectrum.shape[-2] // k, spectrum.shape[-1] // k

    # Every k-th place of a signal: the mean over k x k blocks of its spectrum.
    total: Tensor | None = None
    for a, b in product(range(k), repeat=2):
        block = (..., slice(a * h, (a + 1) * h), slice(b * w, (b + 1) * w))
        # ONNX has no block of complex numbers that is all of them
        part = spectrum[block] * psi[block] if k > 1 else spectrum * psi
        total = part if total is None else total.add_(part)
    assert total is not None
    y = torch.fft.ifft2(total)

    return (y.real.square() + y.imag.square()).sqrt_() / k**2  # three times as fast as y.abs()


def grouped(s: Tensor, groups: int) -> Tensor:
    """Return s [n, K, h, w] with mean 0 and variance 1 over each group of adjoining channels of each image, as even
    as K divides: constants alone, in which no other example has a part."""
    return torch.cat([F.layer_norm(part, part.shape[1:], eps=EPSILON) for part in s.tensor_split(groups, 1)], 1)


@lru_cache(maxsize=4)
def filters(h: int, w: int, J: int, L: int, device: torch.device) -> Filters:
    """Return the Morlet filters for images of h x w pixels (Bruna and Mallat, Section 2.1)."""
    H, W = (((side >> J) + 2) << J for side in (h, w))
    pad = ((W - w) // 2, (W - w + 1) // 2, (H - h) // 2, (H - h + 1) // 2)

    angles = [(L // 2 - 1 - t) * math.pi / L for t in range(L)]
    full = []
    for j in range(J):
        # a wave under a Gaussian less what makes its mean 0; in the Fourier domain it is real
        frequencies = (0.75 * math.pi / 2**j, 0.0)
        pairs = [[_gabor(H, W, 0.8 * 2**j, angle, xi, 4 / L) for xi in frequencies] for angle in angles]
        waves = [wave - wave.sum() / envelope.sum() * envelope for wave, envelope in pairs]
        full.append(torch.stack([torch.fft.fft2(wave).real for wave in waves]))
    psi = {(i, j): _coarser(_coarser(full[j], i, -1), i, -2) for j in range(J) for i in range(j + 1)}

    low = [tuple(_smoothing(side, J, j).float().to(device) for side in (H, W)) for j in range(J)]
    return Filters(pad, {at: value.float().to(device) for at, value in psi.items()}, low)  # type: ignore[arg-type]


def _gabor(h: int, w: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """Return a wave under a Gaussian, sigma long along `angle` and sigma / slant across, periodic in h x w."""
    y = torch.arange(-2 * h, 3 * h, dtype=torch.float64)[:, None]
    x = torch.arange(-2 * w, 3 * w, dtype=torch.float64)
    along, across = y * math.cos(angle) + x * math.sin(angle), x * math.cos(angle) - y * math.sin(angle)

    gaussian = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    wave = gaussian * torch.exp(1j * frequency * along)
    return wave.reshape(5, h, 5, w).sum((0, 2))


def _smoothing(side: int, J: int, j: int) -> Tensor:
    """Return the matrix [side / 2^J - 2, side / 2^j] that smooths a periodic signal, subsampled by 2^j, by a Gaussian
    of scale 0.8 2^(J - 1), subsamples it by 2^(J - j) and cuts the padding off."""
    sigma, x = 0.8 * 2 ** (J - 1), torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    gaussian = torch.exp(-(x**2) / (2 * sigma**2)) / math.sqrt(2 * math.pi * sigma**2)
    phi = _coarser(torch.fft.fft(gaussian.reshape(5, side).sum(0)).real, j, -1)

    spectra = torch.fft.fft(torch.eye(len(phi), dtype=torch.float64), dim=0)
    return torch.fft.ifft(phi[:, None] * spectra, dim=0).real[:: 2 ** (J - j)][1:-1].contiguous()


def _coarser(spectrum: Tensor, i: int, dim: int) -> Tensor:
    """Return the lowest frequencies of a spectrum, a 2^i-th of all."""
    side = spectrum.shape[dim]
    kept = side >> i
    if kept == side:
        return spectrum
    half = kept // 2
    return torch.cat([spectrum.narrow(dim, 0, half), spectrum.narrow(dim, side - (kept - half), kept - half)], dim)
