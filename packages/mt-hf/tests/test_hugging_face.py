"""Folders of Hugging Face: links, damaged files, foreign fields, and leftovers."""

import json
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_row import ROWS
from mt_files import FileError
from mt_hf import (
    ExchangeError,
    Link,
    from_pretrained,
    open_pretrained,
    read_description,
    save_pretrained,
)
from mt_hf.family.family import comparable
from mt_hf.family.link import check_links
from mt_hf.reading.registry import known_families
from mt_model import GPT, PRESETS, MTPConfig, gpt, preset
from safetensors.torch import load_file, save_file

LLAMA = next(row for row in ROWS if row.name == "llama")
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "model"
    LLAMA.build(0).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder):
    with pytest.raises(ExchangeError) as caught:
        from_pretrained(folder)
    return str(caught.value)


def test_a_link_is_a_view_both_ways():
    link = Link(source="s", shape=(6, 8), part={1: (2, 6)}, target="t", order=(1, 0))
    source = torch.arange(48).view(6, 8)
    window = link.window(source, (4, 6))
    assert torch.equal(window, source[:, 2:6].T)
    window.zero_()
    assert source[:, 2:6].sum() == 0


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ([{"box": {0: (0, 2)}, "part": {0: (0, 2)}}], "6 of 12 elements are linked"),
        ([{}, {"box": {0: (0, 2)}, "part": {0: (0, 2)}}], "overlap"),
        ([{"box": {0: (2, 6)}}], "does not lie within"),
        ([{"box": {0: (0, 2)}}], "can't be"),
        ([{"target": "other"}], "no parameter 'other'"),
        ([{}, {"shape": (3, 4)}], "two links"),
    ],
)
def test_links_that_do_not_cover_are_refused(links, says):
    common = {"source": "s", "shape": (4, 3), "target": "t"}
    made = [Link(**{**common, **link}) for link in links]
    with pytest.raises(ValueError, match=says):
        check_links(made, {"t": (4, 3)}, family="test")


