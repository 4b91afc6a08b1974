"""From words of Hydra's grammar to the settings of a request, and what is told when they do not compose. Imports no
torch."""

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from pubsel.messages import UsageError
from pubsel.settings import CONF, fetching
from pubsel.settings.command_line import written
from pubsel.settings.keys import SCHEMAS
from pubsel.settings.methods import GROUPS, method_keys
from pubsel.settings.schema import keys_of, nearest


@contextlib.contextmanager
def composed(command: str, words: Sequence[str], config_dir: str | Path | None = None) -> Iterator[DictConfig]:
    """Yield the settings of `pubsel COMMAND words...`, which Hydra knows as those of its command while this is open.

    config_dir: a folder of the user's own options, next to conf/. UsageError names the word that does not compose.
    """
    folders = [] if config_dir is None else [f"file://{Path(config_dir).expanduser().resolve()}"]
    search = f"hydra.searchpath={written(folders)}"

    # Hydra has one of each at a time, that of the command which runs included.
    state, running = GlobalHydra.instance(), HydraConfig.instance()
    hydra_before, before = state.hydra, running.cfg
    state.clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            whole = hydra.compose(command, [*renamed(command, words), search], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(explained(error)) from None
    finally:
        state.hydra = hydra_before

    # What asks Hydra for the folders of options gets those of this command while it is open.
    running.set_config(whole)
    try:
        with open_dict(whole):
            del whole["hydra"]
        with fetching(bool(whole.get("download", True))):
            yield whole
    finally:
        running.cfg = before


def renamed(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command as conf/ names their keys: output=... is another word for to=..., and a key that
    only some options of its group have is added to the others. UsageError if to and output are given."""
    keys = keys_of(SCHEMAS[command])
    given = {name: [word for word in words if re.match(rf"\+*{name}=", word)] for name in ("to", "output")}
    if "to" in keys and all(given.values()):
        raise UsageError(f"{given['to'][-1]} {given['output'][-1]}: two words for one setting: give to=... alone")
    words = [re.sub(r"^\+*output=", "to=", word) if "to" in keys else word for word in words]
    optional = {key for key in keys if key.count(".") > 1}
    return [f"++{word}" if word.partition("=")[0] in optional else word for word in words]


def words_of(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return key=value for each setting; those of a mapping by their dotted keys, paths and enums by their text."""
    words = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            words += words_of(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={written(_plain(value))}")
    return words


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Path | Enum):
        return value.name if isinstance(value, Enum) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def quoted(key: str, value: str) -> str:
    """Return key=value as Hydra reads it whatever characters the value has."""
    several = value.startswith("[") and value.endswith("]")
    parts = value[1:-1].split(",") if several else [value]

    inside = [part.strip("\"'").replace("\\", "\\\\").replace('"', '\\"') for part in parts]
    text = ",".join(f'"{part}"' for part in inside)
    return f"{key}=[{text}]" if several else f"{key}={text}"


def explained(error: Exception) -> str:
    """Return Hydra's message in one line, without its hints about its own internals."""
    ambiguous = re.match(r"Ambiguous value for argument '(.+?)'$", str(error).partition("\n")[0])
    if isinstance(error, OverrideParseException) or ambiguous:
        word = ambiguous[1] if ambiguous else str(error.override)  # type: ignore[attr-defined]
        key, equals, value = word.partition("=")
        if not (equals and re.fullmatch(r"[+~]{0,2}[\w./@]+", key)):
            return f"cannot read {word!r}: write key=value"
        several = f"; for several, {key}=[A,B], or --multirun to sweep over them" if ambiguous else ""
        return f"cannot read {word!r}: write it with both kinds of quotes, {shlex.quote(quoted(key, value))}{several}"

    # A key that exists elsewhere is no typing error.
    unknown = re.match(r"Could not override '(.+?)'", str(error))
    if unknown and unknown[1] in known_keys():  # of another algorithm or distance, or of another command
        group = unknown[1].partition(".")[0]
        what = f"the given {group} has no such setting" if group in GROUPS else "no setting of this command"
        return f"{unknown[1]}: {what}; --cfg job shows those that there are"
    if unknown:
        near = nearest(unknown[1], known_keys())
        return f"unknown key {unknown[1]}{near}; pubsel COMMAND --help lists them"

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = ("full_key", "object_type", "Set the environment", "Config search", "provider=", "See https")
    lines = [line for line in lines if not line.startswith(noise)]

    for i, line in enumerate(lines):
        if line.startswith("Available options"):
            return f"{lines[0]}. {line} {', '.join(lines[i + 1 :])}"
    return f"{' '.join(lines)}; pubsel COMMAND --help lists the keys"


@cache
def known_keys() -> frozenset[str]:
    """Return the dotted keys of all commands."""
    return frozenset(key for schema in SCHEMAS.values() for key in keys_of(schema)) | method_keys()
