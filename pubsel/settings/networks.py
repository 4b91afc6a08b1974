"""Names and options of networks that settings may contain.

Settings of a network come from the files of others too, such as config.json. None of these may name a file, an address
or a function to timm.create_model: whatever is not listed here is rejected, wherever it comes from.
"""

import re
from collections.abc import Mapping
from typing import Any

from pubsel.messages import UsageError

NAME = re.compile(r"\w[\w.]*")  # of a network in timm; hf-hub:... and local-dir:... are none
WORD = re.compile(r"\w{0,30}")
FEW = 8  # stages of a network with a number for each
# Options that are whole numbers, or a list of them, and the largest that each may be.
SIZES = {
    **dict.fromkeys(("dims", "embed_dim", "channels", "num_features", "head_hidden_size"), 8192),
    **dict.fromkeys(("base_width", "stem_width"), 1024),
    **dict.fromkeys(("depth", "depths", "layers", "num_heads", "cardinality"), 128),
    **dict.fromkeys(("window_size", "output_stride", "reg_tokens"), 64),
    **{"img_size": 4096, "patch_size": 256, "num_classes": 1_000_000, "block_reduce_first": 16, "width_factor": 16},
}
DROPPED = "drop_rate drop_path_rate attn_drop_rate proj_drop_rate pos_drop_rate patch_drop_rate".split()
# Options that are numbers, and the largest that each may be.
SHARES = {**dict.fromkeys(DROPPED, 1), "init_values": 10, "ls_init_value": 10, "mlp_ratio": 16}
WORDS = "global_pool pad_type act_layer norm_layer aa_layer stem_type weight_init".split()
SWITCHES = (
    "class_token no_embed_class qkv_bias qk_norm dynamic_img_size fc_norm avg_down antialias replace_stem_pool "
    "fix_group_fanout pre_norm final_norm preact"
).split()
OPTIONS = (*SIZES, *SHARES, *WORDS, *SWITCHES)


def check_network(key: str, architecture: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for a malformed name of a network, an option that is not in OPTIONS, or a value out of range.
    key: of the settings, such as model.backbone."""
    if not NAME.fullmatch(architecture):
        raise UsageError(f"{key}.architecture={architecture[:100]}: a name of timm has letters, digits, _ and . only")
    shown = f"{key}.options={str(options)[:100]}"
    for name, value in options.items():
        if name not in OPTIONS:
            raise UsageError(f"{shown}: none of what may be set is {name[:30]}: {', '.join(sorted(OPTIONS))}")
        several = value if isinstance(value, list | tuple) else [value]
        if name in SWITCHES:
            fits, what = isinstance(value, bool), "true or false"
        elif name in WORDS:
            fits, what = value is None or (isinstance(value, str) and WORD.fullmatch(value) is not None), "a word"
        elif name in SHARES:
            fits, what = (
                type(value) in (int, float) and 0 <= value <= SHARES[name],
                f"a number from 0 to {SHARES[name]}",
            )
        else:
            fits = 0 < len(several) <= FEW and all(type(each) is int and 0 <= each <= SIZES[name] for each in several)
            what = f"a whole number, or up to {FEW} of them, from 0 to {SIZES[name]:,}"
        if not fits:
            raise UsageError(f"{shown}: {name} must be {what}")
