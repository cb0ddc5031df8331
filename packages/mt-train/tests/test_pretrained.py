"""Runs that start from a folder of Hugging Face, and write one at their end."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from mt_hf import from_pretrained, import_pretrained, save_pretrained
from mt_model import (
    GPT,
    ClassPoolingConfig,
    ImageInputConfig,
    LayerConfig,
    MLAConfig,
    MoEConfig,
    RopeConfig,
    VisionEncoder,
    gpt,
    saved_buffers,
    vit,
)
from mt_train import ConfigError, load_config

CLIP = ClassPoolingConfig(norm=True)
STILL = ("optimizer.name=sgd", "optimizer.lr=1e-30", "training.steps=1")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pretrained") / "model"
    config = gpt(
        vocab_size=301,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        ffn_size=16,
        max_sequence_length=32,
    )
    save_pretrained(GPT(config, seed=9), out)
    shutil.copy(tiny.data / "tokenizer.json", out)
    return out


@pytest.fixture(scope="module")
def started(tiny, folder, tmp_path_factory):
    """The tiny run with the folder's model, and without a tokenizer of its own."""
    given = yaml.safe_load(tiny.config.read_text())
    given["model"] = {"from": str(folder)}
    del given["data"]["tokenizer"]
    config = tmp_path_factory.mktemp("config") / "run.yaml"
    config.write_text(yaml.safe_dump(given))
    return dataclasses.replace(tiny, config=config)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(from_pretrained(folder, vocab_multiple=1).named_parameters())


def test_a_run_starts_with_the_weights_and_gives_them_back(started, folder, tmp_path) -> None:
    out = tmp_path / "out"
    started.run(tmp_path / "run", *STILL, f"export.hugging_face={out}")
    found, expected = tensors_of(out), tensors_of(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["model"]["from"] == str(folder)


def test_it_trains_and_goes_on(started, folder, tmp_path) -> None:
    started.run(tmp_path / "run")
    out = tmp_path / "out"
    started.run(tmp_path / "run", "training.steps=5", f"export.hugging_face={out}")
    assert started.run(tmp_path / "run", f"export.hugging_face={out}").step == 5
    name = "layers.1.mixer.qkv.weight"
    assert not torch.equal(tensors_of(out)[name], tensors_of(folder)[name])
    assert tensors_of(out)[name].dtype == torch.float32


def test_it_goes_on_with_the_biases_that_balance_experts(tiny, tmp_path) -> None:
    """The model is DeepSeek-V3's; where weights stand still, biases move by their rate."""
    mixer = MLAConfig(
        num_heads=2,
        kv_lora_rank=8,
        nope_head_dim=4,
        rope_head_dim=4,
        v_head_dim=4,
        rope=RopeConfig(interleaved=True),
        norm_eps=1e-6,
    )
    moe = MoEConfig(
        num_experts=4, ffn_size=8, top_k=2, score="sigmoid", bias_rate=0.001, shared_size=8
    )
    layers = [LayerConfig(mixer=mixer, feed_forward=moe)] * 2
    config = gpt(vocab_size=301, hidden_size=16, max_sequence_length=32, layers=layers)
    model, name = GPT(config, seed=9), "layers.1.feed_forward.router.expert_bias.value"
    saved_buffers([model])[name].copy_(torch.tensor([-0.5, 0.25, 0.0, 0.5]))
    folder, out = tmp_path / "model", tmp_path / "out"
    save_pretrained(model, folder, family="deepseek_v3")
    shutil.copy(tiny.data / "tokenizer.json", folder)
    given = yaml.safe_load(tiny.config.read_text())
    given["model"] = {"from": str(folder)}
    del given["data"]["tokenizer"]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    started = dataclasses.replace(tiny, config=path)
    started.run(tmp_path / "run", *STILL, f"export.hugging_face={out}")
    found = saved_buffers([from_pretrained(out)])[name]
    moved = (found - torch.tensor([-0.5, 0.25, 0.0, 0.5])).abs()
    assert moved.max() > 0
    assert all(each == 0 or abs(each - 0.001) < 1e-7 for each in moved.tolist())
    for key, tensor in tensors_of(folder).items():
        assert torch.equal(tensors_of(out)[key], tensor), key


def test_imported_weights_are_loaded_into_a_run(started, folder, tmp_path) -> None:
    import_pretrained(folder, tmp_path / "imported")
    load = (f"checkpoint.load={tmp_path / 'imported'}", "checkpoint.load_mode=weights")
    out = tmp_path / "out"
    started.run(tmp_path / "run", *STILL, *load, f"export.hugging_face={out}")
    for name, tensor in tensors_of(folder).items():
        assert torch.equal(tensors_of(out)[name], tensor), name


@pytest.mark.parametrize(("asked", "dropout"), [((), 0.2), (("model.dropout=0",), 0.0)])
def test_it_drops_what_config_json_says_or_the_run(
    started, folder, tmp_path, asked, dropout
) -> None:
    sizes = {"vocab_size": 301, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    config = gpt(
        **sizes,
        max_sequence_length=32,
        positions="learned",
        norm="layer",
        bias=True,
        gated=False,
        activation="gelu_tanh",
        dropout=0.2,
        attention_dropout=0.1,
    )
    save_pretrained(GPT(config, seed=9), tmp_path / "gpt2")
    shutil.copy(folder / "tokenizer.json", tmp_path / "gpt2")
    loaded = load_config(started.config, [f"model.from={tmp_path / 'gpt2'}", *asked])
    assert loaded.model(301).dropout == dropout


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.from=nowhere", "model.from: "),
        ("model.hidden_size=8", "model.hidden_size: does not go with model.from"),
        ("training.sequence_length=64", "training.sequence_length: 64 is longer than"),
        ("export.family=mistral", "export.family: needs export.hugging_face"),
    ],
)
def test_what_does_not_go_with_it_is_named(started, override, says) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(started.config, [override])
    assert says in str(caught.value)


