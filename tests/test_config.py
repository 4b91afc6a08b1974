import copy
import dataclasses
import itertools
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from pubsel import algorithms, records
from pubsel.messages import UsageError
from pubsel.models.small import NETWORKS
from pubsel.rules import canonical
from pubsel.settings import CONF
from pubsel.settings.compose import composed
from pubsel.settings.datasets import dataset_info, dataset_names
from pubsel.settings.identity import as_json, default_of, digest_of, identity_of, is_path
from pubsel.settings.keys import SCHEMAS, Augment, RankConfig, RunConfig, public_sets
from pubsel.settings.methods import check_method, method_keys, methods, option
from pubsel.settings.schema import check, defaults, keys_of, nearest

NEUTRAL = {
    "keep",
    *("device", "threads", "data_root", "results", "download", "debug", "training.chunk"),
    *("like", "replay", "training.checkpoint_seconds", "budget"),
}
EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))
OPTIONS = [
    f"{group}={path.stem}"
    for group in ("pair", "model", "algorithm", "distance", "privacy", "training")
    for path in sorted((CONF / group).glob("*.yaml"))
]


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
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
        ("epsilon", float("nan"), "finite"),
        ("epsilon", "four", "'four'"),
        ("epsilon", None, "None"),
        ("epsilon", True, "True"),
        ("privacy.delta", 0, "greater than 0"),
        ("privacy.delta", 1, "less than 1"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, "at most"),
        ("pair.m", 0, "at least 1"),
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
        ("privacy.delta", 1e-320, "too small to compute with"),
        ("training.learning_rate", 1e300, "too large to compute with"),
        ("training.weight_decay", 1e39, "too large to compute with"),
        ("training.steps", 999999999, "at most 10000000"),
        ("pair.m", 99999999999999999999, "too large to compute with"),
        ("model.input_size", 99999999999999999999, "must be at most 16384"),
        ("model.mean", [0.5, 1e-300], "too small to compute with"),
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
    for key, here in (
        ("epsilonn", r"epsilonn \(did you mean epsilon\?\); here: .*epsilon, epsilon_select, keep"),
        ("pair.typo", r"pair.typo; here: candidates, convert, m, metric, overlap, pool, pool_m, private, priv"),
    ):
        with pytest.raises(UsageError, match=f"^unknown key {here}") as refusal:
            check(RunConfig, with_value(key, 1))
        assert refusal.value.exit_code == 2


def test_a_setting_of_an_algorithm_is_checked_like_any_other() -> None:
    for override, words in (
        ("+algorithm.typo=1", "unknown key algorithm.typo; here: clip, clip_embedding"),
        ("algorithm.k=many", "algorithm.k: "),
        ("algorithm.clip_residual=0", "algorithm.clip_residual=0.0: must be at least 1e-12"),
        ("algorithm.clip_residual=1e300", "algorithm.clip_residual=1e+300: too large to compute with"),
        ("algorithm.power_iterations=99999999999999999999", "must be at most 1000000"),
        ("algorithm.power_iterations=1000000000", "must be at most 1000000"),
        ("algorithm.groups=rows", "layers, slices"),
        ("algorithm._target_=pubsel.algorithms.gep.NoSuch", "algorithm._target_=pubsel.algorithms.gep.NoSuch"),
        ("algorithm._target_=pathlib.Path", "algorithm._target_=pathlib.Path: no file of conf/"),
        ("~algorithm", "algorithm has no value"),
        ("algorithm.k=201", "lower algorithm.k"),
        ("pair.public=null", "give pair.public=NAME"),
        ("distance.m=1", "distance.m=1: must be at least 2"),
        ("distance.labels=wrong", "distance.labels: "),
        ("+distance.epsilon=1", "unknown key distance.epsilon; here: initialisations, k, labels, m, "),
        ("distance._target_=pubsel.distances.gsd.NoSuch", "distance._target_=pubsel.distances.gsd.NoSuch: "),
        ("distance._target_=pubsel.algorithms.gep.GEP", "give a subclass of pubsel.distances.Distance"),
        ("~distance._target_", "distance has no value: give distance=NAME"),
        ("distance.name=cosine", "GSD does not have this name, it may be gsd"),
    ):
        with pytest.raises(UsageError) as refusal:
            canonical(check(RunConfig, quickstart(override)))
        assert words in str(refusal.value), override


