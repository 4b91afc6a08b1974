"""Explain settings: the meaning, type, range and value of each. `pubsel COMMAND --help` prints what this module
returns, and the reference of the documentation is generated from it. It imports no torch, but for a method's class."""

import contextlib
import dataclasses
import importlib
import shutil
import textwrap
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from omegaconf import MISSING

from pubsel.settings import CONF, own_folders
from pubsel.settings.command_line import written
from pubsel.settings.methods import targets
from pubsel.settings.schema import LIMITS, settings_group

TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
REQUIRED = "???"  # the value of a setting that is required, as Hydra writes it
WIDEST = 110  # characters of a line of help


class Setting(NamedTuple):
    """One setting. kind: its type and range in words. value: as it would be typed, REQUIRED if it has none. added: no
    file of conf/ gives it, so that it is typed with a + before it."""

    key: str
    about: str
    kind: str
    value: str
    neutral: bool
    added: bool = False


class Section(NamedTuple):
    """The settings of one group. name: the prefix of their keys, "" for those without one. options: the files of conf/
    that set the whole group."""

    name: str
    about: str
    options: list[str]
    settings: list[Setting]


def sections(
    schema: Any,
    values: Mapping[str, Any],
    folders: tuple[Path, ...] = (CONF,),
    methods: bool = False,
    name: str = "",
) -> list[Section]:
    """Return the settings of a dataclass, a section for each of its groups, with `values` in place of its defaults.

    folders: where the options of a group are looked for. methods: import the classes of the algorithm and the distance,
    which say what their settings mean; otherwise only `values` are shown. name: of the group that the dataclass is.
    """
    prefix = f"{name}." if name else ""
    settings: list[Setting] = []
    inner: list[Section] = []
    for field in dataclasses.fields(schema):
        group, below = settings_group(field.type), f"{prefix}{field.name}"
        value = values.get(field.name, field.default)
        # a group has no default: each of its settings has its own
        if field.name not in values and field.default_factory is not dataclasses.MISSING and group is None:
            value = field.default_factory()
        is_method = isinstance(value, Mapping) and "_target_" in value

        # a class that is not imported shows its values only: to import one runs the code of its module
        if is_method and (known := method_class(value["_target_"], folders) if methods else None):
            (section,) = sections(known, value, folders)
            known_keys = [s._replace(key=f"{below}.{s.key}", added=s.key not in value) for s in section.settings]
            inner.append(Section(below, section.about, option_names(below, folders), known_keys))
        elif is_method:
            shown = {f"{below}.{key}": type_text(given) for key, given in value.items() if key != "_target_"}
            settings_of = [Setting(key, "", "", text, False) for key, text in shown.items()]
            inner.append(Section(below, "", option_names(below, folders), settings_of))
        elif group is not None:
            inner += sections(group, value if isinstance(value, Mapping) else {}, folders, methods, below)

        if not (is_method or group) or "about" in field.metadata:
            words = field.metadata.get("about", ""), kind(field.type, field.metadata), type_text(value)
            settings.append(Setting(below, *words, field.metadata.get("neutral", False)))

    return [Section(name, about(schema), option_names(name, folders), settings), *inner]


def about(schema: Any) -> str:
    """Return the docstring of a dataclass in one line, without its final period; "" if it has none of its own."""
    text = " ".join((schema.__doc__ or "").split())
    return "" if text.startswith(f"{schema.__name__}(") else text.removesuffix(".")


def kind(annotation: Any, metadata: Mapping[str, Any]) -> str:
    """Return the type and the range of a setting in words, such as "whole number, at least 1, or null"."""
    union = get_origin(annotation) in (Union, UnionType)
    alternatives = [t for t in (get_args(annotation) if union else [annotation]) if t is not type(None)]

    words = [" or ".join(filter(None, map(_type, alternatives)))]
    for key, (_, relation) in LIMITS.items():
        if (limit := metadata.get(key)) is not None:
            words.append(f"{relation} {limit:,}" if isinstance(limit, int) else f"{relation} {limit:g}")
    words += ["inf is allowed"] if metadata.get("infinite") else []
    words += ["or null"] if union else []
    return ", ".join(filter(None, words))


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        *most, last = [member.name for member in annotation]
        return f"{', '.join(most)} or {last}" if most else last
    if get_origin(annotation) is list:
        item = TYPES.get(get_args(annotation)[0])
        return f"list of {item}s" if item else "list"
    mapping = get_origin(annotation) is dict or dataclasses.is_dataclass(annotation)
    return "mapping" if mapping else TYPES.get(annotation, "")


