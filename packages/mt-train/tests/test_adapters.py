"""Runs that train low-rank adapters, or a part of their parameters."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from mt_ckpt import SavedModel, inspect_checkpoint
from mt_files import UserError
from mt_hf import from_pretrained, open_pretrained, save_pretrained
from mt_model import GPT, MoEConfig, gpt
from mt_train import ConfigError, load_config
from mt_train.training.base_codes import check_base_format

LORA = "lora={rank: 2, alpha: 4}"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """A Mixtral with four experts in each of two layers."""
    out = tmp_path_factory.mktemp("pretrained") / "model"
    moe = MoEConfig(num_experts=4, ffn_size=16, top_k=2)
    sizes = {"vocab_size": 301, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    config = gpt(**sizes, moe=moe, max_sequence_length=32, tied=False)
    save_pretrained(GPT(config, seed=9, dtype=torch.float64), out, family="mixtral")
    shutil.copy(tiny.data / "tokenizer.json", out)
    return out


@pytest.fixture(scope="module")
def started(tiny, folder, tmp_path_factory):
    """The tiny run with the folder's model."""
    given = yaml.safe_load(tiny.config.read_text())
    given["model"] = {"from": str(folder)}
    config = tmp_path_factory.mktemp("config") / "run.yaml"
    config.write_text(yaml.safe_dump(given))
    return dataclasses.replace(tiny, config=config)


@pytest.mark.parametrize("base", [(), ("lora.base_format=int4-g8",)], ids=["plain", "codes"])
def test_a_killed_run_of_adapters_goes_on_to_the_same_bits(
    started, losses, weights, tmp_path, base
) -> None:
    class KilledError(Exception):
        pass

    def kill(name: str) -> None:
        if name == "train.update" and next(steps) == 2:
            raise KilledError

    settings = (LORA, *base, "checkpoint.every=1", "optimizer.ema=0.9", "lora.dropout=0.2")
    started.run(tmp_path / "whole", *settings)
    steps = iter(range(9))
    with pytest.raises(KilledError):
        started.run(tmp_path / "killed", *settings, on_event=kill)
    started.run(tmp_path / "killed", *settings)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    expected, found = (weights(tmp_path / name, 4) for name in ("whole", "killed"))
    assert found.keys() == expected.keys()
    assert all((found[name] == array).all() for name, array in expected.items())
    assert all(".lora." in name for name in expected)
    kinds = {name.split("/")[0] for name in expected}
    assert kinds == {"model", "optimizer", "ema"}


def test_frozen_parameters_stay_and_the_others_learn(started, folder, weights, tmp_path) -> None:
    settings = ("training.freeze=[embedding.*, '*.experts.*', '*.mixer_norm.*']",)
    started.run(tmp_path / "run", *settings, "optimizer.ema=0.9", "training.steps=2")
    started.run(tmp_path / "run", *settings, "optimizer.ema=0.9")
    arrays = weights(tmp_path / "run", 4)
    frozen = ("embedding.weight", "experts.up.weight", "experts.down.weight", "mixer_norm.weight")
    for name, tensor in from_pretrained(folder, vocab_multiple=8).named_parameters():
        same = (arrays[f"model/{name}"] == tensor.detach().numpy()).all()
        assert same == name.endswith(frozen), name
        assert (f"ema/{name}" in arrays) == (not name.endswith(frozen))
        assert (f"optimizer/exp_avg/{name}" in arrays) == (not name.endswith(frozen))


