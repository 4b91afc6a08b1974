"""Explain settings: what each means, its type, its range and its value. `pubsel COMMAND --help` prints what this module
returns, and the reference of the documentation is generated from it. It imports no torch."""

import ast
import dataclasses
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from omegaconf import MISSING

from pubsel.settings import CONF, own_folders
from pubsel.settings.methods import targets

NO_TORCH = ("pubsel.settings", "pubsel.messages")  # what the settings of a method may import
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
RANGES = {"over": "greater than", "at_least": "at least", "at_most": "at most", "below": "less than"}
REQUIRED = "???"  # the value of a setting that has to be given, as Hydra writes it
WIDEST = 110  # characters of a line of help


class Setting(NamedTuple):
    """One setting. kind: its type and range in words. value: as it would be typed, REQUIRED if it has none."""

    key: str
    about: str
    kind: str
    value: str
    neutral: bool


class Section(NamedTuple):
    """The settings of one group. name: the prefix of their keys, "" for those without one. options: the files of conf/
    that set the whole group."""

    name: str
    about: str
    options: list[str]
    settings: list[Setting]


def sections(schema: Any, values: Mapping[str, Any], folders: tuple[Path, ...] = (CONF,)) -> list[Section]:
    """Return the settings of a dataclass, a section for each of its groups, with `values` in place of its defaults.

    folders: where the options of a group are looked for.
    """
    return list(_sections(schema, values, folders, ""))


def _sections(schema: Any, values: Mapping[str, Any], folders: tuple[Path, ...], name: str) -> Iterator[Section]:
    prefix = f"{name}." if name else ""
    settings: list[Setting] = []
    inner: list[Section] = []
    for field in dataclasses.fields(schema):
        value = values.get(field.name, _default(field))
        group = next((t for t in (field.type, *get_args(field.type)) if dataclasses.is_dataclass(t)), None)

        # An algorithm or distance is a free mapping in the schema; its class says which settings it has.
        if group is None and isinstance(value, Mapping) and "_target_" in value:
            group = method_settings(value["_target_"], folders)

        if group is not None:
            given = value if isinstance(value, Mapping) else {}
            inner += _sections(group, given, folders, f"{prefix}{field.name}")
        if group is None or "about" in field.metadata:
            settings.append(explained(field, value, prefix))

    yield Section(name, about(schema), option_names(name, folders), settings)
    yield from inner


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; of a group of settings none, since each of them has its own."""
    if field.default_factory is dataclasses.MISSING or dataclasses.is_dataclass(field.type):
        return field.default
    return field.default_factory()


def explained(field: dataclasses.Field[Any], value: Any, prefix: str = "") -> Setting:
    """Return what is known of one field of a dataclass of settings."""
    metadata = field.metadata
    return Setting(
        f"{prefix}{field.name}", metadata.get("about", ""), kind(field.type, metadata), typed(value),
        metadata.get("neutral", False),
    )  # fmt: skip


def about(schema: Any) -> str:
    """Return the docstring of a dataclass in one line, without its final period; "" if it has none of its own."""
    text = " ".join((schema.__doc__ or "").split())
    return "" if text.startswith(f"{schema.__name__}(") else text.removesuffix(".")


def kind(annotation: Any, metadata: Mapping[str, Any]) -> str:
    """Return the type and the range of a setting in words, such as "whole number, at least 1, or null"."""
    union = get_origin(annotation) in (Union, UnionType)
    alternatives = [t for t in (get_args(annotation) if union else [annotation]) if t is not type(None)]

    words = [" or ".join(filter(None, map(_type, alternatives)))]
    for key, relation in RANGES.items():
        if metadata.get(key) is not None:
            words.append(f"{relation} {_number(metadata[key])}")
    words += ["inf is allowed"] if metadata.get("infinite") else []
    words += ["or null"] if union else []
    return ", ".join(filter(None, words))


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        *most, last = [member.name for member in annotation]
        return f"{', '.join(most)} or {last}" if most else last
    if get_origin(annotation) is list:
        return f"list of {PLURALS[item]}" if (item := get_args(annotation)[0]) in PLURALS else "list"
    mapping = get_origin(annotation) is dict or dataclasses.is_dataclass(annotation)
    return "mapping" if mapping else TYPES.get(annotation, "")


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is MISSING or value is dataclasses.MISSING or value == MISSING:
        return REQUIRED
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{typed(inner)}' for key, inner in value.items())}}}"
    return str(value)


# Options


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


# Settings of methods, whose modules import torch


def method_settings(target: str, folders: tuple[Path, ...] = ()) -> type | None:
    """Return the dataclass that a `_target_` names, with only its fields, made from its source: importing it would
    import torch. None if there is no such class, if it is not a dataclass that can be read this way, or if no file of
    the `folders` (none: of conf/ and --config-dir) names it: a part of the source is run."""
    if target not in targets(folders or (CONF, *own_folders())):
        return None
    module, _, name = target.rpartition(".")
    try:
        fields = _fields_of(module, name)
    except (ImportError, OSError, SyntaxError, NameError, TypeError, ValueError, AttributeError):
        return None  # whoever runs the method is told what is wrong with it
    return fields if isinstance(fields, type) and dataclasses.is_dataclass(fields) else None


def source(module: str) -> Path | None:
    """Return the file of a module, found without importing it or the packages that it is in."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None or not spec.origin:
        return None
    if not rest:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


