"""Second-phase pre-training. Choosing Public Datasets for Private Machine Learning via Gradient Subspace Distance,
Section 5 and Figure 2: what trains of a pre-trained network is first trained on public data, with their labels, then on
private data by DP-SGD.

Public images without labels are trained on by their views, and the head alone may come before all else trains
privately: DP-RandP. Tang, Panda, Sehwag, Mittal: Differentially Private Image Classification by Learning Priors from
Random Processes, NeurIPS 2023, arXiv:2306.06076."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor, nn

from pubsel.algorithms import Mechanism, View, needed
from pubsel.algorithms.dp_sgd import Clipping
from pubsel.data import Split
from pubsel.data.augment import augmented
from pubsel.gradients.per_example import losses_of
from pubsel.messages import UsageError, UserError
from pubsel.models.trained import heads, replaced_heads
from pubsel.settings.keys import MOST_EPOCHS, Augment
from pubsel.settings.schema import setting

Loss = Callable[[nn.Module, Split, np.random.Generator], Tensor]
Head = Enum("Head", ["auto", "own", "temporary"])
EMBEDDING = 128  # outputs of the temporary head, of images without labels
SHARPNESS = 2.0  # t of uniformity


def by_labels(model: nn.Module, batch: Split, random: np.random.Generator) -> Tensor:
    """Return the mean loss of images with labels."""
    return losses_of(model(batch.x), batch.y).mean()


def by_views(model: nn.Module, batch: Split, random: np.random.Generator) -> Tensor:
    """Return alignment plus uniformity of two random views of each image, whose embeddings u_i and v_i have norm 1: the
    mean of |u_i - v_i|^2, and the log of the mean of exp(-t |z_i - z_j|^2) over pairs of different images, for z = u
    and z = v on average; of one image, alignment alone. Wang, Isola: Understanding Contrastive Representation Learning
    through Alignment and Uniformity on the Hypersphere, ICML 2020, arXiv:2005.10242."""
    u, v = (nn.functional.normalize(model(augmented(batch.x, list(Augment), random)), dim=1) for _ in range(2))
    alignment = (u - v).square().sum(1).mean()
    if len(u) == 1:
        return alignment
    first, second = (nn.functional.pdist(z).square().mul(-SHARPNESS).exp().mean().log() for z in (u, v))
    return alignment + (first + second) / 2


@dataclass
class SecondPhase(Clipping):
    """Settings of second-phase pre-training and of the private fine-tuning after it."""

    clip_norm: float = setting("DP-SGD: bound C on the L2 norm of an example's gradient", at_least=1e-12)
    public_rate: float = setting(
        "learning rate of Adam on public data; the paper: 3e-3 for transformers, 5e-5 for CNNs", over=0, at_most=1e6
    )
    public_epochs: int = setting("passes over the public data", at_least=0, at_most=MOST_EPOCHS)
    public_batch: int = setting("public examples per step", at_least=1)
    head_share: float = setting(
        "share of the private steps, the first ones, that train the head alone", default=0.0, at_least=0, at_most=1
    )
    head: Head = setting(
        "own: public data trains the head of the private task; temporary: it trains another head, which is thrown away "
        "afterwards; auto: own if public and private data are the same set, else temporary"
    )

    def numbers(self, view: View) -> int:
        return 3 * view.gradients.size  # gradient and moments of Adam

    def pretrain(self, view: View) -> None:
        """Train theta_0 on public images and labels (Section 5.1, Equation 3), or on their views if all have the same
        label, or those of several tasks are combined."""
        public, model = needed(view.public, self.name), view.model
        classes, loss = self.phase(view)
        if classes is None:
            self.train(view, public, loss)
            return

        # The temporary head is thrown away: the network gets its first one back whatever happens.
        generator = torch.Generator().manual_seed(int(view.random("temporary head", 0).integers(2**63)))
        original = replaced_heads(model, classes, generator)
        try:
            self.train(view, public, loss)
        finally:
            for name, layer in original.items():
                model.set_submodule(name, layer)

    def phase(self, view: View) -> tuple[int | None, Loss]:
        """Return the number of outputs of the temporary head, None for that of the task, and the loss. UsageError for
        public data or a network that cannot be trained so."""
        public = needed(view.public, self.name)
        if self.head == Head.own or (self.head == Head.auto and view.same_task):
            view.labelled(self.name)
            return None, by_labels

        classes, loss = public.y.shape[1] if public.y.dim() == 2 else int(public.y.max()) + 1, by_labels
        if public.y.dim() == 1 and int(public.y.min()) == classes - 1:
            classes, loss = EMBEDDING, by_views
            if public.x.dim() != 4:
                raise UsageError(
                    f"algorithm={self.name}: public examples of one class, or of several tasks combined, are trained "
                    "on by views of images: take a network for images, or public data with labels"
                )
        if not all(heads(view.model)):
            raise UsageError(
                f"algorithm.head={self.head.name}: a linear classifier is all head, which would be thrown away: take a "
                "network for images, or public data of the private task with algorithm.head=own"
            )
        return classes, loss

    def check(self, view: View) -> None:
        self.phase(view)
        if self.head_share > 0:
            self.of_head(view)

    def train(self, view: View, public: Split, loss_of: Loss) -> None:
        """Run Adam on the parameters of the model that require gradients, on public examples; in place. UserError if
        they stop being finite."""
        optimizer = torch.optim.Adam([p for p in view.model.parameters() if p.requires_grad], self.public_rate)
        for epoch in range(self.public_epochs):
            random = view.random("second phase", epoch)
            order = torch.from_numpy(random.permutation(len(public.x))).to(public.x.device)
            for chosen in order.split(self.public_batch):
                loss = loss_of(view.model, Split(public.x[chosen], public.y[chosen]), random)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        # free the memory of these gradients, which private training does not use
        for parameter in view.model.parameters():
            parameter.grad = None
        if not all(p.isfinite().all() for p in view.model.parameters()):
            raise UserError("second-phase training on public data diverged: lower algorithm.public_rate")

    def mechanism(self, view: View, step: int) -> Mechanism:
        """Return the mechanism of DP-SGD, since the public phase reads no private example; in the first steps, of the
        columns of the head: all others are zero before rows are clipped, and after the noise."""
        if step >= self.head_share * view.steps:
            return self.clipped(view, self.clip_norm)
        of_head = self.of_head(view)
        plain = self.clipped(view, self.clip_norm, of_head)
        return plain._replace(decode=lambda mean: plain.decode(mean) * of_head)

    def of_head(self, view: View) -> Tensor:
        """Return 1 for each column of the head, and 0 for all others, [p]. UsageError if the head does not train."""
        of_head = torch.zeros(view.gradients.size, device=next(view.model.parameters()).device)
        modules = [view.model.get_submodule(name) for name in heads(view.model)]
        in_head = {parameter for module in modules for parameter in module.parameters()}
        for name, columns in view.gradients.offsets.items():
            of_head[columns] = float(view.model.get_parameter(name) in in_head)
        if not of_head.any():
            raise UsageError("algorithm.head_share: the head does not train: name it in model.trained, or set 0")
        return of_head
