"""Zero-shot weights from the names of classes (AdaMix, Section 3.3). Needs the extra `clip`."""

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from pubsel.messages import UsageError, UserError, needs_extra
from pubsel.models.weights import NOT_HERE, tensors_alone
from pubsel.settings import FETCHES


def zero_shot(
    classes: int, features: int, names: Sequence[str], model: str, pretrained: str | None, scale: float
) -> Tensor:
    """Return `text_weights` for a task; UsageError if classes have no names, or the weights are not of as many classes
    and features."""
    if not names:
        raise UsageError("classes of the private data have no names: give algorithm.class_names=[A,B,...]")
    weights = text_weights([name.replace("_", " ") for name in names], model, pretrained, scale)
    if weights.shape != (classes, features):
        raise UsageError(
            f"algorithm.class_names: {len(weights)} names, embeddings of {weights.shape[1]} dimensions; the task "
            f"has {classes} classes and {features} features: name each class, and take the same CLIP"
        )
    return weights


@torch.no_grad()
def text_weights(class_names: list[str], model: str, pretrained: str | None, scale: float) -> Tensor:
    """Return W = scale [enc(c_1), ..., enc(c_C)], [C, d]: unit text embeddings of open_clip's `model`, such as RN50,
    with its weights `pretrained`, such as openai, or a file of them (None: random).

    UserError if open_clip or the weights are not there; UsageError for a model that open_clip does not know.
    """
    try:
        import open_clip
    except ImportError:
        raise UserError(f"algorithm.class_names needs open_clip: {needs_extra('clip')}") from None

    if model not in open_clip.list_models():
        near = ", ".join(open_clip.list_models()[:5])
        raise UsageError(f"algorithm.text_model={model}: open_clip has no such model; it has {near}, ...")
    if not FETCHES.get() and not (pretrained is None or Path(pretrained).is_file()):
        raise UserError(f"algorithm.text_weights={pretrained}: {NOT_HERE}, or name a file")

    try:
        with tensors_alone():
            clip = open_clip.create_model(model, pretrained=pretrained).eval()
    except (OSError, RuntimeError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0][:100]
        raise UserError(f"algorithm.text_weights={pretrained}: no such weights of {model} here ({reason})") from None

    # Unit embeddings, as CLIP compares them with those of images.
    tokens = open_clip.get_tokenizer(model)(class_names)
    return scale * torch.nn.functional.normalize(clip.encode_text(tokens).float(), dim=1)
