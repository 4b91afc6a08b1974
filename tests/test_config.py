import dataclasses
import itertools
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pubsel import algorithms, config, results
from pubsel.config import RankConfig, RunConfig, UsageError, check
from pubsel.models.small import NETWORKS
from pubsel.run import canonical

NEUTRAL = {
    *("device", "threads", "data_root", "results", "download", "debug", "estimate", "profile", "training.chunk"),
    *("replay", "tracking", "training.checkpoint_seconds"),
}
EXPERIMENTS = sorted((config.CONF / "experiment").glob("*.yaml"))
OPTIONS = [
    f"{group}={path.stem}"
    for group in ("pair", "model", "algorithm", "distance", "privacy", "training")
    for path in sorted((config.CONF / group).glob("*.yaml"))
]


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        yield


def quickstart(*overrides: str) -> DictConfig:
    return compose("run", ["+experiment=quickstart", *overrides])


def with_value(key: str, value: Any) -> DictConfig:
    values = quickstart()
    OmegaConf.update(values, key, value, force_add=True)
    return values


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epsilon", 0, "greater than 0"),
        ("epsilon", -1.5, "greater than 0"),
        ("epsilon", float("nan"), "finite"),
        ("epsilon", "four", "'four'"),
        ("epsilon", None, "None"),
        ("epsilon", True, "True"),
        ("privacy.delta", 0, "greater than 0"),
        ("privacy.delta", 1, "less than 1"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, "at most"),
        ("seed", 0.5, "0.5"),
        ("pair.m", 0, "at least 1"),
        ("distance.m", 1, "at least 2"),
        ("training.epochs", 0, "greater than 0"),
        ("training.momentum", 1, "less than 1"),
        ("training.decay", 1.01, "at most 1"),
        ("training.milestones", [0.5, 1.5], "at most 1"),
        ("training.milestones", [float("nan")], "finite"),
        ("training.milestones", 0.5, "milestones"),
        ("model.input_size", 0, "at least 1"),
        ("download", "perhaps", "perhaps"),
        ("device", "gpu", "auto, cpu, cuda"),
        ("privacy.accounting", "rdp", "prv, paper"),
        ("distance.labels", "wrong", "random, given"),
    ],
)
def test_a_wrong_value_is_refused_by_key(key: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check(RunConfig, with_value(key, value))
    text = str(refusal.value)
    assert text.startswith(key)
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy.delta", 0.999),
        ("training.momentum", 0),
        ("training.decay", 1),
        ("training.milestones", []),
        ("training.milestones", [0, 1]),
        ("seed", 2**63 - 1),
        ("threads", None),
    ],
)
def test_the_ends_of_a_range_are_allowed(key: str, value: Any) -> None:
    assert OmegaConf.select(OmegaConf.structured(check(RunConfig, with_value(key, value))), key) == value


def test_an_unknown_key_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"^unknown key epsilonn; here: .*epsilon, epsilon_select, es") as refusal:
        check(RunConfig, with_value("epsilonn", 1))
    assert refusal.value.exit_code == 2
    with pytest.raises(
        UsageError, match=r"^unknown key pair.typo; here: candidates, convert, m, private, private_share, public, "
    ):
        check(RunConfig, with_value("pair.typo", 1))


def test_a_setting_of_an_algorithm_is_checked_like_any_other() -> None:
    for override, words in (
        ("+algorithm.typo=1", "unknown key algorithm.typo; here: clip_embedding"),
        ("algorithm.k=many", "algorithm.k: "),
        ("algorithm.clip_residual=0", "algorithm.clip_residual=0.0: must be at least 1e-12"),
        ("algorithm.groups=rows", "layers, slices"),
        ("algorithm._target_=pubsel.algorithms.gep.NoSuch", "algorithm._target_=pubsel.algorithms.gep.NoSuch"),
        ("algorithm._target_=pathlib.Path", "algorithm: "),
        ("~algorithm", "algorithm has no value"),
        ("algorithm.k=201", "lower algorithm.k"),
        ("pair.public=null", "give pair.public=NAME"),
        ("distance.name=cosine", "unknown, use gsd, "),
    ):
        with pytest.raises(UsageError) as refusal:
            canonical(check(RunConfig, quickstart(override)))
        assert words in str(refusal.value), override


