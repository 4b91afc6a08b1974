"""Frozen encoders by name: of timm, of a folder or a file here; and `pubsel models`, which lists them."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf  # type: ignore[attr-defined]
from torchvision.transforms.v2 import functional as images

import pubsel
from pubsel.data.features import embed, load_backbone
from pubsel.messages import UsageError
from pubsel.models.encoders import encoder, encoder_words
from pubsel.models.weights import like_names
from pubsel.settings.keys import Backbone, RunConfig
from pubsel.settings.schema import check
from tests.made import checked, done, failed, only_record, picture

NETWORK = "test_vit"
FIT = ("epsilon=20", "delta=1e-3", "held_out=0", "download=false", "threads=1")
CPU = torch.device("cpu")


def saved(folder: str, seed: int = 0, network: str = NETWORK, data: dict | None = None, **options) -> torch.nn.Module:
    """A network of random weights, in a folder as timm writes it for the hub, with a head of seven classes."""
    torch.manual_seed(seed)
    net = timm.create_model(network, num_classes=7, **options)
    save_for_hf(net, folder, safe_serialization=True, data_config=data)
    return net.eval()


def mine(n: int = 120) -> None:
    """Images of two classes of two colours."""
    random = np.random.RandomState(0)
    for i in range(n):
        colour = ((200, 60, 60), (60, 60, 200))[i % 2]
        image = np.clip(np.array(colour) + random.randint(-40, 40, (16, 16, 3)), 0, 255)
        path = Path("mine", ("red", "blue")[i % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(path)


def of_run(features: str, checkpoint: str | None = None) -> RunConfig:
    """The settings of the run that fit starts."""
    return checked("run", *encoder_words(features, checkpoint, "."), "algorithm=whitened_head", "distance=none")


def test_a_folder_that_timm_has_saved_is_fitted_on_and_its_release_predicts(cli):
    mine()
    saved("encoder")
    out, _ = done(cli, "fit", "./mine", "features=./encoder", *FIT)
    record = only_record()
    assert "pubsel predict release" in out
    assert record["utility"] > 0.8
    assert record["model"].startswith("test_vit-")
    config = json.loads(Path("release/config.json").read_text())
    assert config["backbone"] == record["backbone"]
    assert config["model"]["backbone"]["checkpoint"] == "model.safetensors"  # no path

    # an export of its run is the same folder, which it may be uploaded from
    assert "release: model.safetensors" in done(cli, "export", "*-whitened_head-*", "to=release")[0]

    # a release needs no config.json of the encoder
    shutil.copy("encoder/model.safetensors", "weights.safetensors")
    shutil.rmtree("encoder")
    shutil.rmtree("results")
    picture(Path("new/a.png"))
    words = ("predict", "release", "./mine", "./new/a.png", "to=answers.csv")
    assert "takes the file of its weights as checkpoint=FILE" in failed(cli, *words, code=1)
    done(cli, *words, "checkpoint=weights.safetensors")
    answers = list(csv.DictReader(Path("answers.csv").read_text().splitlines()))
    right = [row["class"] == Path(row["file"]).parent.name for row in answers if "mine" in row["file"]]
    assert len(answers) == 121
    assert np.mean(right) > 0.8

    saved("other", seed=1)
    assert "are not those that the model was trained with" in failed(
        cli, *words, "checkpoint=other/model.safetensors", code=1
    )


def test_other_weights_are_another_run_also_under_the_same_path(folder):
    saved("encoder")
    first = of_run("./encoder")
    assert of_run("./encoder") == first
    saved("encoder", seed=1)
    second = of_run("./encoder")
    assert first.model.backbone == second.model.backbone
    assert pubsel.settings.identity.identity_of(first) != pubsel.settings.identity.identity_of(second)

    by_name = of_run(NETWORK, "encoder/model.safetensors")
    assert by_name.model.name == second.model.name  # the same weights
    assert by_name.model.backbone.architecture == NETWORK
    named = of_run("mobilenetv2", "encoder/model.safetensors")
    assert named.model.name.startswith("mobilenetv2-")
    assert named.model.backbone.input_size == 128  # the rest is that of conf/model


def test_images_are_prepared_as_the_folder_says(folder):
    """Against timm's own network and torchvision's functions."""
    data = {"mean": [0.2, 0.3, 0.4], "std": [0.5, 0.6, 0.7], "crop_pct": 0.8, "interpolation": "bilinear"}
    net = saved("encoder", data=data | {"input_size": [3, 128, 128]}, img_size=128)
    backbone = of_run("./encoder").model.backbone
    assert backbone.input_size == 128
    assert backbone.interpolation.name == "bilinear"  # timm's is bicubic
    extractor = load_backbone(backbone, ".", CPU)

    x = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (1, 3, 40, 40), dtype=np.uint8))
    image = images.resize(x.float() / 255, [160], images.InterpolationMode.BILINEAR, antialias=True)
    image = images.center_crop(image, [128]).clamp(0, 1)
    image = (image - torch.tensor(data["mean"])[:, None, None]) / torch.tensor(data["std"])[:, None, None]
    with torch.no_grad():
        expected = net.forward_head(net.forward_features(image), pre_logits=True)
    torch.testing.assert_close(embed(x, extractor), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["timm", "linear"])
def test_a_run_takes_any_name_of_timm(cli, base):
    mine()
    saved("encoder", network="test_resnet")
    backbone = {"architecture": "test_resnet", "checkpoint": "encoder/model.safetensors", "input_size": 64}
    words = [f"model.backbone.{key}={value}" for key, value in backbone.items()]
    words += ["pair.private=./mine", "pair.public=null", "algorithm=whitened_head", "distance=none"]
    done(cli, "run", f"model={base}", *words, "epsilon=20", "privacy.delta=1e-3", "threads=1")
    record = only_record()
    assert record["utility"] > 0.8
    assert record["parameters"] == 97 * 2  # 96 features, and a bias


def test_a_file_may_name_its_network(folder):
    net = saved("encoder")
    save_file(net.state_dict(), "named.safetensors", {"architecture": NETWORK})
    backbone = of_run("named.safetensors").model.backbone
    assert (backbone.architecture, backbone.checkpoint) == (NETWORK, "named.safetensors")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "features=./encoder/model.safetensors",
            2,
            "does not say of which network: name its network of timm: features",
        ),
        ("features=./absent", 2, "features=./absent: no such file or folder here; pubsel models PATTERN lists"),
        ("features=./mine", 1, "mine/config.json cannot be read"),
        ("features=encoder", 2, "features=encoder: a folder here: write ./encoder"),
        ("features=./bert", 2, "features=./bert: its config.json names no network of timm: name its"),
        ("features=./list", 2, "features=./list: its config.json names no network"),
        ("features=./half", 1, "half/config.json cannot be read ('input_size'): name its network"),
        ("features=./evil", 2, "none of what may be set is pretrained_cfg_overlay"),
        ("features=./encoder checkpoint=a", 2, "checkpoint=a: features=./encoder has its weights: remove it"),
        ("checkpoint=a", 2, "checkpoint=a: give features=NAME too"),
        ("features=test_vit checkpoint=a", 1, "checkpoint=a: no such file, neither here nor in"),
        ("features=pixels checkpoint=named.pth", 2, "checkpoint: architecture=pixels ignores it: remove it"),
        ("features=test_resnet checkpoint=encoder/model.safetensors", 1, "does not fit: "),
        ("features=resnet20", 2, "features=resnet20: it has no backbone: take one of clip_rn50,"),
        ("features=test_vitt", 2, "a network of timm (near it: test_vit"),
        (
            "features=test_vit.nope",
            2,
            "features=test_vit.nope: timm has no such weights of test_vit; it has: test_vit.r160",
        ),
        ("features=ViT-B-32", 2, "(near it: vit_base_patch32_clip_224."),
        (
            "features=test_vit4",
            1,
            "features=test_vit4: its weights cannot be fetched (timm publishes none): give checkp",
        ),
        (
            "features=test_vit",
            1,
            "features=test_vit: its weights cannot be fetched (its published weights are not on this machine: give "
            "download=true to fetch them): give checkpoint=FILE; features=scattering needs no weights",
        ),
    ],
)
def test_what_is_no_encoder_is_refused_in_words_and_nothing_is_spent(cli, words, code, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    mine()
    saved("encoder")
    Path("named.pth").write_bytes(b"")
    config = json.loads(Path("encoder/config.json").read_text())
    evil = config | {"model_args": {"pretrained_cfg_overlay": {"url": "x"}}}
    for name, values in (
        ("bert", {"architectures": ["BertModel"]}),
        ("list", [1]),
        ("half", {"architecture": NETWORK}),
        ("evil", evil),
    ):
        shutil.copytree("encoder", name)
        Path(name, "config.json").write_text(json.dumps(values))
    err = failed(cli, "fit", "./mine", *FIT, *words.split(), code=code)
    assert message in err
    assert not Path("results").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architecture": "qwen3_vit_88m_enc"}, "it gives no vector of an image, so it is no encoder"),
        ({"architecture": "vit_tiny_patch16_224", "input_size": 96}, "with options={} and input_size=96: Input height"),
        ({"architecture": "test_resnet", "options": {"global_pool": ""}}, "it gives no vector of an image"),
    ],
)
def test_a_network_that_gives_no_vector_is_refused_before_its_weights_are_read(values, message):
    with pytest.raises(UsageError, match=message.replace("{", r"\{")):
        load_backbone(check(Backbone, values | {"checkpoint": None, "pretrained": False}), ".", CPU)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ViT-L-14-336", "vit_large_patch14_clip_"),
        ("ViT-SO400M-14-SigLIP-384", "vit_so400m_patch14_siglip_"),
        ("vit_small_dinov2", "vit_small_patch14_dinov2"),
    ],
)
def test_names_of_open_clip_lead_to_those_of_timm(name, near):
    assert like_names(name).startswith(f"near it: {near}")


# pubsel models


def rows(cli, *words: str) -> dict[str, list[str]]:
    """Each row by its name."""
    out, _ = done(cli, "models", *words)
    return {line.split()[0]: line.split()[1:] for line in out.partition("\n\n")[0].splitlines()}


def test_names_are_listed_with_what_decides(cli, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    every = rows(cli)
    assert every["mobilenetv2"] == ["1,280", "128", "2,223,872", "apache-2.0", "download=true"]
    assert every["clip_rn50"][:2] == ["1,024", "224"]
    assert every["pixels"] == ["by", "image", "by", "image", "0", "needs", "none"]
    assert every["resnet50_byol"][3:] == ["?", "none"]
    assert "resnet20" not in every

    Path("resnet50_byol.pth").touch()
    dino = rows(cli, "vit_small_patch14_dinov2*")
    assert dino["vit_small_patch14_dinov2.lvd142m"] == ["384", "518", "22,056,192", "apache-2.0", "download=true"]
    assert rows(cli, "resnet50_b")["resnet50_byol"][-1] == "here"
    assert rows(cli, "test_vit4")["test_vit4"][-1] == "none"
    assert every["resnet152_simclr"][0] == "4,096"


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("dinov22", " (did you mean dinov2?)"),
        ("*scaterin*", " (did you mean scattering?)"),
        ("hf:BAAI/bge-smal-en", " (did you mean hf:BAAI/bge-small-en-v1.5?)"),
        ("text_encode", ""),
        ("qqqq", ""),
    ],
)
def test_a_pattern_that_nothing_fits_names_the_nearest(cli, pattern, near):
    assert f"pattern={pattern}: no name fits it{near}: give a part" in failed(cli, "models", pattern)


def test_encoders_of_texts_are_listed_with_numbers_that_their_networks_have(cli, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="no extra text")
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    small = {"hidden_size": 384, "intermediate_size": 1536}
    configs = {  # as their config.json has it
        "sentence-transformers/all-MiniLM-L6-v2": transformers.BertConfig(num_hidden_layers=6, **small),
        "sentence-transformers/all-mpnet-base-v2": transformers.MPNetConfig(max_position_embeddings=514),
        "BAAI/bge-small-en-v1.5": transformers.BertConfig(**small),
        "BAAI/bge-base-en-v1.5": transformers.BertConfig(),
        "intfloat/multilingual-e5-small": transformers.BertConfig(vocab_size=250037, **small),
    }
    listed = rows(cli, "hf:")
    assert listed.pop("name") == ["dimension", "parameters", "licence", "weights"]
    for name, config in configs.items():
        with torch.device("meta"):
            net = transformers.AutoModel.from_config(config)
        dimension, parameters, _, weights = listed.pop(f"hf:{name}")
        expected = f"{config.hidden_size:,}", f"{sum(p.numel() for p in net.parameters()):,}"
        assert (dimension, parameters, weights) == (*expected, "download=true")
    assert not listed

    out, _ = done(cli, "models", "minilm")
    assert "features=hf:NAME takes any encoder of transformers" in out
    assert "hf:BAAI" not in out
    assert "hf:BAAI/bge-base-en-v1.5" in done(cli, "models")[0]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: f"{name}/{file}")
    assert rows(cli, "hf:*MiniLM*")["hf:sentence-transformers/all-MiniLM-L6-v2"][-2:] == ["apache-2.0", "here"]


def test_a_long_list_is_cut_and_has_no_network_without_a_vector(cli, monkeypatch):
    monkeypatch.setattr("pubsel.commands.models.MOST", 2)
    out, _ = done(cli, "models", "test_vit*")
    assert len(out.splitlines()) == 5
    assert out.splitlines()[-1] == "3 more fit: give a longer pattern"
    assert "no name fits it" in failed(cli, "models", "qwen3_vit_88m_enc")


def test_weights_that_an_earlier_download_has_left_are_here(folder, monkeypatch):
    monkeypatch.setattr("pubsel.models.encoders.kept", lambda name: Path("x") if name == "resnet50.tv_in1k" else None)
    assert encoder("resnet50_sl", ".").weights == "here"
    assert encoder("resnet50_ssl", ".").weights == "download=true"
