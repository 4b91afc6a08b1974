"""PPGD. Wang and Zhou: Differentially Private Learning with Small Public Data, AAAI 2020 (PPSGD), with full batches,
after what AdaMix says of it (Sections 2, 3.2 and 4): private training whose clip norm follows the mean public gradient,
then public training that stays near its result. Gradients and learning rates are of sums."""

from dataclasses import dataclass

from pubsel.algorithms import Mechanism, View
from pubsel.algorithms.adamix import ABOUT_RATE, OnFeatures, public_gradient, train_on_public
from pubsel.settings.keys import MOST_EPOCHS
from pubsel.settings.schema import setting


@dataclass
class PPGD(OnFeatures):
    """Settings of PPGD."""

    clip_factor: float = setting("the clip norm is this factor times the norm of the mean public gradient", over=0)
    finish_epochs: int = setting(
        "full-batch epochs on public data after private training", at_least=0, at_most=MOST_EPOCHS
    )
    finish_rate: float | None = setting(ABOUT_RATE.format("finish_epochs"), over=0)
    reuse: float = setting(
        "penalty reuse / 2 |w - w_private|^2, which keeps the weights near the private result", at_least=0
    )

    @property
    def null_rate(self) -> tuple[str, float] | None:
        return ("finish_rate", self.reuse) if self.finish_rate is None and self.finish_epochs > 0 else None

    def check(self, view: View) -> None:
        view.labelled(self.name)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD: the clip norm is that of public gradients. What follows after training is
        post-processing."""
        public = view.labelled(self.name)
        mean_norm = float(public_gradient(view.gradients, public).norm()) / len(public.x)
        plain = self.clipped(view, max(self.clip_factor * mean_norm, 1e-12))
        return plain._replace(decode=lambda mean: plain.decode(mean * view.batch_size))  # of the sum

    def finish(self, view: View) -> None:
        train_on_public(view, view.labelled(self.name), self.finish_epochs, self.finish_rate, self.reuse)
