"""LLaVA computes, loads, saves and generates what it does in transformers."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_row import bytes_of, oracle
from llava_row import IMAGE, ROW, batch_of
from mt_ckpt import RunFolder
from mt_context_parallel import shard as shard_sequence
from mt_context_parallel import unshard
from mt_hf import (
    ExchangeError,
    export_checkpoint,
    find_family,
    from_pretrained,
    import_pretrained,
    open_pretrained,
    save_pretrained,
)
from mt_hf.commands.cli import main
from mt_model import GPT, gpt, preset
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample
from safetensors.torch import load_file, save_file

DRAWS = range(ROW.draws)
NEW_TOKENS = 64


def theirs(model, batch, **rest):
    """What transformers computes of a batch of ours."""
    given = {"input_ids": batch["tokens"], **rest}
    if "pixel_values" in batch:
        given["pixel_values"] = batch["pixel_values"].to(model.dtype)
    return model(**given).logits


@pytest.mark.parametrize("index", DRAWS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_are_those_of_transformers(saved, index, dtype, bound):
    folder, model = saved(ROW, index)
    ours = from_pretrained(folder, dtype=dtype)
    assert isinstance(ours, GPT)
    batch = batch_of(ours.config)
    text = {"tokens": batch["tokens"] % IMAGE}
    is_wide = dtype == torch.float64
    wide = oracle(ROW, model) if is_wide else model
    for each in (batch, text):
        with ROW.in_fp64() if is_wide else nullcontext(), torch.no_grad():
            expected = theirs(wide, each)
        with torch.no_grad():
            got = ours(None, each)
        assert got.dtype == expected.dtype == dtype
        assert (got - expected).abs().max() < bound
    with torch.no_grad():
        assert torch.equal(ours(text["tokens"]), got)


@pytest.mark.parametrize("index", DRAWS)
def test_gradients_of_padded_texts_are_those_of_transformers(saved, index):
    """Also of the encoder and the projection, and none of layers whose output is not taken."""
    folder, model = saved(ROW, index)
    ours, wide = from_pretrained(folder, dtype=torch.float64), oracle(ROW, model)
    batch = batch_of(ours.config)
    labels, mask = batch["tokens"].roll(-1, 1), torch.ones_like(batch["tokens"])
    for row, length in ((1, labels.shape[1] - 2), (2, 4)):
        mask[row, length:], labels[row, length - 1 :] = 0, -100
    labels[labels == IMAGE] = -100
    with ROW.in_fp64():
        logits = theirs(wide, batch, attention_mask=mask)
        how = {"ignore_index": -100, "reduction": "sum"}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)
        loss.backward()
    losses = ours(None, {**batch, "labels": labels, "mask": mask.bool()})
    losses["lm"].backward()
    assert torch.allclose(losses["lm"], loss, rtol=1e-10, atol=0)
    found = open_pretrained(folder)
    grads = {name: param.grad for name, param in wide.named_parameters()}
    rounding = 1e-12 * max(grad.norm() for grad in grads.values() if grad is not None)
    names = dict(ours.named_parameters())
    assert names["images.tower.layers.0.mixer.qkv.weight"].grad.norm() > rounding
    for name, param in names.items():
        for link in found.links[name]:
            expected = grads[ROW.in_memory(link.source)]
            if expected is None:
                assert param.grad is None, name
                continue
            expected = link.window(expected, param.shape)
            got = param.grad[tuple(slice(*ends) for ends in link.area(param.shape))]
            assert (got - expected).norm() <= max(1e-9 * expected.norm(), rounding), link.source


@pytest.mark.parametrize("index", DRAWS)
def test_packed_texts_with_images_are_those_of_transformers_one_by_one(saved, index):
    folder, model = saved(ROW, index)
    ours, wide = from_pretrained(folder, dtype=torch.float64), oracle(ROW, model)
    batch = batch_of(ours.config)
    with ROW.in_fp64(), torch.no_grad():
        expected = theirs(wide, batch)
    rows, length = batch["tokens"].shape
    packed = {
        **batch,
        "tokens": batch["tokens"].view(1, -1),
        "documents": torch.arange(rows).repeat_interleave(length)[None],
        "positions": torch.arange(length).repeat(rows)[None],
    }
    with torch.no_grad():
        got = ours(None, packed)
    assert (got.view_as(expected) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("index", sample(((index,) for index in DRAWS), every=3))
def test_export_has_the_bytes_that_were_imported(saved, tmp_path, index):
    folder, model = saved(ROW, index)
    save_pretrained(from_pretrained(folder), tmp_path / "same")
    assert bytes_of(tmp_path / "same") == bytes_of(folder)
    assert (tmp_path / "same/config.json").read_bytes() == (folder / "config.json").read_bytes()
    bare = from_pretrained(folder)
    bare.origin = None
    save_pretrained(bare, tmp_path / "bare", file_size=9000)
    assert bytes_of(tmp_path / "bare") == bytes_of(folder)
    assert open_pretrained(tmp_path / "bare").config == bare.config
    again, info = type(model).from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    batch = batch_of(bare.config)
    with torch.no_grad():
        assert torch.equal(theirs(again.eval(), batch), theirs(model, batch))


def greedy(model, tokens, pixels, *, cached):
    cache = model.new_cache(batch_size=1, max_length=tokens.shape[1] + NEW_TOKENS)
    fed, images = tokens, pixels
    for _ in range(NEW_TOKENS):
        if cached:
            logits = model.logits(fed, cache=cache, pixel_values=images)
            images = None
        else:
            logits = model.logits(tokens, pixel_values=pixels)
        fed = logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, fed), 1)
    return tokens


@pytest.mark.parametrize("index", sample([(index,) for index in DRAWS], every=4))
def test_greedy_generation_is_that_of_transformers(saved, index):
    folder, model = saved(ROW, index)
    ours, wide = from_pretrained(folder, dtype=torch.float64), oracle(ROW, model)
    batch = batch_of(ours.config, rows=1)
    tokens, pixels = batch["tokens"], batch["pixel_values"].double()
    with ROW.in_fp64():
        expected = wide.generate(
            input_ids=tokens,
            pixel_values=pixels,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    assert torch.equal(greedy(ours, tokens, pixels, cached=True), expected)
    assert torch.equal(greedy(ours, tokens, pixels, cached=False), expected)


@pytest.mark.parametrize(
    "names",
    [
        {"vision_tower.": "vision_tower.vision_model."},
        {
            "vision_tower.": "model.vision_tower.vision_model.",
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ],
)
def test_names_of_other_versions_are_read(saved, tmp_path, names):
    folder, _ = saved(ROW, 0)
    other = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        first = next((each for each in names if name.startswith(each)), "")
        other[names.get(first, "") + name.removeprefix(first)] = tensor
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((folder / "config.json").read_text())
    given |= {"ignore_index": -100, "vocab_size": 40}
    given["vision_config"] |= {"vocab_size": 32000, "architectures": ["CLIPModel"]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    first, second = from_pretrained(folder), from_pretrained(tmp_path)
    batch = batch_of(first.config)
    with torch.no_grad():
        assert torch.equal(first(None, batch), second(None, batch))
    twice = {**other, "language_model.model.norm.weight": torch.ones(1)}
    twice["model.language_model.norm.weight"] = torch.ones(1)
    save_file(twice, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExchangeError, match=r"are both language_model\.model\.norm\.weight"):
        open_pretrained(tmp_path)


def test_the_published_model_is_of_the_family():
    config = preset("llava-1.5-7b")
    family, fields = find_family(config)
    assert family.name == "llava"
    assert family.config_of(fields, Path("config.json")) == config
    assert (fields["image_token_index"], fields["image_seq_length"]) == (32000, 576)
    assert fields["vision_feature_layer"] == -2
    assert fields["vision_feature_select_strategy"] == "default"


LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2pp2": {"tp": 2, "pp": 2}, "cp2": {"cp": 2}}


def width_of(model):
    return model.config.hidden_size


def on_layout(folder, out, sizes, batch):
    """This rank's logits in fp64, and the model written again."""
    state = ParallelState(ParallelLayout(**sizes))
    stage, count = state.index("pp"), state.size("pp")
    layers = range(2) if count == 1 else range(stage, stage + 1)
    how = {"state": state, "layers": layers, "sequence_parallel": count > 1}
    model = from_pretrained(folder, dtype=torch.float64, **how)
    batch, x = {**batch, "tokens": shard_sequence(batch["tokens"], state.group("cp"))}, None
    with torch.no_grad():
        if stage:
            rows, length = batch["tokens"].shape
            shared = length // state.size("tp")
            x = torch.empty(rows, shared, width_of(model), dtype=torch.float64)
            dist.recv(x, group=state.group("pp"), group_src=0)
        y = model(x, batch)
        if stage < count - 1:
            dist.send(y.contiguous(), group=state.group("pp"), group_dst=stage + 1)
            y = None
        elif state.size("cp") > 1:
            y = unshard(y, state.group("cp"))
    save_pretrained(model, out)
    return y


