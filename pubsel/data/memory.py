"""Data that a program has in memory: held under a name by their content, for as long as a command reads them.

The name is that of a table that is in no folder, so that all rules for a user's own data hold for it. Rows become a
table, whose columns are called "0", "1", ... if they have no names; texts become its column "text"; images and their
paths become a source of images.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pubsel.data.arrow import as_columns
from pubsel.data.findings import first_of
from pubsel.data.images import MOST, SUFFIXES, pixels_of
from pubsel.files import AT_ONCE, digest, gathered
from pubsel.messages import UsageError

if TYPE_CHECKING:
    import pandas as pd

NO_LABELS = "no labels"  # in place of labels of public examples that have none
LABEL, PERSON, PATH = "label of a row", "person", "path of an image"  # columns that are added to a table
TEXT = "text"  # the column of texts that are in no table
# columns of a data set of Hugging Face, if it has others too
EXAMPLES = ("image", "img", TEXT, "sentence", "review", "features", "embedding", "embeddings", "x")
LABELS = ("label", "labels", "y", "target")


class InMemory(NamedTuple):
    """Private or public examples in memory. frame: a table, with labels and people; or x: images, uint8 [n, c, h, w],
    whose table has these alone."""

    frame: pd.DataFrame
    x: Tensor | None = None

    @property
    def key(self) -> str:
        """Return a digest of the content."""
        import pandas as pd

        images = [] if self.x is None else [f"{tuple(self.x.shape)}", self.x.contiguous().numpy()]
        types = self.frame.dtypes.items()
        known = self.frame.astype({name: str for name, of in types if of.kind not in "fiub" or of == np.longdouble})
        values = pd.util.hash_pandas_object(known, index=False).to_numpy()
        return digest([*map(str, self.frame.columns), values, *images])


FOLDER = Path("in_memory")  # of the names that examples are held under
_HELD: dict[str, InMemory] = {}


def of_memory(name: str | Path) -> InMemory | None:
    """Return what is held under a name; None: nothing is."""
    return _HELD.get(str(name))


@contextmanager
def holding(*several: InMemory | None) -> Iterator[list[str]]:
    """Hold examples inside, and return their names; of None an empty one."""
    names = ["" if each is None else str(FOLDER / f"{each.key}.parquet") for each in several]
    _HELD.update({name: each for name, each in zip(names, several, strict=True) if each is not None})
    try:
        yield names
    finally:
        for name in names:
            _HELD.pop(name, None)


def examples_in(x: Any, y: Any = None, groups: Any = None) -> InMemory:
    """Return examples as they are held. x: rows of numbers (an array, a tensor or a sparse matrix [n, d], a pandas
    table), texts (a list, an array or a column of pandas), images (uint8 arrays or PIL images of one size, or a tensor
    [n, c, h, w]), paths of images, a pandas table with a column of these or of texts, or a data set of torch or of
    Hugging Face, of which each item has its label too. y: labels [n], or 0/1 [n, labels] with nan for not known, also
    in a pandas table, or the name of a column; None: they are in x; NO_LABELS: none are needed. groups: whose each
    example is, [n]. UsageError if it is of another kind."""
    import pandas as pd

    if isinstance(x, str | Path):
        raise UsageError(f"y: {x} is one path, whose labels are in it: leave y out, or name its column by label=")
    if isinstance(x, Mapping):
        raise UsageError(f"x: {type(x).__name__} of {first_of(x, 5)}: give one of them, such as x[{next(iter(x))!r}]")
    if has_columns(x):
        x, y = of_columns(x, y)
    x = unwrapped(x)
    for name, values in (("y", y), ("groups", groups)):
        _check_order(name, values, x)
    if isinstance(y, str) and y == NO_LABELS:
        y = None
    elif y is None and hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, pd.DataFrame):
        x, y = _of_items(x)
    whose = groups is None  # the index may say it
    if isinstance(x, pd.DataFrame):
        frame, images = _spread(named_columns("x", x, whose)), None
        if isinstance(y, str) and y not in frame:
            raise UsageError(f"y: x has no column {y}: {first_of(frame, 10)}")
        if isinstance(y, str):
            y, frame = frame[y], frame.drop(columns=y)
        strings = {name: strings_in(frame[name]) or [""] for name in frame if frame[name].dtype.kind == "O"}
        of_images = [name for name in strings if np.mean([path_ends(each) for each in strings[name]]) >= MOST]
        if len(of_images) == 1:
            frame = frame.drop(columns=of_images).join(_of_strings(strings[of_images[0]]))
    else:
        frame, images = _of_arrays(x)
        frame = named_columns("x", frame.set_axis(x.index), whose) if isinstance(x, pd.Series) else frame
    n = len(frame) if images is None else len(images)
    if not n:
        raise UsageError("x: it has no examples")
    for column, name, values in ((LABEL, "y", y), (PERSON, "groups", groups)):
        if values is None:
            continue
        values = _one_each(name, values, n)
        if isinstance(values, pd.DataFrame):
            # other values than 0 and 1 stay as they are, and are refused later
            labels = values.astype(np.int64) if values.isin((0, 1)).all(axis=None) else values
            names = [f"{LABEL} {i:05} {name}".replace("|", "/") for i, name in enumerate(labels.columns)]  # sorted
            frame = pd.concat([frame, labels.set_axis(names, axis=1)], axis=1)
        elif column in frame and (frame[column].to_numpy() != values).any():
            raise UsageError(f"{name}: x has a column {column} of other values: rename that one")
        else:
            frame = frame.assign(**{column: values})
    return InMemory(frame, images)


def _check_order(name: str, values: Any, x: Any) -> None:
    """Raise UsageError if labels or people are of other rows than x, or in another order, by the indices of both in
    pandas. An index that only counts may be a new one of the same rows."""
    import pandas as pd

    kinds = (pd.DataFrame, pd.Series)
    if not (isinstance(x, kinds) and isinstance(values, kinds)) or x.index.equals(values.index):
        return
    counts = any(each.index.equals(pd.RangeIndex(len(each))) for each in (x, values))
    if not counts or {*x.index} == {*values.index}:
        remedy = f"give {name}.loc[x.index], or {name}.to_numpy() if they are in the order of x"
        raise UsageError(f"{name}: its index is not that of x: {remedy}")


def named_columns(name: str, frame: pd.DataFrame, unnamed: bool = False) -> pd.DataFrame:
    """Return a table of pandas, whose columns, and levels of the index with a name, are columns that are called by
    texts. unnamed: so are levels without a name that do not number the rows, as the first column of a file may be.
    UsageError, which names `name`, if two columns have one name."""
    import pandas as pd

    named = [
        (str(level), frame.index.get_level_values(i)) for i, level in enumerate(frame.index.names) if level is not None
    ]
    for i in [i for i, level in enumerate(frame.index.names) if unnamed and level is None]:
        values = frame.index.get_level_values(i)
        if values.nunique() >= MOST * len(values):
            continue
        # several tables below each other may have a range each
        if values.dtype.kind not in "iu" or pd.Series(values).diff().eq(1).mean() < MOST:
            named.append((f"index_level_{i}", values))
    frame = frame.set_axis(list(map(str, frame.columns)), axis=1).reset_index(drop=True)
    if frame.columns.has_duplicates:
        raise UsageError(f"{name}: two columns are called {frame.columns[frame.columns.duplicated()][0]}: rename one")
    # people in the index would otherwise be lost, and a row protected in their place; dates only say when
    return frame.assign(
        **{level: values for level, values in named if level not in frame and not hasattr(values, "freq")}
    )


def _one_each(name: str, values: Any, n: int) -> np.ndarray | pd.DataFrame:
    """Return labels or people as an array [n], or labels [n, labels] as float64, of which an example may have several.
    UsageError, which names the argument, if it is neither."""
    import pandas as pd

    values = unwrapped(values)
    columns = values.columns.to_numpy() if isinstance(values, pd.DataFrame) else None
    try:
        array = np.asarray(values)
    except ValueError:
        raise UsageError(f"{name}: lists of several lengths: give one value for each example, [n]") from None
    # integers that 64 bits do not hold would become floats, and several people one
    large = isinstance(values, list | tuple) and array.dtype.kind == "f" and array.ndim == 1
    exact = not large or all(int(float(value)) == int(value) for value in values if isinstance(value, int | np.integer))
    values = array if exact else np.asarray(values, dtype=object)
    if values.ndim == 0 or len(values) != n:
        many = f"{len(values)} for {n} examples" if values.ndim else f"{values} is one value for {n} examples"
        raise UsageError(f"{name}: {many}: give one each")
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim == 1:
        return values
    try:
        labels = values.astype(np.float64)
    except (ValueError, TypeError):
        labels = np.zeros(0)
    if name == "groups" or labels.ndim != 2:
        raise UsageError(f"{name}: an array {list(values.shape)}: give one value for each example, [n]")

    # rows of 0 and 1 are classes if nine tenths have a single 1, so that no single one decides what a model answers
    single = ((labels == 1).sum(1) == 1) & ((labels != 0).sum(1) == 1)
    if single.mean() < MOST:
        return pd.DataFrame(labels, columns=columns)
    if other := int((~single).sum()):
        raise UsageError(
            f"y: {other} of {n} examples have no label or several, and all others have one: give each one label, or "
            "leave them out"
        )
    return labels.argmax(1) if columns is None else columns[labels.argmax(1)]


def unwrapped(x: Any) -> Any:
    """Return a sparse matrix as float32 [n, d], mapped if it is large; a masked array with nan where it is masked; a
    tensor without its graph; a table of another library as one of pandas; and anything else as it is."""
    if isinstance(x, np.ma.MaskedArray):
        missing: Any = np.nan if x.dtype.kind in "fiub" else None
        return np.where(np.ma.getmaskarray(x), missing, x.data)
    if isinstance(x, Tensor):
        return x.detach().cpu()
    if hasattr(x, "to_pandas") and not has_columns(x):
        return x.to_pandas()
    if not hasattr(x, "toarray"):
        return x
    (n, d), rows = x.shape, x.tocsr()
    step = max(1, AT_ONCE // (4 * max(1, d)))
    blocks = (rows[first : first + step].astype(np.float32).toarray() for first in range(0, max(1, n), step))
    return gathered(map(torch.from_numpy, blocks), n)


def label_columns(frame: pd.DataFrame) -> str | list[str] | None:
    """Return the column of labels, or those of 0 and 1 if an example may have several; None: it has none."""
    several = [name for name in frame if name.startswith(f"{LABEL} ")]
    return several or (LABEL if LABEL in frame else None)


def label_name(column: str) -> str:
    """Return what a label is called, by its column here."""
    return re.sub(rf"{LABEL} \d{{5}} ", "", column)


def _spread(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its lists of numbers as a column each, called NAME[0], NAME[1], ..."""
    import pandas as pd

    objects = [name for name in frame if len(frame) and frame[name].dtype == object]
    for name in [
        name for name in objects if frame[name].map(lambda x: getattr(x, "ndim", isinstance(x, list | tuple)) > 0).all()
    ]:
        try:
            values: np.ndarray = np.stack(frame[name].to_list()).astype(np.float32)
        except (ValueError, TypeError):
            values = np.zeros(0)
        if values.ndim != 2:
            raise UsageError(f"x: lists in column {name} are no numbers, or not of equal length: leave it out")
        frame = pd.concat([frame.drop(columns=name), as_columns(name, values)], axis=1)
    return frame


