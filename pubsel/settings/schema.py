"""The meaning and range of a key, and the check of values against them."""

import dataclasses
import difflib
import json
import marshal
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from pubsel.messages import UsageError

T = TypeVar("T")
NEAR = 0.65  # of difflib: at least, of words of which one is taken for the other
NAME = re.compile(r"[\w.+-]+")  # what may be part of the name of a folder


class Range(TypedDict, total=False):
    """The range of a number: open or closed ends."""

    over: float
    at_least: float
    at_most: float
    below: float


def setting(
    about: str,
    *,
    infinite: bool = False,
    neutral: bool = False,
    named: bool = False,
    default: Any = MISSING,
    **limits: Unpack[Range],
) -> Any:
    """Return a dataclass field with its meaning and its range. Its value is in conf/, or, for a key that is rarely set,
    here as `default`: never in both. While it has its default, the identity leaves it out.

    `neutral` keys cannot change a result (where files are, how fast a run is); the identity leaves them out. `named`
    keys become part of a folder's name.
    """
    kind = {"infinite": infinite, "neutral": neutral, "named": named}
    return field(default=default, metadata={"about": about, **limits, **kind})


LEAST, MOST = 1e-30, 1e38  # sizes of a number that float32 holds, with room for a square root and a quotient
MANY = 10**9  # of examples, directions, pixels, ...: more than memory holds
LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "over": (operator.gt, "greater than"),
    "at_least": (operator.ge, "at least"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}


def defaults(schema: Any) -> dict[str, Any]:
    """Return the keys of a dataclass of settings that have a default, with it, groups as mappings: what a command's
    settings are if conf/ says nothing."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(schema):
        if dataclasses.is_dataclass(f.type):
            if inner := defaults(f.type):
                values[f.name] = inner
        elif f.default is not MISSING and f.default is not dataclasses.MISSING:
            values[f.name] = f.default.name if isinstance(f.default, Enum) else f.default
    return values


_structured: Callable[[Any], Any] = cache(OmegaConf.structured)  # half of the time of a check


def in_types(schema: Any, values: Any) -> DictConfig:
    """Return the values of a request with the types of their schema, in which another value can be set."""
    return cast(DictConfig, OmegaConf.merge(_structured(schema), values))  # merges into a copy


def check(schema: type[T], values: DictConfig | dict[str, Any], where: str = "") -> T:
    """Return an instance of the dataclass `schema` with `values`; UsageError names the first key that is unknown,
    missing, of the wrong type or out of range. `where` is the key of `values` itself, for the message."""
    prefix = f"{where}." if where else ""
    try:
        # OmegaConf checks keys and types; it knows no ranges
        result = OmegaConf.to_object(values if OmegaConf.get_type(values) is schema else in_types(schema, values))
    except OmegaConfBaseException as error:
        raise UsageError(_fault(schema, error, prefix)) from None

    _check_ranges(result, prefix)
    return result  # type: ignore[return-value]


def literal(values: dict[str, Any], file: Any) -> dict[str, Any]:
    """Return values of a file, which may be from others. UsageError if one refers to the environment or to another
    value, as ${oc.env:HOME} does."""
    if "${" in json.dumps(values):
        raise UsageError(f"{file}: it has ${{...}} in place of a value: bring it back")
    return values


def _fault(schema: Any, error: OmegaConfBaseException, prefix: str) -> str:
    """Return what is wrong with the values of `schema`, in a line that names the key."""
    # a free mapping has keys of any name, so none is a misspelling
    parent, _, name = str(error.full_key or "").rpartition(".")
    same_group = {key: f for key, f in walk(schema) if key.rpartition(".")[0] == parent}
    siblings = {key.rpartition(".")[2]: f.metadata.get("about", "") for key, f in same_group.items()}
    key = f"{prefix}{error.full_key or ''}".strip(".")

    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value: give {key}=..."

    if isinstance(error, ConfigKeyError):
        known = f"; here: {', '.join(sorted(siblings))}" if siblings else ""
        return f"unknown key {key}{nearest(name, siblings)}{known}"

    about = siblings.get(name.split("[")[0])
    text = f"{key}: {str(error.msg or error).splitlines()[0]}"
    if "is not a ListConfig" in text:
        text = f"{key}: not a list: write [A] or [A,B]"
    if choice := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]$", text):
        text += nearest(choice[1], choice[2].split(", "))
    return f"{text} ({about})" if about else text


def nearest(typed: str, known: Iterable[str]) -> str:
    """Return the part of a message that names the known dotted key most like what was typed; "" if none is like it."""
    by_last: dict[str, str] = {}
    for key in sorted(known):
        by_last.setdefault(key.split(".")[-1], key)

    # A word without a dot may be the last part of a dotted key.
    matches = difflib.get_close_matches(typed, sorted(known), 1, NEAR)
    if "." not in typed and (not matches or typed in by_last):
        close = difflib.get_close_matches(typed, list(by_last), 1, NEAR)
        matches = [by_last[last] for last in close] or matches

    return f" (did you mean {matches[0]}?)" if matches else ""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a record or of settings, with their values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_group(kind: Any) -> Any:
    """Return the dataclass that a type is, or that a union has; None if it is no group of settings."""
    parts = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
    return next((part for part in parts if dataclasses.is_dataclass(part)), None)


def walk(schema: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield the dotted keys of a dataclass of settings with their fields, each group before the keys in it."""
    for f in fields(schema):
        yield f"{prefix}{f.name}", f
        if inner := settings_group(f.type):
            yield from walk(inner, f"{prefix}{f.name}.")