@pytest.mark.attack
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.name=../../../../evil"], "algorithm.name=../../../../evil: a name has letters"),
        (["algorithm.name=''"], "algorithm.name=: a name has letters"),
        (["algorithm.name=[gep]"], "algorithm.name: "),
        (["algorithm.name='a b'"], "algorithm.name=a b: a name has letters"),
        (
            ["algorithm=dp_sgd", "algorithm.name=gep"],
            "DPSGD does not have this name, it may be dp_raft, dp_sgd; to name a",
        ),
        (["algorithm=dp_sgd", "algorithm.name=my_sgd"], "give label=my_sgd"),
        (["algorithm.name=paragon"], "GEP does not have this name, it may be b_gep, gep; "),
        (["model.name=../../evil"], "model.name=../../evil: a name has letters"),
        (["model=pixels", "model.name=../../evil"], "model.name=../../evil: a name has letters"),
        (["distance.name=../evil"], "distance.name=../evil: a name has letters"),
    ],
)
def test_a_name_leaves_no_folder_and_tells_no_lie(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        canonical(check(RunConfig, quickstart(*overrides)))
    assert words in str(refusal.value)


def test_every_method_has_the_name_that_its_file_gives_it() -> None:
    for path in (CONF / "algorithm").glob("*.yaml"):
        made = option("algorithm", path.stem)
        check_method("algorithm", made, [])
        assert made["_target_"] in methods(CONF, "algorithm")[made["name"]]


def test_a_users_own_method_has_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("defaults: [dp_sgd_clip1]\nname: mine\n")
    (tmp_path / "algorithm" / "broken.yaml").write_text("name: [")
    (tmp_path / "algorithm" / "lie.yaml").write_text("defaults: [dp_sgd]\nname: gep\n")
    dp_sgd = {"_target_": "pubsel.algorithms.dp_sgd.DPSGD", "clip_norm": 1.0}
    check_method("algorithm", dp_sgd | {"name": "mine"}, [tmp_path])
    check_method("algorithm", {"_target_": "median_clip.MedianClip", "name": "median_clip"}, [])
    with pytest.raises(UsageError, match="gep is another method"):
        check_method("algorithm", {"_target_": "my.Own", "name": "gep"}, [])
    for name in ("mine2", "gep"):
        with pytest.raises(UsageError, match=f"^algorithm.name={name}: .*DPSGD does not have this name"):
            check_method("algorithm", dp_sgd | {"name": name}, [tmp_path])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("epochs", "training.epochs"),
        ("training.epoch", "training.epochs"),
        ("stat", "state"),
        ("Epsilon", "epsilon"),
        ("algorithm.clip_embeding", "algorithm.clip_embedding"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_key_is_named(typed: str, meant: str | None) -> None:
    known = {*keys_of(RunConfig), *method_keys(), "state"}
    assert nearest(typed, known) == (f" (did you mean {meant}?)" if meant else "")


def test_values_without_quotes_are_read_as_hydra_reads_them() -> None:
    words = ["++public=[ ./a b, ['c,d',\"e\"] , null]"]
    words += ["pool=null", "dry=True", "epsilon=1e-2", "to=a: b", "keep=false"]
    with composed("fit", words) as values:
        assert values.public == ["./a b", ["c,d", "e"], None]
        assert (values.pool, values.dry, values.epsilon, values.to, values.keep) == (None, True, "1e-2", "a: b", False)
    with composed("fit", ["private=a", *words[1:]]) as values:
        assert check(SCHEMAS["fit"], values).epsilon == 0.01


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
    """The one run, or cells of a sweep: every one, and of a large one those that differ from the first in one key.

    Each choice of files of conf/ composes once; values take their places in it.
    """
    parse = OverridesParser.create().parse_override
    params = compose(command, overrides, return_hydra_config=True).hydra.sweeper.params or {}
    swept = [parse(f"{key}={value}") for key, value in params.items()]
    values = [p.sweep_string_iterator() if p.is_sweep_override() else [p.get_value_element_as_str()] for p in swept]
    choices = [[f"{p.key_or_group}={value}" for value in of] for p, of in zip(swept, values, strict=True)]
    chosen = list(itertools.product(*choices))
    if len(chosen) > 4:
        first = chosen[0]
        chosen = [cell for cell in chosen if sum(a != b for a, b in zip(cell, first, strict=True)) <= 1]

    found, composed = [], dict[tuple[str, ...], DictConfig]()
    for cell in chosen:
        files = tuple(word for word in cell if (CONF / word.partition("=")[0]).is_dir())
        if files not in composed:
            composed[files] = compose(command, [*overrides, *cell])
        found.append(copy.deepcopy(composed[files]))
        for word in set(cell).difference(files):
            OmegaConf.update(found[-1], parse(word).key_or_group, parse(word).value(), merge=True)
    return found


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
            names = [settings.pair.private, *public_sets(settings.pair.public)]
            found.append(identity_of(settings))
        assert all(is_path(name) or dataset_info(name).title for name in names)  # each is a named dataset, or a folder
        assert values.model.name in [*NETWORKS, "logistic"] or values.model.architecture or values.model.backbone
    assert len(set(found)) == len(found) > 0  # no two cells of a sweep are one run


@pytest.mark.parametrize("kind", ["none", "imagenet", "anything"])
@pytest.mark.parametrize(
    ("private", "n"), [("cifar10", 50_000), ("chexpert", 191_027), ("eyepacs", 35_126), ("imagenet", 1_281_167)]
)
def test_a_preset_of_a_benchmark_has_no_public_set_and_a_delta_below_one_over_n(
    private: str, n: int, kind: str
) -> None:
    """Its public data are those that its features come from."""
    if (private, kind) == ("imagenet", "imagenet"):
        return
    settings = canonical(check(RunConfig, compose("run", [f"+experiment=rethinking_{private}_{kind}"])))
    assert (settings.pair.public, settings.pair.private.partition("_")[0]) == (None, private)
    assert 0.1 / n < settings.privacy.delta < 1 / n
    models = {"none": "scattering", "imagenet": "resnet50_sl", "anything": "clip_vit_g14"}
    assert settings.model.name == models[kind]
    assert settings.label == {"none": "no_public"}.get(kind, kind)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def written(file: str) -> dict[str, Any]:
    """The keys that a file of conf/ gives, and their values."""
    values = yaml.safe_load((CONF / f"{file}.yaml").read_text()) or {}
    return flat({key: value for key, value in values.items() if key not in ("defaults", "hydra", "help")})


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_value_has_one_home(command: str) -> None:
    """Where a key has a default in its dataclass, no file that a command always reads gives it, and an option gives it
    to change it, or to take back what the option below it says."""
    have = flat(defaults(SCHEMAS[command]))
    for file in ("common", command):
        assert not have.keys() & written(file).keys(), file
    for group in ("pair", "model", "privacy", "training"):
        for path in (CONF / group).glob("*.yaml"):
            if "\ndefaults:" in path.read_text():
                continue
            given = {f"{group}.{key}": value for key, value in written(f"{group}/{path.stem}").items()}
            assert [key for key in given if key in have and given[key] == have[key]] == [], path


@pytest.mark.parametrize("command", ["run", "predict", "export", "rank", "attack", "audit"])
def test_every_key_is_shown_and_can_be_given(command: str) -> None:
    """Of the keys that stand below null, such as model.backbone.crop, the one above."""
    with composed(command, []) as shown:
        for key in keys_of(SCHEMAS[command]):
            group = key.rpartition(".")[0]
            if OmegaConf.select(shown, group) is not None if group else True:
                there = key in flat(OmegaConf.to_container(shown)) or OmegaConf.is_dict(OmegaConf.select(shown, key))
                assert there, key


@pytest.mark.parametrize("group", ["algorithm", "distance"])
def test_every_setting_of_a_method_can_be_given(group: str) -> None:
    for path in sorted((CONF / group).glob("*.yaml")):
        values = option(group, path.stem)
        if values["_target_"] is not None:  # of distance=none
            settings = {f.name for f in dataclasses.fields(get_class(values["_target_"]))}
            # rows of norm 1 are what some files are about
            assert settings - {"unit"} <= values.keys(), path.stem
    automatic = [[f"algorithm={name}", "algorithm.clip=automatic"] for name in ("dp_sgd", "gep", "b_gep_k200")]
    of_head = ["algorithm=whitened_head", "algorithm.public_labels=names", "algorithm.class_names=[a, b]"]
    for words in (*automatic, of_head):
        with composed("run", words) as values:
            assert algorithms.build(check(RunConfig, values).algorithm).name


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_can_be_chosen(option: str) -> None:
    settings = check(RunConfig, compose("run", [option]))
    assert algorithms.build(settings.algorithm).name
    model = settings.model
    assert model.name in [*NETWORKS, "timm", "torchvision", "logistic"] or model.architecture or model.backbone
    assert [dataset_info(str(name)).title for name in (settings.pair.private, settings.pair.public)]


@pytest.mark.parametrize("name", dataset_names())
def test_every_dataset_is_described(name: str) -> None:
    info = dataset_info(name)
    assert len(info.mean) == len(info.std) == info.shape[0]
    assert info.names is None or len(set(info.names)) == info.classes


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
    others = {key: other(value) for key, value in keys.items()}
    others |= {"pair.read.bounds": [0.0, 7.0], "training.augment": [Augment.flip]}
    names = {key: identity_of(replaced(settings, key, value)) for key, value in others.items()}
    same = {key for key, name in names.items() if name == identity_of(settings)}
    assert same == NEUTRAL
    assert len(set(names.values())) == len(names) - len(NEUTRAL) + 1


def test_the_seed_of_the_pair() -> None:
    """It is that of the run, if it is ${seed}; where nothing is drawn, all seeds are one run."""

    def settings(*words: str) -> RunConfig:
        return canonical(check(RunConfig, quickstart("algorithm=dp_sgd", *words)))

    gep = ["algorithm=gep", "algorithm.k=50"]
    drawn = [*gep, "pair.public=digits", "++pair.take=train"]
    for words in (drawn, ["++pair.validation=0.1"], ["++pair.private_share=0.5"]):
        names = [identity_of(settings(*words, f"++pair.seed={seed}")) for seed in (0, 1, "${seed}")]
        assert len(set(names)) == 2
        assert names[0] == names[2] == identity_of(settings(*words))
        assert settings(*words, "++pair.seed=${seed}", "seed=7").pair.seed == 7
        assert settings(*words, "++pair.seed=3", "seed=7").pair.seed == 3

    for words in ([], gep):
        assert identity_of(settings(*words, "++pair.seed=5")) == identity_of(settings(*words))


def test_the_identity_is_readable_and_depends_on_no_order_of_keys() -> None:
    settings = check(RunConfig, quickstart("seed=3"))
    turned = dataclasses.replace(settings, algorithm=dict(reversed(settings.algorithm.items())))
    assert list(turned.algorithm) != list(settings.algorithm)
    assert identity_of(turned) == identity_of(settings)
    assert identity_of(settings).startswith("digits-digits-mnist_cnn-gep-eps4-seed3-")


def test_the_name_of_a_folder_is_never_too_long(tmp_path: Path) -> None:
    long = with_value("pair.public", [f"./{letter * 120}é" for letter in "abc"])
    name = identity_of(check(RunConfig, long))
    (tmp_path / name).mkdir()
    assert len(name.encode()) <= 255
    assert name.endswith(digest_of(as_json(check(RunConfig, long))))


def test_records_keep_their_names() -> None:
    """Each record that is kept has the name that its settings have today: one of each method and set of keys."""
    defaults: Any = OmegaConf.to_container(quickstart())
    kept = records.read_records(CONF.parent / "results")
    kinds = {(record["algorithm"], *flat(record["settings"])): record for record in kept}
    assert len(kinds) > 100
    for record in kinds.values():
        values = defaults | record["settings"] | {"epsilon": 1.0}
        for group in ("pair", "model", "privacy", "training"):
            neutral = {key: defaults[group][key] for key in ("chunk", "checkpoint_seconds") if key in defaults[group]}
            values[group] = neutral | record["settings"][group]
        settings = dataclasses.replace(check(RunConfig, values), epsilon=float(record["settings"]["epsilon"]))
        assert identity_of(settings) == record["identity"]


def test_combined_public_sets_are_named_a_plus_b() -> None:
    def name(public: str) -> str:
        return identity_of(check(RunConfig, quickstart(f"pair.public={public}")))

    assert name("[noise,photo_patches]").startswith("digits-noise+photo_patches-mnist_cnn-gep-eps4-seed0-")
    assert name("[../some/a+b c,noise]").startswith("digits-a_b_c+noise-")  # a path is the name of a folder
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


def test_equal_runs_are_one_run() -> None:
    def name(*overrides: str) -> str:
        return identity_of(canonical(check(RunConfig, quickstart(*overrides))))

    assert name("algorithm.clip_embedding=2") == name("algorithm.clip_embedding=2.0") != name()
    assert name("epsilon=4") == name("epsilon=4.0")
    # DP-SGD uses no public data, and training without noise spends nothing
    assert name("algorithm=dp_sgd", "pair.public=noise") == name("algorithm=dp_sgd", "pair.m=7", "distance=none")
    assert name("algorithm=non_private", "epsilon=1") == name("algorithm=non_private", "epsilon=2")
    assert name("algorithm=dp_sgd", "epsilon=1") != name("algorithm=dp_sgd", "epsilon=2")


def test_the_default_of_a_key_that_a_record_leaves_out():
    known = dict.fromkeys(("pair.m", "epsilon", "algorithm.k", "model.backbone.crop", "no.such", "pair.no"))
    known |= {"pair.private_share": 1.0, "pair.take": "test"}
    assert {key: default_of(key) for key in known} == known