def has_columns(x: Any) -> bool:
    """Return whether x is a data set of Hugging Face, which need not be installed."""
    return hasattr(x, "column_names") and hasattr(x, "features")


def of_columns(data: Any, y: Any) -> tuple[list[Any], Any]:
    """Return examples and labels of a data set of Hugging Face, classes by their names. y: as in `examples_in`.
    UsageError if it is a stream, or if its columns may mean several things."""
    names, listed = list(data.column_names or ()), first_of(data.column_names or (), 10)
    if not hasattr(data, "__len__"):
        raise UsageError("x: a stream of examples: load them without streaming=True")
    column = y if isinstance(y, str) and y != NO_LABELS else None
    known = [name for name in names if (name == column if column else name in LABELS)]
    labels = known if y is None or isinstance(y, str) else []
    if len(labels) != 1 and (y is None or column):
        raise UsageError(f"y: no column {column or LABELS[0]}: x has {listed}: give the name of the column")
    others = [name for name in names if name not in labels]
    usual = [name for name in others if name in EXAMPLES] if len(others) > 1 else others
    if len(usual) != 1:
        raise UsageError(
            f"x: columns {listed}: give x.select_columns([EXAMPLES, LABELS]), or x.to_pandas() for numbers"
        )
    if len(labels) == 1:
        classes, y = getattr(data.features[labels[0]], "names", None), list(data[labels[0]])
        # -1 says that a label is not known
        y = y if classes is None else [None if i is None or i < 0 else classes[i] for i in y]
    return list(data[usual[0]]), y


