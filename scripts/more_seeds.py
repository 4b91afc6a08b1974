"""More seeds of what a table selected: `python scripts/more_seeds.py TABLE SEED,SEED [key=value ...]`.

Where settings are chosen by one seed, the chosen cells alone are worth more. A setting given here must not change a
result (`threads=1 results=FOLDER`). Cells that are finished are passed over.
"""

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pubsel.commands import run
from pubsel.commands.replay import settings_of
from pubsel.settings import CONF
from pubsel.settings.keys import RunConfig
from pubsel.tables import join


def with_seed(record: dict[str, Any], seed: int, base: DictConfig) -> RunConfig:
    """The settings of a record's run with another seed; UsageError where those of today would give it another name."""
    again = settings_of(record, base)
    again.seed = seed
    return again


def main(table: str, seeds: list[int], words: list[str]) -> None:
    """Run them."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        base = compose("run", overrides=words)
    for cell in join.table_cells(table, Path(base.results)):
        have = {record["seed"] for record in cell.records}
        for seed in (seed for seed in seeds if seed not in have):
            run.run(with_seed(cell.records[0], seed, base))


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2].split(",")], sys.argv[3:])
