"""Hydra's launchers for many cells at a time: processes, logs, one view, failures at the end
(pubsel/commands/sweep.py). Hydra finds this file by its place; it is imported at every start, so it imports little."""

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from pubsel.files import plain
from pubsel.messages import CellsFailed, UsageError, UserError, needs_extra

# The defaults of the keys hydra.launcher.*


@dataclass
class SweeperConf:
    """hydra/sweeper=basic."""

    _target_: str = f"{__name__}.Sweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    cells: str | None = None  # a file with a cell in each line: its words, which stand behind those of the command


@dataclass
class BasicConf:
    """hydra/launcher=basic: one after the other, in this process."""

    _target_: str = f"{__name__}.Basic"


@dataclass
class JoblibConf:
    """hydra/launcher=joblib: side by side on this machine. CPU threads are divided, GPUs taken in turn."""

    _target_: str = f"{__name__}.Joblib"
    n_jobs: int | None = None  # cells at a time; null: as many as GPUs, or without one cores, allow


@dataclass
class LocalConf:
    """hydra/launcher=submitit_local: as on a cluster, but on this machine, all cells at once."""

    _target_: str = f"{__name__}.Submitit"
    cluster: str = "local"
    name: str = "pubsel"
    timeout_min: int = 1440
    max_num_timeout: int = 100  # so often a job that reaches its time limit is queued again
    signal_delay_s: int = 120  # between the signal to stop and the end
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: int | None = None
    stderr_to_stdout: bool = True


@dataclass
class SlurmConf(LocalConf):
    """hydra/launcher=submitit_slurm: jobs of a cluster, which go on after preemption and the time limit."""

    cluster: str = "slurm"
    partition: str | None = None  # sinfo lists them
    gpus_per_node: int | None = 1
    cpus_per_task: int | None = 8
    mem_gb: int | None = 32
    array_parallelism: int = 256  # jobs at a time
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    setup: list[str] | None = None  # shell commands before each job: [module load cuda]
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # of sbatch: +....mail-type=END


def register() -> None:
    """Replace the plugins' own, under the same names, once Hydra has found those."""
    Plugins.instance()
    store = ConfigStore.instance().store
    store("basic", SweeperConf, "hydra/sweeper")
    store("basic", BasicConf, "hydra/launcher")
    store("joblib", JoblibConf, "hydra/launcher")
    store("submitit_local", LocalConf, "hydra/launcher")
    store("submitit_slurm", SlurmConf, "hydra/launcher")


def in_a_cell(state: dict[str, Any]) -> dict[str, Any]:
    """Return Hydra's state of the sweep for the process of a cell, with the plugins that this one has found: Hydra
    would search for them again, and what they store would replace ours."""
    return {**state, "instances": {**state["instances"], Plugins: Plugins.instance()}}


def execute_job(*arguments: Any) -> JobReturn:
    """Run a cell by the function of hydra-joblib-launcher; the last argument is the state."""
    from hydra_plugins.hydra_joblib_launcher import _core

    *others, state = arguments
    return _core.execute_job(*others, in_a_cell(state))


class Sweeper(BasicSweeper):
    """Hydra's own sweeper, except that before the start it composes the first cell and each choice of an option, not
    every cell, which takes minutes for hundreds; a wrong value is reported by its cell. It also takes cells from a
    file, as `pubsel make` lists them, which no product of values gives."""

    def __init__(
        self, max_batch_size: int | None, params: dict[str, str] | None = None, cells: str | None = None
    ) -> None:
        super().__init__(max_batch_size, params)
        self.cells = cells

    def split_arguments(  # type: ignore[override] # a static method, which knows of no file
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        if self.cells is None:
            return BasicSweeper.split_arguments(overrides, max_batch_size)
        try:
            lines = plain(Path(self.cells)).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"hydra.sweeper.cells={self.cells}: {error.strerror}") from None

        parser = OverridesParser.create()
        cells: list[list[str]] = []
        for line in lines:
            words = parser.parse_overrides(shlex.split(line, comments=True))
            cells += BasicSweeper.split_arguments([*overrides, *words], None)[0] if words else []
        return [list(chunk) for chunk in self.split_overrides_to_chunks(cells, max_batch_size)] if cells else []

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        assert self.hydra_context is not None
        assert self.config is not None
        hydras = Path(self.config.hydra.sweep.dir, "multirun.yaml")  # has paths of this machine, and nobody reads it
        hydras.unlink(missing_ok=True)
        loader = self.hydra_context.config_loader
        groups = {word.partition("=")[0] for word in (batch[0] if batch else [])}
        groups = {key for key in groups if loader.get_group_options(key.lstrip("+~"))}
        seen: set[str] = set()
        chosen = []
        for i, overrides in enumerate(batch):
            new = {word for word in overrides if word.partition("=")[0] in groups} - seen
            if new or i == 0:
                chosen.append(overrides)
            seen |= new
        super().validate_batch_is_legal(chosen)


