"""The runs that a table of a paper is about: those with the settings that `pubsel make` gives them. Another run with
label `paper`, such as a short one to try a command, is shown as `own`, with the settings that differ."""

import json
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from pubsel.papers import join
from pubsel.papers.join import OWN_LABEL, Table
from pubsel.settings import CONF, own_folders
from pubsel.settings.command_line import written
from pubsel.settings.compose import another
from pubsel.settings.identity import default_of
from pubsel.settings.keys import RunConfig
from pubsel.settings.schema import leaves, neutral

# keys with a column of their own, or averaged over; what runs without public data leave out; what changes no result
FREE = {"seed", "pair.seed", "epsilon", "pair.public", *neutral(RunConfig)}
UNREAD = {"pair.m", "pair.take", "pair.convert"}
MAIN = ("pair.private", "model.name", "algorithm.name")


def intended_table(name: str, records: list[dict[str, Any]], ranks: list[dict[str, Any]] | None = None) -> Table:
    """Return `join.make` of records, in which no run has the label `paper` that has other settings."""
    return join.make(name, with_own_label(name, records), ranks)


def with_own_label(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records, those with label `paper` and other settings than the table's runs with label `own`, and with the
    dotted keys that differ from the nearest of these runs as `differ`."""
    about = join.spec(name)
    claimed = [record for record in join.belonging(about, records) if record["label"] == "paper"]
    if not (about.paper and about.runs and claimed):
        return records

    # records that differ in seeds alone are compared once
    every, known, differ = list(intended(name)), dict[str, list[str]](), dict[str, list[str]]()
    for record in claimed:
        free = FREE | UNREAD if record["public"] is None else FREE
        settings = {key: value for key, value in leaves(record["settings"]) if key not in free}
        text = json.dumps(settings, sort_keys=True)
        if text not in known:
            alike = [each for each in every if all(settings.get(key) == each.get(key) for key in MAIN)]
            known[text] = min((keys_apart(settings, each, free) for each in alike or every), key=len, default=[])
        differ[record["identity"]] = known[text]

    other = {identity: {"label": OWN_LABEL, "differ": keys} for identity, keys in differ.items() if keys}
    return [record | other.get(record["identity"], {}) for record in records]


def keys_apart(settings: dict[str, Any], intended: dict[str, Any], free: set[str]) -> list[str]:
    """Return the keys of a record's settings, without groups, that a run of the table has with another value."""
    # a record leaves out what is a default, and what its method does not read
    left_out = {key: default_of(key) for key in intended.keys() - settings.keys() - free}
    values = settings | {key: value for key, value in left_out.items() if value is not None}
    return sorted(key for key, value in values.items() if value != intended.get(key, default_of(key)))


def intended(name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run that a table lists with label `paper`, without groups; of those that differ in
    FREE alone, of one."""
    from hydra import initialize_config_dir

    from pubsel.papers.make import Composer, steps_of

    search = [f"hydra.searchpath={written([f'file://{folder}' for folder in own_folders()])}"] if own_folders() else []
    with another(), initialize_config_dir(str(CONF), version_base="1.3"):
        # what the words choose is composed once, and the values of the others are put into it
        composer, composed, seen = Composer("run"), dict[tuple[str, ...], dict[str, Any]](), set[str]()
        for step in steps_of(name):
            for cell in composer.cells([*search, *step.words]) if step.command == "run" else []:
                words = [word for word in map(composer.words.read, cell) if word.key_or_group not in FREE]
                numbers, options = composer.words.apart(words)
                if options not in composed:
                    values: Any = OmegaConf.to_container(composer.composed(options), resolve=True, enum_to_str=True)
                    composed[options] = dict(leaves(values))
                settings = composed[options] | dict(leaves({word.key_or_group: word.value() for word in numbers}))
                text = json.dumps(settings, sort_keys=True, default=str)
                if settings["label"] == "paper" and text not in seen:
                    seen.add(text)
                    yield settings