def keys_of(schema: Any) -> list[str]:
    """Return the dotted keys of a dataclass of settings, with those of groups."""
    return [key for key, _ in walk(schema)]


def neutral(schema: Any) -> list[str]:
    """Return the dotted keys of a dataclass of settings that cannot change a result."""
    return [key for key, f in walk(schema) if f.metadata.get("neutral")]


def lists(schema: Any) -> set[str]:
    """Return the keys of a dataclass of settings, without those of groups, whose values are lists."""
    return {f.name for f in fields(schema) if any(get_origin(t) is list for t in (f.type, *get_args(f.type)))}


def texts(schema: Any) -> set[str]:
    """Return the dotted keys of a dataclass of settings whose values are texts, or lists of texts, and no numbers."""
    return {key for key, f in walk(schema) if {*(get_args(f.type) or (f.type,))} - {NoneType} <= {str, list[str]}}


def _check_ranges(node: Any, prefix: str) -> None:
    for f in dataclasses.fields(node):
        value, key = getattr(node, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            _check_ranges(value, f"{key}.")
        if f.metadata.get("named"):
            check_name(key, value)

        # true is an int in Python, and no number here
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(key, number, f.metadata)


def _check_number(key: str, number: float, metadata: Mapping[str, Any]) -> None:
    """Raise UsageError for a number out of the range that `metadata` of its field gives."""
    about = metadata.get("about")
    infinite = number == math.inf and metadata.get("infinite")
    if isinstance(number, float) and not (infinite or math.isfinite(number)):
        raise UsageError(f"{key}={number}: must be a finite number ({about})")

    # A count beyond memory, or a size beyond float32, fails far from here; a limit of the field says more.
    counts = isinstance(number, int) and metadata.get("at_most") is None
    least, most = (1, MANY) if counts else (LEAST, MOST)
    if number != 0 and math.isfinite(number) and not least <= abs(number) <= most:
        size = "small" if abs(number) < least else "large"
        raise UsageError(f"{key}={number}: too {size} to compute with ({about})")

    for name, (holds, words) in LIMITS.items():
        limit = metadata.get(name)
        if limit is not None and not holds(number, limit):
            raise UsageError(f"{key}={number}: must be {words} {limit} ({about})")


def misfit(schema: Any, values: Mapping[str, Any], where: str = "") -> str:
    """Return what is wrong with the JSON of a dataclass, in words that name the dotted key: a field without a default
    that it lacks, or a value that is not of the type of its field; "" if nothing is. Other keys may have any value."""
    kinds, needed = _kinds(schema)
    for key in needed:
        if key not in values:
            return f"it lacks '{where}{key}'"

    for key, value in values.items():
        plain, inner, fit = kinds.get(key, ANY)
        if type(value) in plain:
            continue
        if inner is not None and type(value) is dict:
            known = inner, marshal.dumps(value, 2)  # thousands of records share most of their settings
            if known not in _FIT:
                if wrong := misfit(inner, value, f"{where}{key}."):
                    return wrong
                _FIT.add(known)
        elif not fit(value):
            return f"'{where}{key}' may not be {json.dumps(value)[:40]}"
    return ""


Fits = Callable[[Any], bool]
UNIONS = (Union, UnionType)
PLAIN = (str, bool, NoneType)  # types of JSON values that need no other check
ANY: tuple[tuple[Any, ...], Any, Fits] = ((), None, lambda value: True)
_FIT = set[tuple[Any, bytes]]()


@cache
def _kinds(schema: Any) -> tuple[dict[str, tuple[tuple[Any, ...], Any, Fits]], tuple[str, ...]]:
    """Return of each field the plain types that it may have, the dataclass that it may be (None: none), and whether a
    JSON value may be of its type; and the fields without a default."""
    kinds = {}
    for f in fields(schema):
        parts = get_args(f.type) if get_origin(f.type) in UNIONS else (f.type,)
        other = [part for part in parts if part not in PLAIN]
        fit = fits(other[0] if len(other) == 1 else f.type)
        kinds[f.name] = tuple(part for part in parts if part in PLAIN), settings_group(f.type), fit
    needed = (f.name for f in fields(schema) if f.default is f.default_factory is dataclasses.MISSING)
    return kinds, tuple(needed)


def fits(kind: Any) -> Fits:
    """Return whether a JSON value may be of a type: of the types of settings, Annotated[NUMBER, LEAST, MOST], and tuple
    for a list of that length."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return lambda value: isinstance(value, dict) and not misfit(kind, value)
    if origin is Annotated:
        number, (least, most) = (int,) if parts[0] is int else (int, float), parts[1:]
        return lambda value: type(value) in number and least <= value <= most

    each = [fits(part) for part in parts if part is not Ellipsis]
    if origin in UNIONS:
        return lambda value: any(fit(value) for fit in each)
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(each[0], value))
    if origin is tuple:
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(each)
            and all(fit(part) for fit, part in zip(each, value, strict=True))
        )
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(map(each[1], value.values()))

    if kind is float:
        return lambda value: value == "inf" or (type(value) in (int, float) and -MOST <= value <= MOST)
    if kind is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: isinstance(value, str) and value in kind.__members__
    return lambda value: kind is Any or isinstance(value, kind)


def check_name(key: str, name: Any) -> None:
    """Raise UsageError if a name that becomes part of a folder's name could lead out of that folder, or not be read."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"{key}={name}: a name has letters, digits, _ . + and - only")
