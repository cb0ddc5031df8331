"""A folder of Hugging Face trains on every layout as on one rank, without a conversion."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
import yaml
from mt_hf import from_pretrained, save_pretrained
from mt_model import GPT, gpt
from transformers.models.llama.modeling_llama import LlamaForCausalLM

# The vocabulary is odd: ranks share it because its rows are padded.
CONFIG = gpt(
    vocab_size=391,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=64,
    max_sequence_length=64,
)
LAYOUTS = {
    "tp2": (2, "parallel.tp=2"),
    "tp2pp2": (4, "parallel.tp=2", "parallel.pp=2", "training.micro_batch_size=4"),
    "cp2": (2, "parallel.cp=2"),
    "full": (2, "data_parallel.strategy=full", "training.micro_batch_size=4"),
}


@pytest.fixture(scope="module")
def started(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(GPT(CONFIG, seed=5), folder / "llama")
    given = yaml.safe_load(tiny.config.read_text())
    shutil.copy(given["data"].pop("tokenizer"), folder / "llama/tokenizer.json")
    given["model"] = {"from": str(folder / "llama")}
    given["training"] |= {"dtype": "fp64", "steps": 3}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(given))
    return dataclasses.replace(tiny, config=config)


@pytest.fixture(scope="module")
def one_rank(started, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    run = started.train(out / "run", f"export.hugging_face={out / 'out'}", "export.dtype=fp64")
    return run, from_pretrained(out / "out")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name in ("tp2pp2", "full") else pytest.mark.campaign)
        for name in LAYOUTS
    ],
)
def test_every_layout_trains_and_exports_the_same(started, one_rank, tmp_path, losses, layout):
    nproc, *overrides = LAYOUTS[layout]
    out = tmp_path / "out"
    export = (f"export.hugging_face={out}", "export.dtype=fp64")
    run = started.train(tmp_path / "run", *overrides, *export, nproc=nproc)
    expected = losses(one_rank[0])
    assert losses(run) == pytest.approx(expected, rel=1e-10)
    assert len(expected) == 3
    exported = dict(from_pretrained(out).named_parameters())
    for name, param in one_rank[1].named_parameters():
        # AdamW turns rounding of a tiny gradient into a step of the learning rate's size.
        assert torch.allclose(exported[name], param, rtol=1e-6, atol=1e-8), name
    theirs, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.vocab_size == 391
