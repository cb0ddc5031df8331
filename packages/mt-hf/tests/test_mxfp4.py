"""Experts in MXFP4, as GPT-OSS has them published, against a definition and transformers."""

from __future__ import annotations

import json

import pytest
import torch
from mt_hf import ExchangeError, from_pretrained, save_pretrained
from mt_parallel_state import ParallelLayout, ParallelState
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def value(code: int) -> float:
    """A number of e2m1 by its bits: sign, two of the exponent with bias 1, one of the mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Number by number."""
    experts, out, groups, size = blocks.shape
    found = torch.zeros(experts, groups * size * 2, out)
    for e, o, g, b in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        byte, scale = int(blocks[e, o, g, b]), 2.0 ** (int(scales[e, o, g]) - 127)
        found[e, 32 * g + 2 * b, o] = value(byte & 15) * scale
        found[e, 32 * g + 2 * b + 1, o] = value(byte >> 4) * scale
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in MXFP4 and one with the same values."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("gpt-oss")
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(folder / "plain")
    low = folder / "low"
    low.mkdir()
    tensors = load_file(folder / "plain" / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = dequantized(blocks, scales).bfloat16()
    save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(stored, low / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "plain" / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (low / "config.json").write_text(json.dumps(described))
    return folder


@torch.no_grad()
def test_experts_in_4_bits_are_read_as_their_values_and_saved_so(folders, tmp_path) -> None:
    low, plain = from_pretrained(folders / "low"), from_pretrained(folders / "plain")
    expected = dict(plain.named_parameters())
    assert {name for name, _ in low.named_parameters()} == expected.keys()
    for name, param in low.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, expected[name]), name
    save_pretrained(low, tmp_path, like=folders / "low")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    written, wanted = (load_file(f / "model.safetensors") for f in (tmp_path, folders / "plain"))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in written.items())


def test_values_are_those_of_transformers(folders) -> None:
    from mt_hf.reading.pretrained import open_pretrained
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, found = (
        load_file(folders / "low" / "model.safetensors"),
        open_pretrained(folders / "low"),
    )
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(names) == 4
    for name in names:
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found.tensors[name].map(), theirs)


def test_ranks_of_experts_read_their_own(folders, ranks) -> None:
    folder = folders

    def body() -> None:
        import torch.distributed as dist

        state = ParallelState(ParallelLayout(dp=2, ep=2))
        own, whole = from_pretrained(folder / "low", state=state), from_pretrained(folder / "plain")
        expected = dict(whole.named_parameters())
        for name, param in own.named_parameters():
            if ".experts." in name:
                rows = expected[name].chunk(2)[dist.get_rank()]
                assert torch.equal(param, rows), name

    ranks(2, body)


@pytest.mark.parametrize(
    ("leaf", "change", "words"),
    [
        ("scales", None, r"down_proj_blocks, and .*down_proj_scales is missing"),
        ("blocks", None, r"down_proj_scales, and .*down_proj_blocks is missing"),
        ("scales", lambda t: t[:, 1:], r"MXFP4 has bytes \[experts, out, blocks, 16\]"),
        ("blocks", lambda t: t.view(torch.int8), r"down_proj_blocks is torch.int8"),
        ("scales", lambda t: t.view(torch.int8), r"down_proj_scales torch.int8"),
    ],
)
def test_a_damaged_folder_is_one_error(leaf, change, words, folders, tmp_path) -> None:
    tensors = load_file(folders / "low" / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{leaf}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders / "low" / "config.json").read_text())
    with pytest.raises(ExchangeError, match=words):
        from_pretrained(tmp_path)