def test_a_value_that_must_be_given_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"^private has no value: give private=\.\.\.$"):
        check(RankConfig, compose("rank"))


# Files of conf


def command_of(experiment: Path) -> list[str]:
    """The words of the command in an experiment's header."""
    package, command = experiment.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    words = shlex.split(command.removeprefix("# "))
    assert words[0] == "pubsel"
    assert words[2] == f"+experiment={experiment.stem}"
    return words[1:]


def cells(command: str, overrides: list[str]) -> list[DictConfig]:
    """The one run, or cells of a sweep: every one, and of a large one those that differ from the first in one key."""
    params = compose(command, overrides, return_hydra_config=True).hydra.sweeper.params or {}
    parsed = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    choices = [
        [
            f"{p.key_or_group}={value}"
            for value in (p.sweep_string_iterator() if p.is_sweep_override() else [p.get_value_element_as_str()])
        ]
        for p in parsed
    ]
    chosen = list(itertools.product(*choices))
    if len(chosen) > 40:
        first = chosen[0]
        chosen = [cell for cell in chosen if sum(a != b for a, b in zip(cell, first, strict=True)) <= 1]
    return [compose(command, [*overrides, *cell]) for cell in chosen]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_composes_as_its_header_says(experiment: Path) -> None:
    command, *overrides = command_of(experiment)
    found = []
    for values in cells(command, overrides):
        if command == "rank":
            ranked = check(RankConfig, values)
            names = [ranked.private, *ranked.public]
            found.append(str(ranked))
        else:
            settings = canonical(check(RunConfig, values))
            names = [settings.pair.private, *config.public_sets(settings.pair.public)]
            found.append(config.identity(settings))
        assert [config.dataset(name).title for name in names]  # each is a named dataset
        assert values.model.name in [*NETWORKS, "logistic"] or values.model.architecture or values.model.backbone
    assert len(set(found)) == len(found) > 0  # no two cells of a sweep are one run


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_can_be_chosen(option: str) -> None:
    settings = check(RunConfig, compose("run", [option]))
    assert algorithms.build(settings.algorithm).name
    assert (
        settings.model.name in [*NETWORKS, "timm", "torchvision", "logistic"]
        or settings.model.architecture
        or settings.model.backbone
    )
    assert [config.dataset(str(name)).title for name in (settings.pair.private, settings.pair.public)]


@pytest.mark.parametrize("name", config.datasets())
def test_every_dataset_is_described(name: str) -> None:
    info = config.dataset(name)
    assert len(info.mean) == len(info.std) == info.shape[0]


