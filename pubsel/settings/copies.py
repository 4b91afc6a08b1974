"""The cells of a sweep, as Hydra composes them: of cells that choose the same options of groups, one is composed, and
the values of the others are set in it, since a composition takes longer than all else that surrounds a short run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.base import Node
from omegaconf.errors import OmegaConfBaseException

from pubsel.settings.keys import SCHEMAS
from pubsel.settings.schema import in_types


@dataclass
class CellCopies:
    """Configurations of cells, which share what the same words lead to.

    compose: composes words as Hydra does. options: returns the options of a group, none for any other key.
    """

    compose: Callable[[list[str]], DictConfig]
    options: Callable[[str], list[str]]
    parser: OverridesParser = field(default_factory=OverridesParser.create)
    parsed: dict[str, Override] = field(default_factory=dict)  # by the word
    groups: dict[str, bool] = field(default_factory=dict)  # keys, and whether they choose options
    whole: dict[tuple[str, ...], tuple[DictConfig, dict[str, Node]]] = field(default_factory=dict)  # and its content
    parts: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, Node]] = field(default_factory=dict)

    def read(self, word: str) -> Override:
        """Return a word in Hydra's grammar."""
        if word not in self.parsed:
            (self.parsed[word],) = self.parser.parse_overrides([word])
        return self.parsed[word]

    def apart(self, words: Sequence[Override]) -> tuple[list[Override], tuple[str, ...]]:
        """Return the words that change values alone, and the others, which choose options, add or remove."""
        for word in words:
            if word.key_or_group not in self.groups:
                self.groups[word.key_or_group] = bool(self.options(word.key_or_group))

        # a word that adds or removes a key keeps its place among the words of the same part
        others = [word for word in words if not self.groups[word.key_or_group] or isinstance(word.value(), dict)]
        fixed = {_part(word) for word in others if word.is_add() or word.is_delete()} | {"hydra"}
        values = [word for word in others if not (_part(word) in fixed or word.is_sweep_override())]
        alone = {id(word) for word in values}
        return values, tuple(str(word.input_line) for word in words if id(word) not in alone)

    def composed(self, cell: Sequence[str]) -> DictConfig | None:
        """Return the configuration of a cell, until that of the next cell, which shares its nodes; None if its values
        do not fit, for which Hydra has the message."""
        values, options = self.apart([self.read(word) for word in cell])
        if options not in self.whole:
            whole = self.compose(list(options))
            self.whole[options] = whole, dict(whole._content)  # type: ignore[arg-type]
        whole, pristine = self.whole[options]
        content: dict[str, Node] = whole._content  # type: ignore[assignment]
        content.clear()
        content.update(pristine)

        # parts do not depend on each other before interpolations are resolved
        by_part: dict[str, list[Override]] = {}
        for word in values:
            by_part.setdefault(_part(word), []).append(word)
        for part, words in by_part.items():
            key = options, tuple(str(word.input_line) for word in words)
            if key not in self.parts:
                content |= {part: copy.deepcopy(pristine[part])} if part in pristine else {}
                try:
                    ConfigLoaderImpl._apply_overrides_to_config(words, whole)
                except (ConfigCompositionException, AttributeError):  # the latter for a mapping in place of null
                    return None
                self.parts[key] = part, content[part]
            content[part] = self.parts[key][1]
        return whole


def _part(word: Override) -> str:
    return word.key_or_group.partition(".")[0]


class Loader(ConfigLoaderImpl):
    """Hydra's loader, for the cells of one sweep in one process."""

    def __init__(self, loader: ConfigLoader):
        super().__init__(loader.get_search_path())
        self.copies: CellCopies | None = None

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Return the configuration of a cell, which is Hydra's, in the types of the command's settings if they fit; so
        a key of these that no file of conf/ has needs no +."""
        hydra = super().load_sweep_config
        schema = SCHEMAS[master_config.hydra.job.config_name]
        if self.copies is None:
            self.copies = CellCopies(
                lambda words: with_types(schema, hydra(master_config, words)), self.get_group_options
            )
        whole = self.copies.composed(sweep_overrides)
        # another search path may have groups that this loader does not know
        if whole is None or whole.hydra.searchpath:
            return hydra(master_config, sweep_overrides)

        OmegaConf.copy_cache(master_config, whole)
        OmegaConf.set_readonly(whole.hydra, False)  # the cell before has closed it
        words, job = [self.copies.read(word) for word in sweep_overrides], whole.hydra.job
        task = [word for word in words if not word.is_hydra_override()]
        whole.hydra.overrides.task = [word.input_line for word in task]
        about = job.config.override_dirname
        job.override_dirname = get_overrides_dirname(task, about.exclude_keys, about.item_sep, about.kv_sep)
        return whole  # a job changes no more of it than what launchers set in every cell


def with_types(schema: Any, whole: DictConfig) -> DictConfig:
    """Return a configuration of Hydra's in the types of a command's settings, for which a check of them is short; as it
    is if they do not fit, for which that check has the message."""
    try:
        values = settings_part(schema, whole)
    except OmegaConfBaseException:
        return whole
    with open_dict(values):
        values.hydra = whole._get_node("hydra")
    OmegaConf.set_struct(values, True)  # as Hydra does: a new key of a free mapping needs a +
    return values


def settings_part(schema: Any, whole: DictConfig) -> DictConfig:
    """Return the settings in a configuration of Hydra's, in their types."""
    return in_types(schema, OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"]))