def test_other_files_are_carried_over(folder, tmp_path):
    save_pretrained(from_pretrained(folder), tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_changed_model_keeps_what_its_fields_do_not_say(folder, tmp_path):
    model = GPT(replace(open_pretrained(folder).config, max_sequence_length=77), seed=3)
    change_config(folder, eos_token_id=9)
    save_pretrained(model, tmp_path / "out", like=folder, dtype=torch.bfloat16)
    given = json.loads((tmp_path / "out/config.json").read_text())
    assert given["max_position_embeddings"] == 77
    assert given["eos_token_id"] == 9
    assert given.get("dtype", given.get("torch_dtype")) == "bfloat16"
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_missing_left_over_and_misshapen_tensors_are_named(folder):
    def change(tensors):
        del tensors[NORM]
        tensors["model.layers.0.self_attn.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(7)

    change_tensors(folder, change)
    text = refusal(folder)
    assert str(folder) in text
    assert f"tensor {NORM} is missing" in text
    assert "model.safetensors: tensor model.layers.0.self_attn.extra is not expected" in text
    assert "tensor model.norm.weight has the shape [7], and [24] is needed" in text


def test_modules_that_predict_further_tokens_are_not_read(tmp_path):
    """As in transformers; a model gets its own with `mtp`, and a folder of it has none."""
    row = next(row for row in ROWS if row.name == "qwen3_next")
    row.build(0).save_pretrained(tmp_path / "in")
    plain = from_pretrained(tmp_path / "in", dtype=torch.float64)
    change_tensors(
        tmp_path / "in", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)})
    )
    model = from_pretrained(tmp_path / "in", dtype=torch.float64)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens), plain(tokens))
    trained = GPT(replace(model.config, mtp=MTPConfig()), dtype=torch.float64)
    save_pretrained(trained, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors").keys()
    assert not any("mtp" in name for name in stored)
    read = from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert torch.equal(read(tokens), trained(tokens))
    change_tensors(tmp_path / "in", lambda tensors: tensors.update({"lm.mtp.fc": torch.ones(2)}))
    assert "tensor lm.mtp.fc is not expected" in refusal(tmp_path / "in")


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder = tmp_path / "tied"
    LLAMA.build(2).save_pretrained(folder)
    head = torch.empty(0)

    def add(tensors):
        nonlocal head
        head = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = head

    change_tensors(folder, add)
    assert from_pretrained(folder).config.tied
    change_tensors(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "differs from model.embed_tokens.weight" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "Did you mean LlamaForCausalLM"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not known"),
        ({"architectures": None, "model_type": ["llama"]}, "the model_type ['llama'] is not known"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not known"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral'"),
        ({"is_causal": False}, "is_causal: False: transformers reads this field"),
        ({"hidden_size": "24"}, "hidden_size: expected"),
        ({"num_key_value_heads": 4}, "num_kv_heads=4"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True"),
    ],
)
def test_fields_that_are_not_built_are_named(folder, fields, says):
    change_config(folder, **fields)
    text = refusal(folder)
    assert says in text
    assert "config.json" in text


def test_a_gemmas_rotary_embeddings_stand_under_the_types_of_its_layers():
    family = known_families()["gemma3_text"]
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
    with pytest.raises(ExchangeError, match=r"'factor' is no type of layer; full_attention"):
        family.config_of(flat, Path("config.json"))


@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 4}])
def test_dynamic_angles_scale_beyond_the_length_of_the_folder(tmp_path, inside):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 1.7, **inside}
    sizes = LLAMA.draw(0, random.Random(3))
    config = LlamaConfig(**{**sizes, "max_position_embeddings": 10, "rope_scaling": rope})
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    ours = from_pretrained(tmp_path / "model", max_sequence_length=16)
    bounded = from_pretrained(tmp_path / "model")
    for length in (8, 10, 11, 16):
        tokens = torch.arange(length)[None] * 5 % config.vocab_size
        with torch.no_grad():
            assert (ours(tokens) - model(tokens).logits).abs().max() < 1e-5
            if length <= 10:
                assert torch.equal(ours(tokens), bounded(tokens))
    with pytest.raises(ValueError, match="10"):
        bounded(tokens)


def test_trained_positions_are_as_many_as_in_the_folder(tmp_path):
    next(row for row in ROWS if row.name == "gpt2").build(0).save_pretrained(tmp_path / "model")
    with pytest.raises(ExchangeError, match="trained positions"):
        from_pretrained(tmp_path / "model", max_sequence_length=999)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"1234")


def endless_header(path):
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def no_json(path):
    content = bytearray(path.read_bytes())
    content[8] = ord("]")
    path.write_bytes(content)


def overlap(path):
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[NORM]["data_offsets"] = [0, 96]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


