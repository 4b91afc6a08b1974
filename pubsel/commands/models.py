"""`pubsel models PATTERN`: names of frozen encoders, with what decides whether one will do."""

from fnmatch import fnmatch

from pubsel.messages import UsageError
from pubsel.models.encoders import Encoder, encoder
from pubsel.settings.keys import ModelsConfig
from pubsel.settings.methods import with_backbone

TEXTS = "text_encoder"  # the option for texts, whose encoders the hub lists
MOST = 40  # rows, each of a network that is made


def run(settings: ModelsConfig) -> str:
    """Return the names that fit a pattern as a table: those of conf/model, then those of timm."""
    import pandas
    import timm

    # of a network with published weights each of these is a name
    pattern = settings.pattern or "*"
    pattern = pattern if set("*?[") & set(pattern) else f"*{pattern}*"
    names = [name for name in with_backbone() if fnmatch(name, pattern) and name != TEXTS]
    if settings.pattern is not None:
        pretrained = timm.list_models(pattern, pretrained=True, exclude_filters="*_enc")
        have = {name.partition(".")[0] for name in pretrained}
        names += pretrained
        names += [name for name in timm.list_models(pattern, exclude_filters="*_enc") if name not in have]
    if not names:
        raise UsageError(f"pattern={settings.pattern}: no name fits it: give a part of one, such as dinov2")

    rows = pandas.DataFrame([encoder(name, settings.data_root) for name in names[:MOST]], columns=Encoder._fields)
    numbers = ("dimension", "side", "parameters")
    rows = rows.assign(**{key: [f"{n:,.0f}" if n == n else "by image" for n in rows[key]] for key in numbers})
    more = f"\n\n{len(names) - MOST:,} more fit: give a longer pattern" if len(names) > MOST else ""
    if settings.pattern is None:
        more = "\n\npubsel models PATTERN lists networks of timm too, such as pubsel models dinov2"
    return rows.to_string(index=False) + more
