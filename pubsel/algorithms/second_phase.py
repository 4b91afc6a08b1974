"""Second-phase pre-training. Choosing Public Datasets for Private Machine Learning via Gradient Subspace Distance,
Section 5 and Figure 2: what trains of a pre-trained network is first trained on public data, with their labels, then on
private data by DP-SGD."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from pubsel.algorithms import Mechanism, View, needed
from pubsel.algorithms.dp_sgd import Clipping
from pubsel.data import Split
from pubsel.gradients.per_example import losses_of
from pubsel.messages import UsageError, UserError
from pubsel.models.trained import replaced_heads
from pubsel.settings.keys import MOST_EPOCHS
from pubsel.settings.schema import setting

Head = Enum("Head", ["auto", "own", "temporary"])


def supervised(model: nn.Module, public: Split, epochs: int, batch_size: int, rate: float, view: View) -> None:
    """Run Adam on the parameters of `model` that require gradients, on public images x [m, ...] with labels y; in
    place."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    for epoch in range(epochs):
        order = torch.from_numpy(view.random("second phase", epoch).permutation(len(public.x))).to(public.x.device)
        for chosen in order.split(batch_size):
            loss = losses_of(model(public.x[chosen]), public.y[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    # Private training has no use for these gradients, and may need their memory.
    for parameter in model.parameters():
        parameter.grad = None
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError("second-phase training on public data diverged: lower algorithm.public_rate")


@dataclass
class SecondPhase(Clipping):
    """Settings of second-phase pre-training and of the private fine-tuning after it."""

    clip_norm: float = setting("DP-SGD: bound C on the L2 norm of an example's gradient", at_least=1e-12)
    public_rate: float = setting(
        "learning rate of Adam on public data; the paper: 3e-3 for transformers, 5e-5 for CNNs", over=0, at_most=1e6
    )
    public_epochs: int = setting("passes over the public data", at_least=0, at_most=MOST_EPOCHS)
    public_batch: int = setting("public examples per step", at_least=1)
    head: Head = setting(
        "own: public data trains the head of the private task; temporary: it trains another head, which is thrown away "
        "afterwards; auto: own if public and private data are the same set, else temporary"
    )

    def numbers(self, view: View) -> int:
        return 3 * view.gradients.size  # gradient and moments of Adam

    def pretrain(self, view: View) -> None:
        """Train theta_0 on public images and labels (Section 5.1, Equation 3)."""
        public, model = needed(view.public, self.name), view.model
        if self.head == Head.own or (self.head == Head.auto and view.same_task):
            supervised(model, view.labelled(self.name), self.public_epochs, self.public_batch, self.public_rate, view)
            return

        classes = public.y.shape[1] if public.y.dim() == 2 else int(public.y.max()) + 1
        if public.y.dim() == 1 and int(public.y.min()) == classes - 1:
            raise UsageError(
                f"algorithm={self.name}: public images of one class, or of several tasks combined, teach nothing"
            )

        # The head for the public classes is thrown away: the network gets its first one back whatever happens.
        generator = torch.Generator().manual_seed(int(view.random("temporary head", 0).integers(2**63)))
        original = replaced_heads(model, classes, generator)
        try:
            supervised(model, public, self.public_epochs, self.public_batch, self.public_rate, view)
        finally:
            for name, layer in original.items():
                model.set_submodule(name, layer)

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD: the public phase reads no private example."""
        return self.clipped(view, self.clip_norm)
