import copy
import json
import os
import random
import shlex
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from pubsel import records
from pubsel.cell import canonical
from pubsel.commands import replay
from pubsel.settings import CONF, command_line
from pubsel.settings.identity import as_json, identity_of
from pubsel.settings.keys import RankConfig, RunConfig
from pubsel.settings.schema import check
from tests.test_numbers import rounds_as_records_were_made

RECORDS = records.read_records(CONF.parent / "results")


def identity(words: list[str]) -> str:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return identity_of(canonical(check(RunConfig, compose("run", words))))


def words(record: dict) -> list[str]:
    program, command, *rest = shlex.split(command_line.command(record))
    assert (program, command) == ("pubsel", "run")
    return rest


def kind(record: dict) -> tuple:
    return record["model"], record["algorithm"], record["settings"]["pair"]["private"] == "flowers5"


EXPERIMENTS = [path.stem for path in (CONF / "experiment").glob("*.yaml") if "\nprivate:" not in path.read_text()]


@pytest.mark.parametrize("record", {kind(r): r for r in RECORDS}.values(), ids=lambda record: record["identity"])
def test_the_command_of_each_kind_of_record_makes_the_same_run(record):
    assert identity(words(record)) == record["identity"]


def test_every_record_has_a_short_command():
    commands = {command_line.command(record) for record in RECORDS}
    assert len(commands) == len(RECORDS)
    assert max(map(len, commands)) < 700
    assert not any("~" in command for command in commands)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS)[::4])
def test_the_command_of_each_experiment_makes_the_same_run(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = canonical(check(RunConfig, compose("run", [f"+experiment={name}"])))
    record = {"settings": json.loads(json.dumps(as_json(made)))}
    assert identity(words(record)) == identity_of(made)


@pytest.mark.parametrize(
    "more",
    [
        ["pair.private='/data/my images, \\'mine\\' (1)/a=b'", "pair.public=[./a,'b c/d',\"7\"]"],
        ["pair.private='C:\\\\x\\\\'", "pair.public=./true.npz", "label='null'"],
        ["label='1e5'", "epsilon=1e-3", "privacy.delta=1e-7", "seed=9223372036854775807", "training.milestones=[]"],
        ["model=timm", "model.architecture=vit_tiny", "model.lora={layers:[qkv],r:4,alpha:8}",
         "++model.options={a:{b:1}}"],
        ["model=timm", "model.architecture=x.y_z", "model.adapters={layers:[attn,mlp],size:64}",
         "model.trained=[head]"],
        ["model=mobilenetv2_coral", "algorithm=pillar", "~model.backbone.options", "model.backbone.mean=null",
         "pair.take=train"],
        ["model=linear", "++model.backbone={architecture:resnet18,crop:0.5}", "algorithm=adamix", "training=adamix"],
        ["algorithm=adamix_clip", "training=dp_raft", "privacy=adamix", "algorithm.text_scale=3"],
        ["algorithm=non_private", "distance=none", "training.optimizer=adam", "training.steps=7"],
        ["algorithm=only_public", "training.average=true", "pair.shots=3", "pair.take=train", "pair.validation=0.5"],
        ["algorithm=dp_sgd", "pair.private_share=0.5", "pair.m=77", "distance=gsd_300"],
    ],
)  # fmt: skip
def test_commands_of_unusual_settings(more):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = canonical(check(RunConfig, compose("run", more)))
    record = {"settings": json.loads(json.dumps(as_json(made))), "device": "cuda:1"}
    assert identity(words(record)) == identity_of(made)
    assert words(record)[-1] == "device=cuda"


def test_a_key_that_a_record_lacks_has_its_default():
    made = copy.deepcopy(next(r for r in RECORDS if r["algorithm"] == "pillar")["settings"])
    assert made["model"]["backbone"].pop("input_size")
    assert "~model.backbone.input_size" in command_line.overrides(made)


@pytest.mark.parametrize(
    "more",
    [
        ["private=digits", "public=[digits,[photo_patches,noise]]", "distance.m=200"],
        ["private='/my images'", "public=[a]", "model=mobilenetv2", "distance=otdd", "seed=3"],
        ["private=digits", "public=[digits,noise]", "epsilon_select=0.1", "select.cap=0.3", "secure_noise=true"],
    ],
)
def test_a_measured_distance_has_the_command_that_measures_it(more):
    def settings(words):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return json.loads(json.dumps(as_json(check(RankConfig, compose("rank", words)))))

    program, command, *rest = shlex.split(command_line.command({"settings": settings(more), "device": "cpu"}))
    assert (program, command, rest.pop()) == ("pubsel", "rank", "device=cpu")
    assert settings(rest) == settings(more)
    assert len(rest) <= len(more) + 3


def shipped() -> list[dict]:
    """Return up to six records of this program's numbers and version of torch that take seconds, others each day."""
    # products of numpy in the older records of PILLAR have an unknown number of threads
    kind = {"private": "flowers5", "model": "scattering"}
    torch = version("torch").partition("+")[0]  # another version rounds otherwise, so its noise is another
    current = [
        record for record in RECORDS
        if not records.outdated(record) and kind.items() <= record.items() and record["versions"]["torch"] == torch
    ]  # fmt: skip
    cheap = [record for record in current if record["algorithm"] != "pillar" and record["seconds"] < 2]
    return random.Random(date.today().toordinal()).sample(cheap, min(6, len(cheap)))


@pytest.mark.data
@pytest.mark.slow
def test_shipped_records_are_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not rounds_as_records_were_made():
        pytest.skip("sums are rounded otherwise on this processor, and with the features that depend on them the noise")
    chosen = shipped()
    assert chosen, "no record of this version of torch"
    records.write_lines(Path("results/records/some.jsonl.gz"), chosen)
    Path("data").mkdir()
    for path in Path(os.environ["PUBSEL_DATA"]).glob("flowers5*"):
        Path("data", path.name).symlink_to(path)  # what is made of the data is kept beside them
    for record in chosen:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            base = compose("run", ["data_root=data", "download=false", "device=cpu"])
        same, text = replay.repeat(record["identity"], base)
        assert same, text
