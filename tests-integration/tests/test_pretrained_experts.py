"""A mixture of Hugging Face trains where ranks share experts, and is written for transformers.

Its balancing loss is of a micro-batch: all layouts have the same one.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
import yaml
from mt_hf import export_checkpoint, from_pretrained
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

LAYOUTS = {
    "ep2": (2, "parallel.ep=2"),
    "ep2etp2": (
        4,
        "parallel.tp=2",
        "parallel.ep=2",
        "parallel.etp=2",
    ),
}
EXPORT = "export.dtype=fp64"


@pytest.fixture(scope="module")
def started(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=392,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
    )
    MixtralForCausalLM(config).save_pretrained(folder / "mixtral")
    given = yaml.safe_load(tiny.config.read_text())
    shutil.copy(given["data"].pop("tokenizer"), folder / "mixtral/tokenizer.json")
    given["model"] = {"from": str(folder / "mixtral")}
    given["training"] |= {"dtype": "fp64", "steps": 3, "micro_batch_size": 4}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    return dataclasses.replace(tiny, config=path)


@pytest.fixture(scope="module")
def one_rank(started, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    run = started.train(out / "run", f"export.hugging_face={out / 'out'}", EXPORT)
    return run, from_pretrained(out / "out")


@pytest.mark.parametrize("layout", [pytest.param("ep2", marks=pytest.mark.campaign), "ep2etp2"])
def test_every_layout_trains_and_exports_the_same(started, one_rank, tmp_path, losses, layout):
    nproc, *overrides = LAYOUTS[layout]
    out = tmp_path / "out"
    export = (f"export.hugging_face={out}", EXPORT)
    run = started.train(tmp_path / "run", *overrides, *export, nproc=nproc)
    expected = losses(one_rank[0])
    assert losses(run) == pytest.approx(expected, rel=1e-10)
    assert len(expected) == 3
    exported = dict(from_pretrained(out).named_parameters())
    for name, param in one_rank[1].named_parameters():
        # AdamW turns rounding of a tiny gradient into a step of the learning rate's size.
        assert torch.allclose(exported[name], param, rtol=1e-6, atol=1e-8), name
    theirs, info = MixtralForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.num_local_experts == 4
    export_checkpoint(run, tmp_path / "later")
    wide = dict(from_pretrained(tmp_path / "later", dtype=torch.float64).named_parameters())
    for name, param in exported.items():
        assert torch.allclose(wide[name], param, rtol=1e-6, atol=0), name  # the folder has fp32
