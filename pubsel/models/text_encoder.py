"""Features of texts from a frozen encoder of transformers, named hf:NAME (of the hub) or hf:./FOLDER.

A text's numbers depend on the text alone: it is padded to its own length, rounded up, in a batch that has the same
shape whatever the other texts are.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pubsel.files import DAMAGE, ProgressLine, digest, file_digest, reading
from pubsel.messages import UserError, needs_extra
from pubsel.models.weights import NOT_HERE, digest_of_weights
from pubsel.settings import FETCHES
from pubsel.settings.identity import digest_of
from pubsel.settings.keys import Backbone

PREFIX = "hf:"  # of model.backbone.architecture
HUB = re.compile(rf"{PREFIX}\w[\w.-]*(/\w[\w.-]*)?")  # of a name of the hub; a folder begins with ., / or ~
FILES = ["*.json", "*.txt", "*.model", "model*.safetensors"]  # that are fetched
POOLED = ("pooler.",)  # weights that are not used
BATCH = 32
STEP = 16  # tokens, to a multiple of which a text is padded
LONGEST = 512  # tokens; what follows is cut off
MEAN, FIRST = "mean", "first"  # of the tokens of a text
POOLING = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": FIRST}  # of sentence-transformers


class TextEncoder(NamedTuple):
    """A frozen encoder of texts. longest: tokens of a text that are read; pooling: MEAN or FIRST; weights: a digest of
    all that decides its features."""

    net: nn.Module
    tokenizer: Any
    longest: int
    pooling: str
    device: torch.device
    weights: str

    @torch.no_grad()
    def features(self, texts: Sequence[str], what: str = "texts") -> Tensor:
        """Return the features of texts, float32 [n, d]. what: names them in messages. UserError if they are not
        finite."""
        tokens = self.tokenizer(list(texts), truncation=True, max_length=self.longest)["input_ids"]
        padded = [min(self.longest, STEP * max(1, math.ceil(len(ids) / STEP))) for ids in tokens]
        order = sorted(range(len(tokens)), key=padded.__getitem__)

        progress, parts = ProgressLine(f"features of {what}", len(tokens), of="texts"), list[Tensor]()
        for batch in _batches(order, padded):
            length = padded[batch[0]]
            ids = torch.full((BATCH, length), self.tokenizer.pad_token_id)
            mask = torch.zeros(BATCH, length, dtype=torch.int64)
            for row in range(BATCH):  # the last text fills up the batch
                of_row = torch.tensor(tokens[batch[min(row, len(batch) - 1)]], dtype=torch.int64)
                ids[row, : len(of_row)], mask[row, : len(of_row)] = of_row, 1
            parts.append(self.pooled(ids.to(self.device), mask.to(self.device))[: len(batch)].cpu())
            progress.add(len(batch))

        rows = torch.cat(parts)
        if not rows.isfinite().all():
            raise UserError(f"the features of {what} are not finite: check model.backbone.architecture")
        return rows[torch.tensor(order).argsort()]

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the features of new texts."""
        return self.features(texts)

    def pooled(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the features, [n, d], of texts by their tokens [n, t]. mask: 1 for a token, 0 after the last one."""
        hidden = self.net(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask[..., None] if self.pooling == MEAN else (mask.cumsum(1) == 1).mul(mask)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _batches(order: Sequence[int], padded: Sequence[int]) -> Iterator[list[int]]:
    """Yield at most BATCH places of texts of one padded length, in an order in which they are sorted by it."""
    batch = list[int]()
    for place in order:
        if batch and (len(batch) == BATCH or padded[place] != padded[batch[0]]):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def load_text_encoder(backbone: Backbone, device: torch.device) -> TextEncoder:
    """Return the encoder of `backbone`; its checkpoint is a folder in place of the one that it names. Nothing is
    fetched unless FETCHES is set. UserError if a file or a package is absent."""
    key = f"model.backbone.architecture={backbone.architecture}"
    try:
        import transformers
    except ImportError:
        raise UserError(f"{key}: needs transformers: {needs_extra('text')}") from None
    folder = Path(backbone.checkpoint).expanduser() if backbone.checkpoint else _folder(key, backbone.architecture)
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {folder} has no config.json: give the folder that transformers has saved it in")

    pooling = _pooling(folder)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        net, about = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=torch.float32
        )
    except Exception as error:  # whatever it says of files of others
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise UserError(f"{key}: transformers cannot read {folder} ({reason}): take another encoder") from None
    if absent := [name for name in about["missing_keys"] if not name.startswith(POOLED)]:
        raise UserError(f"{key}: {folder} lacks the weights {absent[0]}: take another encoder")

    net = (net.get_encoder() if net.config.is_encoder_decoder else net).eval().requires_grad_(False).to(device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    longest = min(tokenizer.model_max_length, getattr(net.config, "max_position_embeddings", LONGEST), LONGEST)
    decides = {"weights": digest_of_weights(net, ["pooler"]), "words": tokenizer.get_vocab()}
    weights = digest_of(decides | {"longest": longest, "pooling": pooling})
    return TextEncoder(net, tokenizer, longest, pooling, device, weights)


def _folder(key: str, architecture: str) -> Path:
    """Return the folder with the files of an encoder."""
    name = architecture.removeprefix(PREFIX)
    if not HUB.fullmatch(architecture):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, local_files_only=not FETCHES.get()))
    except Exception as error:  # whatever the network says
        if not FETCHES.get():
            raise UserError(f"{key}: {NOT_HERE}") from None
        reason = str(error).partition("\n")[0][:100] or type(error).__name__
        raise UserError(f"{key}: its files cannot be fetched ({reason}): give hf:./FOLDER") from None


def _pooling(folder: Path) -> str:
    """Return how the numbers of tokens become those of a text: as the modules of sentence-transformers say, or by their
    mean. UserError for modules that are not known here."""
    if not (folder / "modules.json").is_file():
        return MEAN
    with reading(folder / "modules.json", "take another encoder", (*DAMAGE, LookupError, TypeError)):
        modules = {
            part["type"].rpartition(".")[2]: part["path"] for part in json.loads((folder / "modules.json").read_text())
        }
        how = json.loads((folder / modules["Pooling"] / "config.json").read_text())
        known = [POOLING.get(name) for name, used in how.items() if name.startswith("pooling_mode") and used is True]
    # rows of one norm are made of the features later in any case
    if (others := modules.keys() - {"Transformer", "Pooling", "Normalize"}) or len(known) != 1 or known[0] is None:
        raise UserError(
            f"{folder}: its {', '.join(sorted(others)) or 'Pooling'} is not known here: take another encoder"
        )
    return known[0]


def name_of(architecture: str) -> str:
    """Return the name of the model on an encoder: other weights in a folder of the same name get another. UserError if
    it has none."""
    short = Path(as_published(architecture)).name.removeprefix(PREFIX)
    if HUB.fullmatch(architecture):
        return short
    folder = Path(architecture.removeprefix(PREFIX)).expanduser()
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no model.safetensors in it: give the folder that transformers has saved it in")
    return f"{short}-{digest(map(file_digest, files), size=4)}"


def as_published(architecture: str) -> str:
    """Return the name of an encoder without the path of a folder."""
    if HUB.fullmatch(architecture):
        return architecture
    return f"{PREFIX}./{Path(architecture.removeprefix(PREFIX)).name}"


def described_encoder(backbone: Backbone) -> tuple[dict[str, Any], str]:
    """Return how texts reach an encoder, and where its weights are from, without reading any."""
    how = {"features": f"mean of the tokens of a text, or the first if the encoder says so; at most {LONGEST} tokens"}
    if HUB.fullmatch(backbone.architecture) and not backbone.checkpoint:
        return how, f"https://huggingface.co/{backbone.architecture.removeprefix(PREFIX)}"
    return how, f"the folder {Path(backbone.checkpoint or backbone.architecture).name}, which is not published"