def _of_items(data: Any) -> tuple[list[Any], list[Any]]:
    """Return examples and labels of the items of a data set: pairs, or values by name. UsageError if they are none."""
    items = [data[i] for i in range(len(data))]
    if items and isinstance(items[0], dict):
        names = [name for name in items[0] if name in LABELS]
        others = [name for name in items[0] if name not in names]
        if len(names) == 1 and len(others) == 1:
            return [item[others[0]] for item in items], [item[names[0]] for item in items]
    if items and isinstance(items[0], tuple | list) and len(items[0]) == 2:
        labels = [item[1].tolist() if isinstance(item[1], Tensor) else item[1] for item in items]
        return [item[0] for item in items], labels
    raise UsageError("y: none given: give labels, or a data set of pairs of an example and its label")


def are_images(each: Sequence[Any], among_images: bool) -> bool:
    """Return whether each item of a list is one image, so that the list is one set. among_images: whether arrays and
    tensors are images."""

    def is_one(x: Any) -> bool:
        shape = tuple(getattr(x, "shape", ()))
        of_colours = len(shape) == 3 and (isinstance(x, Tensor) or shape[-1] in (1, 3))
        return isinstance(x, Image.Image) or (among_images and (len(shape) == 2 or of_colours))

    return bool(each) and all(map(is_one, each))