@pytest.mark.parametrize("damage", [cut, lengthen, endless_header, no_json, overlap])
def test_a_damaged_file_is_named(folder, damage):
    damage(folder / "model.safetensors")
    with pytest.raises((ExchangeError, FileError), match=r"model\.safetensors"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a\0.safetensors"])
def test_an_index_can_not_lead_out_of_its_folder(folder, name):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {NORM: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert NORM in refusal(folder)


def test_a_link_can_not_lead_out_of_its_folder_but_into_the_hubs_cache(folder, tmp_path):
    path = folder / "model.safetensors"
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    with pytest.raises(FileError, match="leads out of"):
        from_pretrained(folder)
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    (tmp_path / "blob").rename(cache / "blobs/1")
    path.unlink()
    snapshot = folder.rename(cache / "snapshots/0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    assert from_pretrained(snapshot).config.hidden_size == 24


def test_an_index_and_its_files_have_to_agree(folder, tmp_path):
    save_pretrained(from_pretrained(folder), tmp_path / "parts", file_size=9000)
    index = tmp_path / "parts/model.safetensors.index.json"
    whole = index.read_text()
    content = json.loads(whole)
    first, *_, last = sorted(set(content["weight_map"].values()))
    assert first.startswith("model-00001-of-")
    content["weight_map"]["model.embed_tokens.weight"] = last
    index.write_text(json.dumps(content))
    assert "model.embed_tokens.weight" in refusal(tmp_path / "parts")
    index.write_text(whole)
    (tmp_path / "parts" / last).unlink()
    with pytest.raises(FileError, match=last):
        from_pretrained(tmp_path / "parts")


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights are not read" in refusal(folder)


def test_nothing_is_left_where_a_model_can_not_be_written(folder, tmp_path):
    out = tmp_path / "out"
    other = GPT(gpt(vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, positions="learned"))
    with pytest.raises(ExchangeError) as caught:
        save_pretrained(other, out)
    assert "llama: " in str(caught.value)
    assert "positions" in str(caught.value)
    first, second = open_pretrained(folder).config.layers
    uneven = replace(second, mixer=replace(second.mixer, window=3))
    config = replace(open_pretrained(folder).config, layers=(first, uneven))
    with pytest.raises(ExchangeError, match=r"layers\[1\].mixer.window is 3"):
        save_pretrained(GPT(config), out, family="llama")
    with pytest.raises(ExchangeError, match="Did you mean"):
        save_pretrained(other, out, family="lama")
    model = from_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ExchangeError, match=r"tokenizer\.json"):
        save_pretrained(model, out)
    assert list(tmp_path.iterdir()) == [folder]
    out.mkdir()
    (out / "note").touch()
    with pytest.raises(ExchangeError, match="exists"):
        save_pretrained(model, out)


def failing_save(folder, out):
    from mt_parallel_state import ParallelLayout, ParallelState

    model = from_pretrained(folder, state=ParallelState(ParallelLayout(tp=2)))
    with pytest.raises(ExchangeError) as caught:
        save_pretrained(model, out)
    return str(caught.value)


def test_a_failure_is_raised_on_every_rank(ranks, folder, tmp_path):
    change_config(folder, vocab_size=open_pretrained(folder).config.vocab_size)
    (tmp_path / "out").touch()
    first, second = ranks(2, failing_save, folder, tmp_path / "out")
    assert first == second
    assert "exists" in first
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    first, second = ranks(2, failing_save, folder, tmp_path / "other")
    assert first == second
    assert "tokenizer.json" in first
    assert not (tmp_path / "other").exists()


DEEPSEEK_V3 = {
    **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {}},
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "ep_size": 1},
    **{"bos_token_id": 0, "eos_token_id": 1, "use_cache": True, "pretraining_tp": 1},
    **{"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "moe_layer_freq": 1, "first_k_dense_replace": 3},
    **{"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
    **{"aux_loss_alpha": 0.001, "seq_aux": True, "initializer_range": 0.02, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 163840, "rope_theta": 10000, "vocab_size": 129280},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def test_a_published_config_is_the_preset(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found = read_description(tmp_path).config
    assert comparable(found) == comparable(preset("deepseek-v3"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"first_k_dense_replace": 61}, "first_k_dense_replace: leaves no layer that has experts"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8 is not num_attention_heads=128"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not built"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 7}, "num_groups=7 does not divide the 256 experts"),
    ],
)
def test_a_deepseek_that_is_not_built_is_named(tmp_path, fields, says) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, **fields}))
    with pytest.raises(ExchangeError, match=says):
        read_description(tmp_path)


def test_published_shapes_are_written_as_their_families_do() -> None:
    families = known_families()
    by_start = {
        "flan-t5": "t5",
        "gemma3": "gemma3_text",
        "qwen3-30b-a3b": "qwen3_moe",
        "pythia": "gpt_neox",
        "gpt-neox": "gpt_neox",
        "gpt-oss": "gpt_oss",
        "qwen1.5-moe": "qwen2_moe",
        "llama4": "llama4_text",
        "deepseek-v2": "deepseek_v2",
        "deepseek-v3": "deepseek_v3",
    }
    not_read = ("tiny", "moe-tiny", "phi2", "granite")
    for name in PRESETS:
        if name.startswith(not_read):
            continue
        start = next(start for start in (*by_start, *families) if name.startswith(start))
        assert families[by_start.get(start, start)].fields_of(preset(name)), name