@pytest.mark.parametrize(
    ("index", "layout"),
    sample([(index, name) for index in DRAWS for name in LAYOUTS], every=5),
)
def test_every_layout_computes_and_writes_the_same(ranks, saved, tmp_path, index, layout):
    folder, _ = saved(ROW, index)
    whole, sizes = from_pretrained(folder, dtype=torch.float64), LAYOUTS[layout]
    batch = batch_of(whole.config)
    batch["tokens"] = batch["tokens"][:, : batch["tokens"].shape[1] // 4 * 4]
    with torch.no_grad():
        expected = whole(None, batch)
    world = ParallelLayout(**sizes).world_size
    found = ranks(world, on_layout, folder, tmp_path / "out", sizes, batch)
    logits = [each for each in found if each is not None]
    assert logits
    assert all((each - expected).abs().max() < 1e-10 for each in logits)
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


def test_a_run_folder_rebuilds_the_model(saved, tmp_path):
    folder, _ = saved(ROW, 1)
    config = import_pretrained(folder, tmp_path / "run")
    assert config.images == open_pretrained(folder).config.images
    export_checkpoint(RunFolder(tmp_path / "run").path, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


@pytest.mark.parametrize("index", [0, 1])
def test_the_command_verifies_it(saved, monkeypatch, capsys, index):
    folder, _ = saved(ROW, index)
    monkeypatch.setattr(sys, "argv", ["mt-hf", "verify", str(folder)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "they agree" in capsys.readouterr().out


def refused(saved, tmp_path, match, **changes):
    folder, _ = saved(ROW, 0)
    given = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            value = {**given[name], **value}
            value = {field: each for field, each in value.items() if each is not None}
        given[name] = value
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ExchangeError, match=match):
        open_pretrained(tmp_path)


def test_what_is_not_built_is_refused_by_name(saved, tmp_path):
    refused(saved, tmp_path, r"vision_feature_layer: 0 is what enters", vision_feature_layer=0)
    refused(saved, tmp_path, r"feature_layers: -4 is not between", vision_feature_layer=-4)
    refused(saved, tmp_path, r"'nearest'", vision_feature_select_strategy="nearest")
    refused(saved, tmp_path, r"projector_hidden_act: 'mish'", projector_hidden_act="mish")
    refused(saved, tmp_path, r"token_id=40 is not below", image_token_index=40)
    refused(saved, tmp_path, r"text_config.model_type: 'x'", text_config={"model_type": "x"})
    match = r"vision_config.model_type: 'vit' is not known; known are clip_vision_model, siglip"
    refused(saved, tmp_path, match, vision_config={"model_type": "vit"})
    match = r"vision_config: is no clip_vision model.*\n.*hidden_act"
    refused(saved, tmp_path, match, vision_config={"hidden_act": "mish"})
    unknown = {"attention_bias": None, "mlp_bias": None}
    match = r"text_config: the tensors of phi3 are not called as Llama's"
    refused(saved, tmp_path, match, text_config={"model_type": "phi3", **unknown})


def test_a_text_model_is_no_llava(saved):
    plain = gpt(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2)
    with pytest.raises(ExchangeError, match="llava: it takes no images"):
        find_family(plain, "llava")
    config = open_pretrained(saved(ROW, 0)[0]).config
    with pytest.raises(ExchangeError, match="llama: images is"):
        find_family(config, "llama")
    assert find_family(config)[0].name == "llava"