def strings_in(x: Any) -> list[str | Path] | None:
    """Return the texts or paths of a list, an array [n] or a column of pandas, "" for those that are missing; None: it
    has others."""
    import pandas as pd

    if isinstance(x, str) or not isinstance(x, Sequence | np.ndarray | pd.Series) or getattr(x, "ndim", 1) != 1:
        return None
    each = ["" if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in x]
    return each if all(isinstance(value, str | Path) for value in each) and any(map(str, each)) else None


def path_ends(each: str | Path) -> bool:
    """Return whether a string ends as the path of an image does."""
    return isinstance(each, Path) or Path(each).suffix.lower() in SUFFIXES


def _of_strings(strings: Sequence[str | Path]) -> pd.DataFrame:
    """Return the table of paths of images if all strings are files, or nine tenths end as images do, so that no single
    one decides; otherwise that of texts. UsageError for a path without a file."""
    import pandas as pd

    paths = [Path(os.path.expanduser(each)) for each in strings]  # a text may begin with ~ too
    absent = [str(path) for path in paths if not os.path.isfile(path)]
    if absent and np.mean(list(map(path_ends, strings))) < MOST:
        return pd.DataFrame({TEXT: list(map(str, strings))})
    if absent:
        raise UsageError(
            f"x: paths of images, of which {len(absent)} of {len(paths)} are no files, the first {absent[0]}: give "
            "paths from this folder, or whole ones"
        )
    return pd.DataFrame({PATH: [str(path.resolve()) for path in paths]})


def _of_arrays(x: Any) -> tuple[pd.DataFrame, Tensor | None]:
    """Return the table of rows or paths, or images."""
    import pandas as pd

    if (strings := strings_in(x)) is not None:
        return _of_strings(strings), None
    channels_first = isinstance(x, Tensor) and x.dim() == 4
    if isinstance(x, Sequence) and x and isinstance(x[0], Tensor):
        x, channels_first = torch.stack(list(x)), x[0].dim() == 3
    if isinstance(x, Sequence) and x and isinstance(x[0], Image.Image):
        # as files of them are read; what is not grey by its mode is in colour, whatever its pixels
        if large := next((image.mode for image in x if image.mode.startswith(("I", "F"))), None):
            remedy = "give the paths of the files, and bits=, or bring values to 0 to 255"
            raise UsageError(f"x: an image of mode {large}, with more than 8 bits: {remedy}")
        colours = [1 if image.mode in ("1", "L", "LA") else 3 for image in x]
        pixels = [pixels_of(image)[0] for image in x]
        x = [np.repeat(each, many // each.shape[2], axis=2) for each, many in zip(pixels, colours, strict=True)]
        if len({image.shape for image in x}) > 1:
            raise UsageError("x: images of several sizes or colours: resize them, or give the paths of their files")
    try:
        array = x.numpy() if isinstance(x, Tensor) else np.asarray(x)
        array = array.astype(np.float64) if array.dtype == object else array
    except (ValueError, TypeError):
        array = np.zeros(0)
    if array.ndim == 2 and array.dtype.kind in "fiub":
        return pd.DataFrame(array, columns=[str(i) for i in range(array.shape[1])]), None
    # a tensor or an image of three dimensions is one image where a model answers
    if array.dtype == np.uint8 and (array.ndim == 4 or (array.ndim == 3 and isinstance(x, np.ndarray | Sequence))):
        images = torch.from_numpy(np.ascontiguousarray(array))
        if images.dim() == 3:
            images = images[:, None]
        elif not channels_first:
            images = images.movedim(-1, 1).contiguous()
        if images.shape[1] in (1, 3):
            return pd.DataFrame(index=range(len(images))), images
    raise UsageError(
        f"x: {type(x).__name__} of {array.dtype} {list(array.shape)}: give rows of numbers [n, d], images as uint8 "
        "[n, h, w] or [n, h, w, 3], in a tensor [n, c, h, w], PIL images, paths, texts, or a pandas table"
    )
