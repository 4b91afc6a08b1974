import json
import os
import random
import shlex
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from pubsel import records
from pubsel.commands import replay
from pubsel.messages import UsageError, UserError
from pubsel.rules import canonical
from pubsel.settings import CONF, command_line
from pubsel.settings.identity import as_json, identity_of
from tests.made import checked, write_lines
from tests.test_numbers import rounds_as_records_were_made

RECORDS = records.read_records(CONF.parent / "results")


def identity(words: list[str]) -> str:
    return identity_of(canonical(checked("run", *words)))


def kind(record: dict) -> tuple:
    return record["model"], record["algorithm"], record["settings"]["pair"]["private"] == "flowers5"


EXPERIMENTS = [path.stem for path in (CONF / "experiment").glob("*.yaml") if "\nprivate:" not in path.read_text()]


CURRENT = [record for record in RECORDS if not records.outdated(record)]


@pytest.mark.parametrize("record", {kind(r): r for r in CURRENT}.values(), ids=lambda record: record["identity"])
def test_the_settings_of_each_kind_of_record_make_the_same_run(record):
    assert identity(command_line.overrides(record["settings"])) == record["identity"]


def test_no_seed_of_a_cell_is_counted_twice():
    """A seed that also draws the parts is no other one: a table would take both for independent."""
    cells = Counter()
    for record in RECORDS:
        settings = json.loads(json.dumps(record["settings"]))
        for part in (settings, settings["pair"]):
            part.pop("seed", None)
        cells[json.dumps([record["label"], record["epsilon"], record["seed"], settings], sort_keys=True)] += 1
    assert len(cells) > 10_000
    assert max(cells.values()) == 1


UNUSUAL = [
    ["pair.private='/data/my images, \\'mine\\' (1)/a=b'", "pair.public=[./a,'b c/d',\"7\"]"],
    ["pair.private='C:\\\\x\\\\'", "pair.public=./true.npz", "label='null'"],
    ["label='1e5'", "epsilon=1e-3", "privacy.delta=1e-7", "seed=9223372036854775807", "training.milestones=[]"],
    ["model=timm", "model.architecture=vit_tiny", "model.lora={layers:[qkv],r:4,alpha:8}", "++model.options={a:{b:1}}"],
    ["model=timm", "model.architecture=x.y_z", "model.adapters={layers:[attn,mlp],size:64}", "model.trained=[head]"],
    ["model=mobilenetv2_coral", "algorithm=pillar", "~model.backbone.options", "model.backbone.mean=null"],
    ["model=linear", "++model.backbone={architecture:resnet18,crop:0.5}", "algorithm=adamix", "training=adamix"],
    ["algorithm=adamix_clip", "training=dp_raft", "privacy=adamix", "algorithm.text_scale=3"],
    ["algorithm=non_private", "distance=none", "training.optimizer=adam", "training.steps=7"],
    ["algorithm=only_public", "training.average=true", "pair.shots=3", "pair.take=train", "pair.validation=0.5"],
    ["algorithm=dp_sgd", "pair.private_share=0.5", "pair.m=77", "distance=gsd_300"],
]


@pytest.mark.parametrize("words", [*([f"+experiment={name}"] for name in sorted(EXPERIMENTS)[::4]), *UNUSUAL])
def test_settings_as_a_record_has_them_make_the_same_run(words):
    made = canonical(checked("run", *words))
    assert identity(command_line.overrides(json.loads(json.dumps(as_json(made))))) == identity_of(made)


@pytest.mark.parametrize(
    "more",
    [
        ["private=digits", "public=[digits,[photo_patches,noise]]", "distance.m=200"],
        ["private='/my images'", "public=[a]", "model=mobilenetv2", "distance=otdd", "seed=3"],
        ["private=digits", "public=[digits,noise]", "epsilon_select=0.1", "select.cap=0.3", "secure_noise=true"],
    ],
)
def test_a_measured_distance_is_repeated_from_its_record(more, tmp_path):
    def settings(words):
        return json.loads(json.dumps(as_json(checked("rank", *words))))

    record = {"identity": "a-rank", "settings": settings(more), "device": "cpu"}
    records.write_record(tmp_path / "ranks" / "a-rank" / "result.json", record)
    program, command, *rest = shlex.split(command_line.command(record, {"seed": 4}))
    assert (program, command, rest) == ("pubsel", "rank", ["like=a-rank", "seed=4", "device=cpu"])
    assert settings(records.expanded("rank", [*rest, f"results={tmp_path}"])) == settings(more) | {"seed": 4}
    with pytest.raises(UserError, match="no such file"):
        records.expanded("rank", ["like=another", f"results={tmp_path}"])
    with pytest.raises(UsageError, match=r"^like=a-rank: it is no record of pubsel run: name another one"):
        records.expanded("run", [*rest, f"results={tmp_path}"])


def test_what_the_command_line_gives_replaces_what_a_record_has(tmp_path):
    """Of a run that has not finished too: it has no record yet."""
    made = canonical(checked("run", *UNUSUAL[7], "seed=3"))
    for name in ("runs/a/settings.json", "audits/b/result.json"):
        record = {"identity": "b", "settings": json.loads(json.dumps(as_json(made)))}
        records.write_record(tmp_path / name, record)

    for name, free in (("a", ["algorithm.rank=7", "training=adamix", "epsilon=3"]), ("b", []), ("a", ["distance=gsd"])):
        words = records.expanded("run", [f"like={name}", f"results='{tmp_path}'", *free])
        assert identity(words) == identity([*UNUSUAL[7], "seed=3", *free])
    for word, message in (("+experiment=quickstart", "give one of the two"), ("replay=a", "has its own like")):
        with pytest.raises(UsageError, match=message):
            records.expanded("run", ["like=a", word, f"results={tmp_path}"])
    with pytest.raises(UsageError, match=r"^epsilon=3: replay=a has its own epsilon; give no more than .*threads"):
        records.expanded("run", ["replay=a", "epsilon=3", f"results={tmp_path}"])


def shipped() -> list[dict]:
    """Return up to six records of this program's numbers and version of torch that take seconds, others each day."""
    # Products of numpy in the older records of PILLAR have an unknown number of threads; DP-PCA factors a matrix of all
    # 15,552 features, which takes minutes that are no part of `seconds`.
    kind = {"private": "flowers5", "model": "scattering"}
    torch = version("torch").partition("+")[0]  # another version rounds otherwise, so its noise is another
    current = [record for record in CURRENT if kind.items() <= record.items() and record["versions"]["torch"] == torch]
    cheap = [r for r in current if r["algorithm"] not in ("pillar", "dp_pca") and r["seconds"] < 2]
    return random.Random(date.today().toordinal()).sample(cheap, min(6, len(cheap)))


@pytest.mark.data
@pytest.mark.slow
def test_shipped_records_are_repeated(folder):
    if not rounds_as_records_were_made():
        pytest.skip("sums are rounded otherwise on this processor, and with the features that depend on them the noise")
    chosen = shipped()
    assert chosen, "no record of this version of torch"
    write_lines(Path("results/records/some.jsonl.gz"), chosen)
    Path("data").mkdir()
    for path in Path(os.environ["PUBSEL_DATA"]).glob("flowers5*"):
        Path("data", path.name).symlink_to(path)  # what is made of the data is kept beside them
    for record in chosen:
        words = records.expanded("run", [f"replay={record['identity']}", "download=false", "device=cpu"])
        asked = checked("run", *words, "data_root=data")
        same, text = replay.repeat(record["identity"], asked)
        assert same, text