def test_an_id_of_the_hub_is_found_in_its_cache(started, folder, tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    own, commit = tmp_path / "cache/models--acme--tiny", "c0ffee" * 6 + "0000"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"model\.from: .*hf download acme/tiny"):
        load_config(started.config, ["model.from=acme/tiny"])
    with pytest.raises(ConfigError, match=r"distillation\.teacher: .*hf download acme/tiny"):
        load_config(started.config, ["distillation.teacher=acme/tiny"])
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match="can't be downloaded"):
            load_config(started.config, ["model.from=acme/tiny"], download=True)
    shutil.copytree(folder, own / "snapshots" / commit)
    (own / "refs").mkdir()
    (own / "refs/main").write_text(commit)
    loaded = load_config(started.config, ["model.from=acme/tiny"])
    assert loaded.config.model.from_ == str(own / "snapshots" / commit)


def test_a_mixture_whose_router_can_not_train_is_refused(started, folder, tmp_path) -> None:
    moe = {"num_experts": 4, "top_k": 1, "ffn_size": 8}
    sizes = {"vocab_size": 301, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "moe": moe}
    save_pretrained(GPT(gpt(**sizes, max_sequence_length=32)), tmp_path / "mixture")
    shutil.copy(folder / "tokenizer.json", tmp_path / "mixture")
    with pytest.raises(ConfigError, match=r"model\.from: top_k=1 .*no gradient"):
        load_config(started.config, [f"model.from={tmp_path / 'mixture'}"])


def test_an_encoder_of_images_is_no_model_to_train(started, tmp_path) -> None:
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    save_pretrained(VisionEncoder(vit(**sizes, num_classes=2)), tmp_path / "vit")
    with pytest.raises(ConfigError, match=r"model\.from: .*family 'vit', which has no tokens"):
        load_config(started.config, [f"model.from={tmp_path / 'vit'}"])


def test_a_model_that_takes_images_is_refused_as_the_data_has_none(
    tiny, started, folder, tmp_path
) -> None:
    tokenizer = folder / "tokenizer.json"
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    tower = vit(**sizes, embedding_norm=True, final_norm=False, patch_bias=False, pooling=CLIP)
    images = ImageInputConfig(tower=tower, token_id=300)
    config = gpt(vocab_size=301, hidden_size=16, num_layers=1, num_heads=2, images=images)
    save_pretrained(GPT(config), tmp_path / "llava")
    shutil.copy(tokenizer, tmp_path / "llava")
    match = r"model\.from: the model takes images, and the data has none"
    with pytest.raises(ConfigError, match=match):
        started.run(tmp_path / "run", f"model.from={tmp_path / 'llava'}")
    alone = tmp_path / "run.yaml"
    given = yaml.safe_load(tiny.config.read_text())
    alone.write_text(yaml.safe_dump({**given, "model": {"preset": "llava-1.5-7b"}}))
    with pytest.raises(ConfigError, match=match.replace("from", "preset")):
        load_config(alone).model(300)


def test_an_export_that_can_not_be_is_refused_before_training(started, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/note").touch()
    with pytest.raises(ConfigError, match=r"export\.hugging_face: .*exists"):
        started.run(tmp_path / "run", f"export.hugging_face={tmp_path / 'out'}")
    more = (f"export.hugging_face={tmp_path / 'new'}", "export.family=mistrall")
    with pytest.raises(ConfigError, match=r"export\.family: .*Did you mean mistral"):
        started.run(tmp_path / "run", *more)
    assert not (tmp_path / "run/checkpoints").exists()