def _fields_of(module: str, name: str) -> Any:
    """Return the class `name` of a module with its docstring and its annotated fields; everything else is left out."""
    path = source(module)
    if path is None:
        raise ImportError(module)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    places = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in tree.body if isinstance(node, ast.ImportFrom) and node.module for alias in node.names
    }  # fmt: skip

    # Constants, enumerations and what imports no torch are run; everything else is left out.
    kept: list[ast.stmt] = [node for node in tree.body if _is_light(node)]
    names: dict[str, Any] = {"__name__": module}
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)

    # A class may inherit fields from another module of the same package, or from one of pubsel.
    near = (f"{module.partition('.')[0]}.",) if "." in module else ()

    def add(wanted: str) -> bool:
        """Return whether `wanted` is now among `names`, as a base class may be: of this module, or of another one."""
        if wanted in classes and wanted not in names:
            node = classes[wanted]
            bases = [base for base in node.bases if isinstance(base, ast.Name) and add(base.id)]
            body = [part for part in node.body if _is_field(part)] or [ast.Pass()]
            decorators = [d for d in node.decorator_list if "dataclass" in ast.unparse(d)]
            bare = ast.ClassDef(wanted, bases, [], body, decorators, type_params=[])  # type: ignore[call-arg, arg-type]
            exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), str(path), "exec"), names)
        elif wanted in places and wanted not in names and places[wanted][0].startswith((*near, "pubsel.")):
            names[wanted] = _fields_of(*places[wanted])
        return wanted in names

    add(name)
    return names[name]


def _is_light(node: ast.stmt) -> bool:
    """Return whether a statement of a module costs nothing to run, and the settings of its classes may need it."""
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.partition(".")[0] in sys.stdlib_module_names or module.startswith(NO_TORCH)
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
    value = node.value if isinstance(node, ast.Assign) else None
    enumeration = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Enum"
    return isinstance(value, ast.Constant) or enumeration


def _is_field(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        return "ClassVar" not in ast.unparse(node.annotation)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # the docstring


# Help


def header(command: str) -> str:
    """Return what a command does, and examples of it, from its file in conf/."""
    return str(yaml.safe_load((CONF / f"{command}.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["header"])


def help_text(
    command: str, every: list[Section], chosen: Mapping[str, str], folders: tuple[Path, ...] = (CONF,)
) -> str:
    """Return the help of a command. chosen: the options that the command line gives, by group; then only those groups
    are explained."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    shown = [section for section in every if section.name.partition(".")[0] in chosen]
    if shown:
        parts = [_chosen(group, option, folders, width) for group, option in chosen.items()]
        return "\n".join([*parts, *(_section(section, width) for section in shown)])

    # Experiments set keys of several groups, so they are listed before all of these.
    parts = [header(command)]
    groups = [section.name for section in every if section.options]
    if groups and option_names("experiment", folders):
        parts.append(_options("+experiment", option_names("experiment", folders), width))
    parts += [_section(section, width) for section in every]

    end = "A setting is given as KEY=VALUE, without spaces. --cfg job prints those that a command would use"
    end += f"; --help {groups[-1]}=NAME explains {groups[-1]}=NAME alone." if groups else "."
    return "\n".join([*parts, textwrap.fill(end, width)])


def _chosen(group: str, option: str, folders: tuple[Path, ...], width: int) -> str:
    """Return how the file of an option describes it."""
    path = next((path for folder in folders if (path := folder / group / f"{option}.yaml").is_file()), None)
    title = heading(path) if path else ""
    return textwrap.fill(f"{group}={option}: {title}" if title else f"{group}={option}", width) + "\n"


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
        lines.append(f"  {setting.key}={setting.value}" + (f"  ({note})" if note else ""))
        lines += textwrap.wrap(setting.about, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([*lines, ""])
