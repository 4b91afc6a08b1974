"""`pubsel models PATTERN`: names of frozen encoders, with what decides whether one will do."""

from fnmatch import fnmatch

from pubsel.messages import UsageError, needs_extra
from pubsel.models.encoders import Encoder, encoder, encoders_of_texts
from pubsel.settings.keys import ModelsConfig
from pubsel.settings.methods import with_backbone
from pubsel.settings.schema import nearest

TEXTS = "text_encoder"  # the option for texts, whose encoders the hub lists
MOST = 40  # rows, each of a network that is made
NUMBERS = ("dimension", "side", "parameters")
OTHER_TEXTS = (
    "of texts: features=hf:NAME takes any encoder of transformers on Hugging Face, features=hf:./FOLDER one that is "
    f"here ({needs_extra('text')})"
)


def run(settings: ModelsConfig) -> str:
    """Return the names that fit a pattern as tables: of images, those of conf/model, then those of timm; of texts.
    UsageError if none fits."""
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
    texts = encoders_of_texts(pattern)
    if not names and not texts:
        # a pattern is a part of a name as often as a name
        known = {*with_backbone(), *timm.list_models(exclude_filters="*_enc")} - {TEXTS}
        known |= {row.name for row in encoders_of_texts("*")}
        near = nearest(pattern.strip("*"), known | {part for name in known for part in name.split("_")})
        raise UsageError(f"pattern={settings.pattern}: no name fits it{near}: give a part of one, such as dinov2")

    parts = []
    for each in ([encoder(name, settings.data_root) for name in names[:MOST]], texts):
        rows = pandas.DataFrame(each, columns=Encoder._fields).drop(columns=["side"] if each is texts else [])
        numbers = [key for key in NUMBERS if key in rows]
        rows = rows.assign(**{key: [f"{n:,.0f}" if n == n else "by image" for n in rows[key]] for key in numbers})
        parts += [rows.to_string(index=False)] if each else []
    if len(names) > MOST:
        parts.append(f"{len(names) - MOST:,} more fit: give a longer pattern")
    if texts:
        parts.append(OTHER_TEXTS)
    if settings.pattern is None:
        parts.append("pubsel models PATTERN lists networks of timm too, such as pubsel models dinov2")
    return "\n\n".join(parts)
