"""From the words of a command line to the settings of a request, and the message if they do not compose. Hydra reads
the commands that have groups of options or sweep; OmegaConf alone reads the others, which start sooner. Imports no
torch."""

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pubsel.files import plain
from pubsel.messages import UsageError, bars
from pubsel.settings import CONF, OWN, fetching, named
from pubsel.settings.command_line import BLANK, QUOTED, elements, in_quotes, override, unquoted, written
from pubsel.settings.keys import SCHEMAS, Common
from pubsel.settings.methods import GROUPS, method_keys
from pubsel.settings.schema import defaults, keys_of, leaves, lists, nearest, texts

BY_HYDRA = ("run", "rank", "attack", "audit", "make", "figure", "pool")


@contextlib.contextmanager
def composed(command: str, words: Sequence[str], config_dir: str | Path | None = None) -> Iterator[DictConfig]:
    """Yield the settings of `pubsel COMMAND words...`, which are those of the command that runs while this is open.

    config_dir: a folder of the user's own options, next to conf/. UsageError names the word that does not compose.
    """
    folders = () if config_dir is None else (Path(config_dir).expanduser().resolve(),)
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            plain(path)
    read = _by_hydra if command in BY_HYDRA else _by_omegaconf
    # an upload asks the network, whatever may be fetched: `pubsel export` reads no weights but those of the run
    with (
        read(command, renamed(command, words), folders) as values,
        fetching(bool(values.get("download", True) or values.get("hub"))),
        bars,
    ):
        yield values


@contextlib.contextmanager
def _by_omegaconf(command: str, words: Sequence[str], folders: tuple[Path, ...]) -> Iterator[DictConfig]:
    # the defaults of the schema, then the files of conf/, then the command line
    schema = SCHEMAS[command]
    files = [*(["common"] if issubclass(schema, Common) else []), command]
    values = OmegaConf.merge(defaults(schema), *(OmegaConf.load(CONF / f"{name}.yaml") for name in files))
    assert isinstance(values, DictConfig)
    del values["help"]

    for word in words:
        key, equals, text = word.partition("=")
        if not (equals and re.fullmatch(r"[+]{0,2}[\w.]+", key)):
            raise UsageError(f"cannot read {word!r}: write key=value")
        if (key := key.lstrip("+")) not in keys_of(schema):
            raise UsageError(_unknown(key, command))
        values[key] = value = _value(word, text.strip())
        if key in lists(schema) and isinstance(value, str) and "," in text and not QUOTED.fullmatch(text):
            raise UsageError(f"cannot read {word!r}: for several, {key}=[A,B]")

    # what asks for options while the command runs sees its own folders
    token = OWN.set(folders)
    try:
        yield values
    finally:
        OWN.reset(token)


def _value(word: str, text: str) -> Any:
    """Return a value in Hydra's grammar: null, true, false, [A,B], or a text, which the schema makes a number."""
    if not text.startswith("["):
        return {"null": None, "true": True, "false": False}.get(text.lower(), unquoted(text))

    parts = elements(text[1:-1]) if text.endswith("]") else None
    if parts is None:
        raise UsageError(f"cannot read {word!r}: write it with both kinds of quotes, {shlex.quote(_quoted(word))}")
    return [_value(word, part.strip(BLANK)) for part in parts if part.strip(BLANK)]


