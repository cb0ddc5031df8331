"""The engine's greedy tokens, in one batch with chunks of prompts, equal transformers' tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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


def expected(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [greedy(model, prompt, new, len(prompt)) for prompt in prompts]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], new: int, first: int, **more: Any) -> list[int]:
    """What transformers continues a prompt with; `first` tokens of its output are not new."""
    given = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(given), "do_sample": False, **more}
    tokens = model.generate(given, max_new_tokens=new, **how)[0, first:].tolist()
    return tokens[:-1] if tokens[-1] == SIZES["eos_token_id"] else tokens


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


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_a_batch_answers_what_an_encoder_reads_as_transformers_does(family, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    ends = {"eos_token_id": 5, "pad_token_id": 0, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, **ends, num_heads=4, initializer_factor=3.0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(6, 97) for _ in range(rng.randint(1, 40))] for _ in range(10)]
    engine = Engine.from_folder(tmp_path, block_size=4, blocks=60, max_batch_tokens=24)
    found = engine.generate(prompts, Sampling(temperature=0, max_tokens=24))
    assert [each.tokens for each in found] == [greedy(model, each, 24, 1) for each in prompts]
    assert len({tuple(each.tokens) for each in found}) > 5


def test_a_batch_continues_prompts_with_images_as_transformers_does(tmp_path) -> None:
    from PIL import Image
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(1)
    tower = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3}
    tower |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 5}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={"model_type": "llama", **SIZES},
            vision_config={"model_type": "clip_vision_model", **tower},
            image_token_index=96,
        )
    ).eval()
    with torch.no_grad():
        model.lm_head.weight[96] = 0  # it would stand for an image
    model.save_pretrained(tmp_path)
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 9}, crop_size={"height": 8, "width": 8}
    )
    processor.save_pretrained(tmp_path)
    rng, prompts, images = random.Random(2), [], []
    for count in (0, 1, 2, 1, 3, 0, 2):
        text = [rng.randrange(6, 96) for _ in range(rng.randint(1, 20))]
        for _ in range(count):
            text.insert(rng.randint(0, len(text)), 96)
        prompts.append(text)
        images.append(torch.randn(count, 3, 8, 8))
    engine = Engine.from_folder(tmp_path, block_size=4, blocks=60, max_batch_tokens=10)
    found = engine.generate(prompts, Sampling(temperature=0, max_tokens=12), images)
    for prompt, pixels, done in zip(prompts, images, found, strict=True):
        whole = [token for each in prompt for token in [each] * (4 if each == 96 else 1)]
        more = {"pixel_values": pixels} if len(pixels) else {}
        assert done.tokens == greedy(model, whole, 12, len(whole), **more)
    picture = Image.linear_gradient("L").resize((30, 20))
    picture.save(tmp_path / "image.png")
    (pixels,) = processor(images=[picture], return_tensors="pt")["pixel_values"]
    how = Sampling(temperature=0, max_tokens=12)
    expected = engine.generate(prompts[1], how, [pixels])
    for image in (picture, tmp_path / "image.png"):
        assert engine.generate(prompts[1], how, [image])[0].tokens == expected[0].tokens