def type_text(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is dataclasses.MISSING or value == MISSING:
        return REQUIRED
    if isinstance(value, str | Enum):
        return value if isinstance(value, str) else value.name
    if isinstance(value, list | tuple):
        return f"[{','.join(map(type_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{type_text(inner)}' for key, inner in value.items())}}}"
    return str(value) if isinstance(value, float) else written(value)


def option_names(group: str, folders: tuple[Path, ...] = (CONF,)) -> list[str]:
    """Return the options of a group, the files conf/GROUP/*.yaml; none if it has no folder."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")}) if group else []


def heading(path: Path) -> str:
    """Return the comment at the top of a file of conf/, in one line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line.lstrip("# ")]
    return " ".join(lines)


def method_class(target: str, folders: tuple[Path, ...] = ()) -> type | None:
    """Return the dataclass that a `_target_` names; None if it cannot be imported, is no dataclass, or is named by no
    file of the `folders` (none: of conf/ and --config-dir), so that it may be anybody's."""
    if target in targets(folders or (CONF, *own_folders())):
        module, _, name = target.rpartition(".")
        with contextlib.suppress(Exception):  # when the method runs, the message says what is wrong with it
            cls = getattr(importlib.import_module(module), name)
            return cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None
    return None


# Help


def help_text(
    command: str, every: list[Section], chosen: Mapping[str, str], folders: tuple[Path, ...] = (CONF,)
) -> str:
    """Return the help of a command. chosen: the options that the command line gives, by group; then only those groups
    are explained."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    # with a chosen option only its group is explained: the help of all keys is hundreds of lines
    shown = [section for section in every if section.name.partition(".")[0] in chosen]
    if shown:
        # an option is described by the comment at the top of its file
        parts = []
        for group, option in chosen.items():
            path = next((path for folder in folders if (path := folder / group / f"{option}.yaml").is_file()), None)
            title = heading(path) if path else ""
            parts.append(textwrap.fill(f"{group}={option}: {title}" if title else f"{group}={option}", width) + "\n")
        return "\n".join([*parts, *(_section(section, width) for section in shown)])

    # Experiments set keys of several groups, so they are listed before all of these.
    file = yaml.safe_load((CONF / f"{command}.yaml").read_text(encoding="utf-8"))
    parts = [file.get("help") or file["hydra"]["help"]["header"]]
    groups = [section.name for section in every if section.options]
    if groups and option_names("experiment", folders):
        parts.append(_options("+experiment", option_names("experiment", folders), width))
    parts += [_section(section, width) for section in every]

    end = "A setting is given as KEY=VALUE, without spaces. --cfg job prints those that a command would use"
    end += f"; --help {groups[-1]}=NAME explains {groups[-1]}=NAME alone." if groups else "."
    return "\n".join([*parts, textwrap.fill(end, width)])


def _options(group: str, names: list[str], width: int) -> str:
    text = textwrap.fill(", ".join(names), width - 4, break_on_hyphens=False, break_long_words=False)
    return f"{group}=NAME, one of\n{textwrap.indent(text, '    ')}\n"


def _section(section: Section, width: int) -> str:
    title = section.name or "General settings"
    if section.about and section.name:
        title = f"{title}: {section.about}."
    lines = [textwrap.fill(title, width), ""]
    if section.options:
        lines.append(textwrap.indent(_options(section.name, section.options, width - 2), "  "))

    for setting in section.settings:
        needed = "has to be given" if setting.value == REQUIRED else ""
        note = "; ".join(filter(None, [setting.kind, needed]))
        lines.append(f"  {'+' * setting.added}{setting.key}={setting.value}" + (f"  ({note})" if note else ""))
        lines += textwrap.wrap(setting.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([*lines, ""])