@contextlib.contextmanager
def _by_hydra(command: str, words: Sequence[str], folders: tuple[Path, ...]) -> Iterator[DictConfig]:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    search = f"hydra.searchpath={written([f'file://{folder}' for folder in folders])}"
    if any(word.lstrip("+~").startswith("hydra") for word in words):
        from hydra_plugins import pubsel_launchers

        pubsel_launchers.register()

    with another():
        try:
            with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
                whole = hydra.compose(command, [*words, search], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(explained(error, command)) from None
        except ValueError as error:  # of a group, such as pair=3
            why = f"{error}: each group takes the name of an option; pubsel {command} --help lists groups and keys"
            raise UsageError(why) from None

        # What asks Hydra for the folders of options gets those of this command while it is open.
        HydraConfig.instance().set_config(whole)
        with open_dict(whole):
            del whole["hydra"]
        yield whole


@contextlib.contextmanager
def another() -> Iterator[None]:
    """Make room for another command of Hydra inside: it has one at a time, and the one that runs gets its own back."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    state, running = GlobalHydra.instance(), HydraConfig.instance()
    before = state.hydra, running.cfg
    state.clear()
    try:
        yield
    finally:
        state.hydra, running.cfg = before


def renamed(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command, as a person types them, with the keys of conf/ and in the grammar of Hydra:
    output=... becomes to=..., and a key that only some options of its group have is added to the others. UsageError for
    both to=... and output=..."""
    # both words in one command may name two files: neither is then taken silently
    schema = SCHEMAS[command]
    keys = keys_of(schema)
    passed = {name: [word for word in words if re.match(rf"\+*{name}=", word)] for name in ("to", "output")}
    if "to" in keys and all(passed.values()):
        raise UsageError(f"{passed['to'][-1]} {passed['output'][-1]}: two words for one setting: give to=... alone")
    words = [re.sub(r"^\+*output=", "to=", word) if "to" in keys else word for word in words]

    optional = {key for key in keys if key.count(".") > 1}
    words = [f"++{word}" if word.partition("=")[0] in optional else word for word in words]
    named = [(word.partition("=")[0].lstrip("+"), word) for word in words]
    by_hydra, several, of_text = command in BY_HYDRA, lists(schema), texts(schema)
    return [override(word, text=key in of_text, sweeps=by_hydra or key in several) for key, word in named]


def words_of(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return key=value for each setting; those of a mapping by their dotted keys, paths and enums by their text."""
    return [f"{key}={written(value)}" for key, value in leaves(settings, prefix)]


def _quoted(word: str) -> str:
    """Return key=value with quotes around the value, or around each value of a list."""
    key, _, value = word.partition("=")
    several = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if several else value

    parts = [unquoted(part.strip(BLANK)) for part in elements(inner) or inner.split(",")]
    text = ",".join(in_quotes(part, '"') for part in (parts if several else [",".join(parts)]))
    return f"{key}=[{text}]" if several else f"{key}={text}"


def explained(error: Exception, command: str) -> str:
    """Return Hydra's message in one line, without its hints about its own internals, and with the nearest word that
    the command knows."""
    ambiguous = re.match(r"Ambiguous value for argument '(.+?)'$", str(error).partition("\n")[0])
    if override := ambiguous[1] if ambiguous else getattr(error, "override", None):
        word = str(override)
        key, equals, _ = word.partition("=")
        if not (equals and re.fullmatch(r"[+~]{0,2}[\w./@]+", key)):
            meant = f"+experiment={word}" if word in named("experiment") else "key=value"
            return f"cannot read {word!r}: write {meant}"
        several = f"; for several, {key}=[A,B], or --multirun to sweep over them" if ambiguous else ""
        return f"cannot read {word!r}: write it with both kinds of quotes, {shlex.quote(_quoted(word))}{several}"

    if unknown := re.match(r"Could not override '(.+?)'", str(error)):
        return _unknown(unknown[1], command)

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = ("full_key", "object_type", "Set the environment", "Config search", "provider=", "See https")
    lines = [line for line in lines if not line.startswith(noise)]

    for i, line in enumerate(lines):
        if line.startswith("Available options"):
            near = nearest(lines[0].rpartition("/")[2].strip("'"), lines[i + 1 :])
            return f"{lines[0]}{near}. {line} {', '.join(lines[i + 1 :])}"
    return f"{' '.join(lines)}; pubsel {command} --help lists the keys"


def _unknown(key: str, command: str) -> str:
    """Return the message about a key that a command does not have."""
    if key == "experiment" and command in BY_HYDRA:
        return "experiment=NAME: write it with a + before it, +experiment=NAME"

    # A key that exists elsewhere, of another method or of another command, is no typing error.
    keys, group = set(keys_of(SCHEMAS[command])), key.partition(".")[0]
    if key in known_keys():
        what = f"the given {group} has no such setting" if group in GROUPS else "no setting of this command"
        near = nearest(key, [other for other in keys if other.startswith(f"{key}_")])
        return f"{key}: {what}{near}; --cfg job shows those that there are"
    keys |= {method for method in method_keys() if method.partition(".")[0] in keys}
    return f"unknown key {key}{nearest(key, keys)}; pubsel {command} --help lists them"


@cache
def known_keys() -> frozenset[str]:
    """Return the dotted keys of all commands."""
    return frozenset(key for schema in SCHEMAS.values() for key in keys_of(schema)) | method_keys()