# Identity


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a configuration: its dotted key and value."""
    if not isinstance(node, dict):
        node = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    found: dict[str, Any] = {}
    for key, value in node.items():
        inner = isinstance(value, dict) or dataclasses.is_dataclass(value)
        found |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def replaced(node: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    if isinstance(node, dict):
        return node | {first: value}
    return dataclasses.replace(node, **{first: replaced(getattr(node, first), rest, value) if rest else value})


def other(value: Any) -> Any:
    """A different value of the same kind."""
    match value:
        case bool():
            return not value
        case Enum():
            return next(member for member in type(value) if member != value)
        case int() | float():
            return value + 1
        case list():
            return [*value, 0.75]
        case None:
            return 7
        case _:
            return f"{value}x"


def test_the_identity_changes_with_every_setting_that_can_change_the_result_and_with_no_other() -> None:
    settings = check(RunConfig, quickstart())
    keys = leaves(settings)
    assert set(keys) >= NEUTRAL | {"seed", "epsilon", "pair.m", "model.norm", "algorithm.k", "privacy.secure_noise"}
    names = {key: config.identity(replaced(settings, key, other(value))) for key, value in keys.items()}
    same = {key for key, name in names.items() if name == config.identity(settings)}
    assert same == NEUTRAL
    assert len(set(names.values())) == len(names) - len(NEUTRAL) + 1


def test_the_identity_is_readable_and_depends_on_no_order_of_keys() -> None:
    settings = check(RunConfig, quickstart("seed=3"))
    turned = dataclasses.replace(settings, algorithm=dict(reversed(settings.algorithm.items())))
    assert list(turned.algorithm) != list(settings.algorithm)
    assert config.identity(turned) == config.identity(settings)
    assert config.identity(settings).startswith("digits-digits-mnist_cnn-gep-eps4-seed3-")


def test_the_identity_of_a_path_is_the_name_of_a_folder() -> None:
    name = config.identity(check(RunConfig, quickstart("pair.public=../some where/images")))
    assert "/" not in name
    assert " " not in name


def test_records_keep_their_names() -> None:
    """Each record that is kept has the name that its settings have today."""
    defaults: Any = OmegaConf.to_container(quickstart())
    kept = results.read_records(config.CONF.parent / "results")
    for record in kept[::20] + [record for record in kept if record["seed"] == 2][:20]:
        values = defaults | record["settings"] | {"epsilon": 1.0}
        for group in ("pair", "model", "distance", "privacy", "training"):
            neutral = {key: defaults[group][key] for key in ("chunk", "checkpoint_seconds") if key in defaults[group]}
            values[group] = neutral | record["settings"][group]
        settings = dataclasses.replace(check(RunConfig, values), epsilon=float(record["settings"]["epsilon"]))
        assert config.identity(settings) == record["identity"]


def test_combined_public_sets_are_named_a_plus_b() -> None:
    def name(public: str) -> str:
        return config.identity(check(RunConfig, quickstart(f"pair.public={public}")))

    assert name("[noise,photo_patches]").startswith("digits-noise+photo_patches-mnist_cnn-gep-eps4-seed0-")
    assert name("[../some/a+b,noise]").startswith("digits-a_b+noise-")
    assert name("[noise]") == name("noise")  # a list of one is that one
    names = [name(f"[{sets}]") for sets in ("noise,photo_patches", "photo_patches,noise", "noise,mnist", "noise")]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("public", "words"),
    [
        ([], r"^pair\.public=\[\]: give a name or path"),
        (["noise", "mnist", "noise"], r"^pair\.public=\[noise,mnist,noise\]: give each set once$"),
        (["noise", ["mnist", "digits"]], r"^pair\.public=\[noise,\[mnist,digits\]\]: give a name or path"),
        (["noise", None], r"^pair\.public=\[noise,null\]: give a name or path"),
        ({"a": "noise"}, r"^pair\.public=\{a: noise\}: give a name or path"),
    ],
)
def test_a_wrong_combination_is_refused(public: Any, words: str) -> None:
    values = quickstart()
    values.pair.public = public
    with pytest.raises(UsageError, match=words):
        check(RunConfig, values)


def test_candidates_may_be_combinations() -> None:
    def candidates(public: str) -> list[Any]:
        return check(RankConfig, compose("rank", ["private=digits", f"public={public}"])).public

    assert candidates("[[noise,mnist],digits,[svhn]]") == [["noise", "mnist"], "digits", "svhn"]
    with pytest.raises(UsageError, match=r"^public=\[noise,noise\]: give each set once$"):
        candidates("[[noise,noise],digits]")


def test_equal_runs_are_one_run() -> None:
    def name(*overrides: str) -> str:
        return config.identity(canonical(check(RunConfig, quickstart(*overrides))))

    assert name("algorithm.clip_embedding=2") == name("algorithm.clip_embedding=2.0") != name()
    assert name("epsilon=4") == name("epsilon=4.0")
    # DP-SGD uses no public data, and training without noise spends nothing
    assert name("algorithm=dp_sgd", "pair.public=noise") == name("algorithm=dp_sgd", "pair.m=7", "distance.name=none")
    assert name("algorithm=non_private", "epsilon=1") == name("algorithm=non_private", "epsilon=2")
    assert name("algorithm=dp_sgd", "epsilon=1") != name("algorithm=dp_sgd", "epsilon=2")


def test_the_default_of_a_key_that_a_record_leaves_out():
    known = {"pair.private_share": 1.0, "pair.take": "test", "pair.m": None, "epsilon": None, "algorithm.k": None,
             "model.backbone.crop": None, "no.such": None, "pair.no": None}  # fmt: skip
    assert {key: config.default(key) for key in known} == known
