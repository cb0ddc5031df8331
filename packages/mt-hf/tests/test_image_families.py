"""Every family of encoders of images computes, loads and saves what it does in transformers."""

import json
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_row import assert_same_gradients, bytes_of, oracle
from image_row import DRAWS, FIRST, ROWS, SOME_DRAWS, images_of
from mt_ckpt import RunFolder
from mt_hf import (
    ExchangeError,
    export_checkpoint,
    find_family,
    from_pretrained,
    import_pretrained,
    known_families,
    open_pretrained,
    save_pretrained,
)
from mt_hf.commands.cli import main
from mt_model import VISION_PRESETS, VisionConfig, VisionEncoder, gpt, vision_preset
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample
from safetensors.torch import load_file, save_file

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2pp2": {"tp": 2, "pp": 2}}


def outputs(model, images):
    """The first result of transformers, the features of the last layers, and the pooled ones."""
    found = model(images.to(next(model.parameters()).dtype), output_hidden_states=True)
    return found[0], found.hidden_states, found.get("pooler_output")


@pytest.mark.parametrize(("row", "index"), DRAWS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_outputs_are_those_of_transformers(saved, row, index, dtype, bound):
    folder, model = saved(row, index)
    ours = from_pretrained(folder, dtype=dtype)
    assert isinstance(ours, VisionEncoder)
    images = images_of(ours.config)
    wide = oracle(row, model) if dtype == torch.float64 else model
    with row.in_fp64() if dtype == torch.float64 else torch.no_grad(), torch.no_grad():
        first, hidden, pooled = outputs(wide, images)
    with torch.no_grad():
        got = ours(images)
        assert got.dtype == first.dtype == dtype
        assert got.shape == first.shape
        assert (got - first).abs().max() < bound
        if pooled is not None:
            assert (ours.pool(ours.features(images)) - pooled).abs().max() < bound
        for place in (-1, -2, -3):
            found = ours.features(images, layer=place)
            assert (found - hidden[place]).abs().max() < bound
        patches = ours.features(images, layer=-2, class_token=False)
        assert patches.shape[1] == ours.config.num_patches
        assert torch.equal(patches, ours.features(images, layer=-2)[:, -ours.config.num_patches :])


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_gradients_are_those_of_transformers(saved, row, index):
    folder, model = saved(row, index)
    ours = from_pretrained(folder, dtype=torch.float64)
    images, wide = images_of(ours.config), oracle(row, model)
    with row.in_fp64():
        first, _, pooled = outputs(wide, images)
        if ours.config.num_classes is None:
            loss = first.square().sum() + (0 if pooled is None else pooled.sin().sum())
            output = ours(images)
            own = output.square().sum()
            if pooled is not None:
                own = own + ours.pool(output).sin().sum()
        else:
            labels = torch.arange(3) % ours.config.num_classes
            labels[1] = -100
            how = {"reduction": "sum", "ignore_index": -100}
            loss = torch.nn.functional.cross_entropy(first, labels, **how)
            losses = ours(images, labels=labels)
            assert losses["tokens"] == 2
            own = losses["classes"]
    assert torch.allclose(own, loss, rtol=1e-10, atol=0)
    loss.backward()
    own.backward()
    assert_same_gradients(ours, wide, folder, partial(in_memory, row))


def in_memory(row, stored):
    """The name of a stored tensor in the model of transformers."""
    if row.name != "vit":
        return stored
    for first, second in (
        ("encoder.layer.", "layers."),
        (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."),
        (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."),
        (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ):
        stored = stored.replace(first, second)
    return stored


@pytest.mark.parametrize(("row", "index"), SOME_DRAWS)
def test_export_has_the_bytes_that_were_imported(saved, tmp_path, row, index):
    folder, model = saved(row, index)
    save_pretrained(from_pretrained(folder), tmp_path / "same")
    assert bytes_of(tmp_path / "same") == bytes_of(folder)
    assert (tmp_path / "same/config.json").read_bytes() == (folder / "config.json").read_bytes()
    bare = from_pretrained(folder)
    bare.origin = None
    save_pretrained(bare, tmp_path / "bare", file_size=9000)
    assert bytes_of(tmp_path / "bare") == bytes_of(folder)
    assert open_pretrained(tmp_path / "bare").config == open_pretrained(folder).config
    again, info = type(model).from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    images = images_of(bare.config)
    with torch.no_grad():
        assert torch.equal(again.eval()(images)[0], model(images)[0])


def tokens_and_width(folder):
    described = open_pretrained(folder).config
    return described.max_sequence_length, described.hidden_size


def on_layout(folder, out, sizes, images, sequence_parallel):
    """This rank's output in fp64, and the model written again."""
    state = ParallelState(ParallelLayout(**sizes))
    stage, (tokens, width) = state.index("pp"), tokens_and_width(folder)
    layers = range(3) if state.size("pp") == 1 else (range(2), range(2, 3))[stage]
    model = from_pretrained(
        folder,
        dtype=torch.float64,
        state=state,
        layers=layers,
        sequence_parallel=sequence_parallel,
    )
    x, group = None, state.group("pp")
    with torch.no_grad():
        if stage:
            shared = state.size("tp") if sequence_parallel else 1
            shape = (len(images), -(-tokens // shared), width)
            x = torch.empty(shape, dtype=torch.float64)
            dist.recv(x, group=group, group_src=stage - 1)
        y = model(x, {"images": images})
        if stage < state.size("pp") - 1:
            dist.send(y.contiguous(), group=group, group_dst=stage + 1)
            y = None
    save_pretrained(model, out)
    return y


@pytest.mark.parametrize(("row", "layout"), sample(product(ROWS, LAYOUTS), every=2))
def test_every_layout_computes_and_writes_the_same(ranks, saved, tmp_path, row, layout):
    folder, _ = saved(row, 0)
    sizes, whole = LAYOUTS[layout], from_pretrained(folder, dtype=torch.float64)
    images = images_of(whole.config)
    with torch.no_grad():
        expected = whole(images)
    world, parallel = ParallelLayout(**sizes).world_size, layout == "tp2pp2"
    found = ranks(world, on_layout, folder, tmp_path / "out", sizes, images, parallel)
    outputs = [each for each in found if each is not None]
    assert outputs
    assert all((each - expected).abs().max() < 1e-10 for each in outputs)
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


@pytest.mark.parametrize("row", FIRST)
def test_a_run_folder_rebuilds_the_encoder(saved, tmp_path, row):
    folder, _ = saved(row, 1)
    config = import_pretrained(folder, tmp_path / "run")
    assert isinstance(config, VisionConfig)
    export_checkpoint(RunFolder(tmp_path / "run").path, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


@pytest.mark.parametrize("row", FIRST)
def test_the_command_verifies_it(saved, monkeypatch, capsys, row):
    folder, _ = saved(row, 0)
    monkeypatch.setattr(sys, "argv", ["mt-hf", "verify", str(folder)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "they agree" in capsys.readouterr().out


def test_names_of_older_folders_begin_with_the_encoder(saved, tmp_path):
    row = next(row for row in ROWS if row.model == "CLIPVisionModel")
    folder, _ = saved(row, 0)
    tensors = load_file(folder / "model.safetensors")
    older = {f"vision_model.{name}": tensor for name, tensor in tensors.items()}
    older["vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    (tmp_path / "older").mkdir()
    save_file(older, tmp_path / "older/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "older/config.json").write_bytes((folder / "config.json").read_bytes())
    first, second = from_pretrained(folder), from_pretrained(tmp_path / "older")
    images = images_of(first.config)
    with torch.no_grad():
        assert torch.equal(first(images), second(images))


def test_another_dtype_keeps_the_architecture(saved, tmp_path):
    for row in ROWS[:2]:
        folder, _ = saved(row, 1)
        out = tmp_path / row.model
        save_pretrained(from_pretrained(folder), out, dtype=torch.bfloat16)
        assert json.loads((out / "config.json").read_text())["architectures"] == [row.model]
        assert open_pretrained(out).config == open_pretrained(folder).config


def test_a_family_says_why_a_model_is_not_its_own(saved, tmp_path):
    llama = gpt(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2)
    with pytest.raises(ExchangeError, match=r"vit: .*VisionConfig.*ModelConfig"):
        find_family(llama, "vit")
    with pytest.raises(ExchangeError, match=r"llama: .*ModelConfig.*VisionConfig"):
        find_family(vision_preset("vit-base"), "llama")
    mixed = vision_preset("vit-base", pooling="attention")
    with pytest.raises(ExchangeError, match="of no known family") as caught:
        find_family(mixed)
    assert "vit: pooling" in str(caught.value)
    folder, _ = saved(ROWS[1], 0)
    path = tmp_path / "copy"
    path.mkdir()
    given = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**given, "pooler_act": "relu"}))
    with pytest.raises(ExchangeError, match="pooler_act: 'relu' is not built"):
        from_pretrained(path)


def test_published_encoders_are_written_as_their_families_do():
    names = {"vit": "vit", "clip": "clip_vision", "siglip": "siglip_vision"}
    for name in VISION_PRESETS:
        config, family = vision_preset(name), names[name.split("-")[0]]
        found, fields = find_family(config)
        assert found.name == family
        assert found.config_of(fields, Path("config.json")) == config, name


def test_every_family_of_encoders_has_a_row():
    encoders = {name for name, each in known_families().items() if each.builds is VisionConfig}
    assert {row.name for row in ROWS} == encoders
