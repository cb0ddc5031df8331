"""The engine's greedy tokens, in one batch with chunks of prompts, are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from mt_infer import Engine, Sampling

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "eos_token_id": 5,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@torch.inference_mode()
def expected(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(given), "do_sample": False}
        tokens = model.generate(given, max_new_tokens=new, **how)[0, len(prompt) :].tolist()
        found.append(tokens[:-1] if tokens[-1] == SIZES["eos_token_id"] else tokens)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_batch_continues_prompts_as_transformers_does(family, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(6, 97) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    engine = Engine.from_folder(tmp_path, block_size=4, blocks=60, max_batch_tokens=24)
    found = engine.generate(prompts, Sampling(temperature=0, max_tokens=24))
    assert [each.tokens for each in found] == expected(tmp_path, prompts, 24)
    assert {each.text for each in found} == {None}
    assert {each.end for each in found} == {"stop", "length"}