class Basic(BasicLauncher):
    """Hydra's own launcher, except that cells which choose the same options are composed once."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from pubsel.settings.copies import Loader

        loader = Loader(hydra_context.config_loader)
        once = dataclasses.replace(hydra_context, config_loader=loader)
        super().setup(hydra_context=once, task_function=task_function, config=config)


class _Many(Launcher):
    """A launcher of many cells at a time: it gives each sweep a folder, and leads to one of a plugin."""

    config: DictConfig
    task_function: Any
    hydra_context: Any

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def prepared(self, plugin: Any, job_overrides: Sequence[Sequence[str]], apart: bool) -> tuple[Path, list[str]]:
        """Set up the plugin's launcher to run cells in a new folder; return the folder, and the words in which the
        cells differ."""
        from pubsel.commands import sweep
        from pubsel.training import torchrun

        if torchrun.place()[1] > 1:
            raise UsageError("torchrun: its processes share one cell after another: leave hydra/launcher out")
        folder = sweep.new_folder(str(self.config.results))
        with read_write(self.config), open_dict(self.config):
            self.config.hydra.sweep.dir = str(folder)
        cell = sweep.CellTask(self.task_function, folder, apart)
        plugin.setup(hydra_context=self.hydra_context, task_function=cell, config=self.config)
        return folder, sweep.telling([filter_overrides(overrides) for overrides in job_overrides])


class Joblib(_Many):
    """Cells side by side on one machine: jobs of hydra-joblib-launcher, in processes of joblib's loky."""

    def __init__(self, n_jobs: int | None):
        self.n_jobs = n_jobs

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

        from pubsel.commands import sweep
        from pubsel.training import workers

        plugin = JoblibLauncher()
        folder, cells = self.prepared(plugin, job_overrides, apart=True)
        device, threads = str(self.config.get("device", "cpu")), self.config.get("threads")
        places, start = workers.places_for(folder, len(job_overrides), self.n_jobs, device, threads)
        about = (self.hydra_context, self.config, plugin.task_function, Singleton.get_state())
        calls = [(execute_job, initial_job_idx + i, list(words), *about) for i, words in enumerate(job_overrides)]
        with sweep.Display(folder, cells, initial_job_idx, places) as view:
            returns = workers.run_parallel(calls, places, start, lambda i, why: view.lose(initial_job_idx + i, why))
        if view.failed():
            raise CellsFailed(view.failed())
        return [found for found in returns if found is not None]  # one killed behind its record has none


class Submitit(_Many):
    """Cells as jobs of submitit. __call__ and checkpoint of hydra-submitit-launcher run in a job, and submit it again
    after preemption or at the time limit; the run resumes from its own checkpoint. A job that is killed fails its cell
    alone."""

    def __init__(self, cluster: str, max_num_timeout: int, **parameters: Any):
        self.cluster, self.max_num_timeout, self.parameters = cluster, max_num_timeout, parameters

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        try:
            import submitit
            from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
            from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
        except ImportError:
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {needs_extra('slurm')}") from None
        from pubsel.commands import sweep

        class Job(BaseSubmititLauncher):  # type: ignore[misc]
            def __call__(self, *arguments: Any) -> JobReturn:
                *others, state = arguments
                return super().__call__(*others, in_a_cell(state))

        job = Job()
        folder, cells = self.prepared(job, job_overrides, apart=False)
        try:
            executor = submitit.AutoExecutor(
                folder=folder / "jobs" / "%j", cluster=self.cluster, slurm_max_num_timeout=self.max_num_timeout
            )
        except RuntimeError as error:
            raise UserError(f"hydra/launcher=submitit_{self.cluster}: {error}") from None
        common = {f.name for f in dataclasses.fields(BaseQueueConf)}
        given: Any = OmegaConf.to_container(OmegaConf.create(self.parameters))
        executor.update_parameters(
            **{key if key in common else f"slurm_{key}": value for key, value in given.items() if value is not None}
        )
        numbers = list(range(initial_job_idx, initial_job_idx + len(cells)))
        arguments = [
            (list(w), "hydra.sweep.dir", n, "", Singleton.get_state())
            for w, n in zip(job_overrides, numbers, strict=True)
        ]
        jobs = executor.map_array(job, *zip(*arguments, strict=True))
        with sweep.Display(folder, cells, initial_job_idx, len(cells)) as view:
            try:
                while not all(job.done() for job in jobs):
                    time.sleep(sweep.POLL_SECONDS)
            except KeyboardInterrupt:
                self._left(jobs)
                raise
            for number, ended in zip(numbers, jobs, strict=True):
                if ended.exception() is not None:
                    view.lose(
                        number, f"job {ended.job_id} ended as {ended.state}, without a result; see {ended.paths.stdout}"
                    )
        if view.failed():
            raise CellsFailed(view.failed())
        return [job.result() for job in jobs]

    def _left(self, jobs: list[Any]) -> None:
        """Stop jobs on this machine, after Ctrl-C; those of a cluster continue."""
        if self.cluster == "local":
            for job in jobs:
                job.cancel()
        else:
            ids = " ".join(sorted({job.job_id.partition("_")[0] for job in jobs}))
            print(f"the jobs go on without this view; scancel {ids} stops them", file=sys.stderr)
