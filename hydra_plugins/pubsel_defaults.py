"""The defaults of settings, as configurations that conf/COMMAND.yaml names: COMMAND_defaults. Hydra finds this file by
its place; it is imported at every start, so it imports little."""

from hydra.core.config_store import ConfigStore

from pubsel.settings.keys import SCHEMAS
from pubsel.settings.schema import defaults

for command, schema in SCHEMAS.items():
    if values := defaults(schema):
        ConfigStore.instance().store(f"{command}_defaults", values, provider="pubsel")

# Hydra's --help copies the store, a singleton whose configurations are copied as they are loaded, once for each group.
ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