@pytest.mark.parametrize(("settings", "word"), [
    ((LORA, "lora.layers=['*.mixer.qkw']"), r"lora.layers\[0\].*Did you mean \*.mixer.qkv"),
    (("training.freeze=[embeding.weight]",), r"training.freeze\[0\].*embedding.weight"),
    (("training.freeze=['*']",), "leaves nothing to train"),
    ((LORA, "lora.layers=['*.experts.*']", "lora.dropout=0.1"), "takes no dropout"),
    ((LORA, "lora.rank=0"), "lora.rank"),
    ((LORA, "lora.base_format=int9"), "lora.base_format.*unknown weight format 'int9'"),
    ((LORA, "lora.base_format=int4"), "lora.base_format.*mixer.qkv has 16 in a row"),
    ((LORA, "lora.base_format=int8", "precision.recipe=mxfp8"), "precision.recipe.*codes already"),
    ((LORA, "lora.base_format=int8", "training.compile=true"), "training.compile.*anew for each"),
    ((LORA, "lora.ranks=1"), r"Did you mean lora.rank\?"),
    ((LORA, "quantization.recipe=int8"), "quantization.*lora freezes"),
    ((LORA, "model={hidden_size: 8, num_layers: 1, num_heads: 1}"), "name their folder with model"),
])  # fmt: skip
def test_what_does_not_fit_is_named(started, tmp_path, settings, word) -> None:
    with pytest.raises(ConfigError, match=word):
        started.run(tmp_path / "run", *settings)


def test_adapters_go_on_with_their_base_alone(started, folder, tmp_path) -> None:
    copy = shutil.copytree(folder, tmp_path / "base")
    name = f"model={{from: {copy}}}"
    started.run(tmp_path / "run", LORA, name, "training.steps=1")
    config = copy / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match="is another base than that of the adapters"):
        started.run(tmp_path / "run", LORA, name)
    with pytest.raises(UserError, match=r"lora.rank: 2 -> 3"):
        started.run(tmp_path / "run", "lora={rank: 3, alpha: 4}")


def test_adapters_go_on_beside_the_same_format_alone(started, tmp_path) -> None:
    started.run(tmp_path / "run", LORA, "lora.base_format=int8", "training.steps=1")
    step = tmp_path / "run/checkpoints/step_00000001"
    told = inspect_checkpoint(step).metadata_as(SavedModel).adapters
    assert told.base_format == "int8"
    for other, words in (("int4-g8", "int8 -> int4-g8"), ("null", "int8 -> null")):
        with pytest.raises(UserError, match=f"lora.base_format: {words}"):
            started.run(tmp_path / "run", LORA, f"lora.base_format={other}")


def test_groups_are_whole_on_each_rank(started, folder) -> None:
    options = [LORA, "lora.base_format=int4-g16", "parallel.tp=2"]
    model = open_pretrained(folder).config
    check_base_format(load_config(started.config, options[:2]), model)
    with pytest.raises(ConfigError, match=r"mixer.out has 8 in a row on each rank"):
        check_base_format(load_config(started.config, options), model)
    with pytest.raises(ConfigError, match=r"experts.down has 8 in a row"):
        check_base_format(load_config(started.config, [*options[:2], "parallel.etp=2"]), model)


def test_adapters_adapt_a_run(started, tiny, losses, weights, tmp_path) -> None:
    tiny.run(tmp_path / "base")
    how = (f"checkpoint.load={tmp_path / 'base'}", "checkpoint.load_mode=weights", "lora={rank: 2}")
    tiny.run(tmp_path / "run", *how, "training.steps=1")
    tiny.run(tmp_path / "run", *how)
    assert all(".lora." in name for name in weights(tmp_path / "run", 4))
    tiny.run(tmp_path / "codes", *how, "lora.base_format=int8", "training.steps=1")
    first, rounded = losses(tmp_path / "run")[1], losses(tmp_path / "codes")[1]
    assert first != rounded == pytest.approx(first, rel=1e-3)
    again = (f"checkpoint.load={tmp_path / 'run'}", *how[1:])
    with pytest.raises(UserError, match="holds adapters alone"):
        tiny.run(tmp_path / "third", *again)


def test_the_settings_come_back_from_yaml(started, tmp_path) -> None:
    loaded = load_config(started.config, [LORA, "lora.layers=['*.mixer.qkv.value']"])
    assert loaded.config.lora is not None
    assert loaded.config.lora.layers == ("*.mixer.qkv.value",)
