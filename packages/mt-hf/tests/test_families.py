"""Every family computes, loads, saves and generates what it does in transformers."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from family_row import (
    DRAWS,
    FIRST,
    PLACED,
    PLAIN_DRAWS,
    ROWS,
    SEQUENCE,
    SOME_DRAWS,
    WITH_ENCODER,
    assert_same_gradients,
    bytes_of,
    oracle,
)
from image_row import ROWS as IMAGE_ROWS
from llava_row import ROW as LLAVA_ROW
from mt_context_parallel import shard as shard_sequence
from mt_context_parallel import unshard
from mt_hf import (
    ExchangeError,
    from_pretrained,
    known_families,
    open_pretrained,
    read_description,
    save_pretrained,
)
from mt_parallel_state import ParallelLayout, ParallelState
from packed_pairs import packed_and_padded
from safetensors.torch import load_file, save_file

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "cp2": {"cp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2ep2": {"tp": 2, "ep": 2, "etp": 1},
    "ep2etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
}
STREAMS = ("tokens", "encoder_tokens")
NEW_TOKENS = 64


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_logits_are_those_of_transformers(saved, row, index):
    folder, model = saved(row, index)
    batch = row.batch(model.config)
    ours = from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert (ours(None, batch) - row.logits(model, batch)).abs().max() < 1e-5
    wide = oracle(row, model)
    with row.in_fp64(), torch.no_grad():
        expected = row.logits(wide, batch)
    got = from_pretrained(folder, dtype=torch.float64)(None, batch)
    assert got.dtype == expected.dtype == torch.float64
    assert (got - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_gradients_of_padded_sequences_are_those_of_transformers(saved, tmp_path, row, index):
    """Padding has no labels; where tokens see it, it has a mask too."""
    folder, model = saved(row, index)
    batch = row.padded(model.config)
    labels, wide = batch["labels"], oracle(row, model)
    with row.in_fp64():
        logits = row.logits(wide, batch)
        args = {"ignore_index": -100, "reduction": "sum"}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **args)
        loss.backward()
    ours = from_pretrained(folder, dtype=torch.float64)
    if row.generates:
        batch.pop("mask", None)
    losses = ours(None, batch)
    losses["lm"].backward()
    assert losses["tokens"] == (labels != -100).sum()
    assert torch.allclose(losses["lm"], loss, rtol=1e-10, atol=0)
    written = tmp_path / "gradients" if row.has_experts else None
    assert_same_gradients(ours, wide, folder, row.in_memory, written)


@pytest.mark.parametrize(("row", "index"), PLAIN_DRAWS)
def test_packed_documents_are_those_of_transformers_one_by_one(saved, row, index):
    folder, model = saved(row, index)
    tokens, lengths = row.batch(model.config, rows=1)["tokens"], (5, 1, SEQUENCE - 6)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    wide = oracle(row, model)
    with row.in_fp64(), torch.no_grad():
        parts = [wide(part).logits for part in tokens.split(lengths, 1)]
    ours = from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        got = ours(None, {"tokens": tokens, "documents": documents, "positions": positions})
    assert (got - torch.cat(parts, 1)).abs().max() < 1e-10


@pytest.mark.parametrize(("row", "index"), SOME_DRAWS)
def test_export_has_the_bytes_that_were_imported(saved, tmp_path, row, index):
    folder, model = saved(row, index)
    save_pretrained(from_pretrained(folder), tmp_path / "same")
    assert bytes_of(tmp_path / "same") == bytes_of(folder)
    assert (tmp_path / "same/config.json").read_bytes() == (folder / "config.json").read_bytes()
    bare = from_pretrained(folder)
    bare.origin = None
    save_pretrained(bare, tmp_path / "bare", family=row.name, file_size=9000)
    assert bytes_of(tmp_path / "bare") == bytes_of(folder)
    assert open_pretrained(tmp_path / "bare").config == open_pretrained(folder).config
    again, info = type(model).from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    batch = row.batch(model.config)
    with torch.no_grad():
        assert torch.equal(row.logits(again.eval(), batch), row.logits(model, batch))


def depth_and_width(folder):
    described = read_description(folder).config
    return described.num_layers, described.hidden_size


def on_layout(folder, out, sizes, given):
    """This rank's logits of the whole batch in fp64, and the model written again."""
    state = ParallelState(ParallelLayout(**sizes))
    count, width = depth_and_width(folder)
    stage, cut = state.index("pp"), -(-count // 2)
    layers = range(count) if state.size("pp") == 1 else (range(cut), range(cut, count))[stage]
    arguments = {"dtype": torch.float64, "state": state, "layers": layers}
    model = from_pretrained(folder, **arguments)
    streams = {n: shard_sequence(x, state.group("cp")) for n, x in given.items() if n in STREAMS}
    batch, stages, x = {**given, **streams}, state.group("pp"), None
    with torch.no_grad():
        if stage:
            length = sum(tokens.shape[1] for tokens in streams.values())
            x = torch.empty(len(batch["tokens"]), length, width, dtype=torch.float64)
            dist.recv(x, group=stages, group_src=stage - 1)
        y = model(x, batch)
        y = y[0] if isinstance(y, tuple) else y  # losses of experts travel beside it
        if stage < state.size("pp") - 1:
            dist.send(y.contiguous(), group=stages, group_dst=stage + 1)
            y = None
        elif state.size("cp") > 1:
            y = unshard(y, state.group("cp"))
    save_pretrained(model, out)
    return y


@pytest.mark.parametrize(("row", "layout"), PLACED)
def test_every_layout_computes_and_writes_the_same(ranks, saved, tmp_path, row, layout):
    folder, model = saved(row, 1)
    batch, sizes = row.batch(model.config), LAYOUTS[layout]
    if row.has_encoder:
        batch = packed_and_padded(row, model.config)
    with torch.no_grad():
        expected = from_pretrained(folder, dtype=torch.float64)(None, batch)
    world = ParallelLayout(**sizes).world_size
    found = ranks(world, on_layout, folder, tmp_path / "out", sizes, batch)
    logits = [each for each in found if each is not None]
    assert logits
    assert all((each - expected).abs().max() < 1e-10 for each in logits)
    assert bytes_of(tmp_path / "out") == bytes_of(folder)


def greedy(model, tokens, *, cached):
    cache = model.new_cache(batch_size=1, max_length=tokens.shape[1] + NEW_TOKENS)
    fed = tokens
    for _ in range(NEW_TOKENS):
        logits = model.logits(fed, cache=cache) if cached else model.logits(tokens)
        fed = logits[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, fed), 1)
    return tokens


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("row", FIRST)
def test_greedy_generation_is_that_of_transformers(saved, row, cached):
    folder, model = saved(row, 0)
    tokens = row.batch(model.config, rows=1)["tokens"][:, :7]
    wide = oracle(row, model)
    with row.in_fp64():
        expected = wide.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    ours = from_pretrained(folder, dtype=torch.float64)
    assert torch.equal(greedy(ours, tokens, cached=cached), expected)
    known = tokens.shape[1]  # and all at once
    assert torch.equal(
        ours.logits(expected[:, :-1])[:, known - 1 :].argmax(-1), expected[:, known:]
    )


def test_every_family_has_a_row():
    rows = (*ROWS, *IMAGE_ROWS, *WITH_ENCODER, LLAVA_ROW)
    assert {row.name for row in rows} == set(known_families())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mixtral", ".experts.1."),
        ("olmoe", ".experts.1."),
        ("qwen2_moe", ".experts.1."),
        ("qwen3_moe", ".experts.1."),
        ("deepseek_v2", ".experts.1."),
        ("deepseek_v3", ".experts.1."),
        ("deepseek_v3", ".e_score_correction_bias"),
    ],
)
def test_a_missing_tensor_of_experts_is_named(saved, tmp_path, name, part):
    folder, _ = saved(next(row for row in ROWS if row.name == name), 0)
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy/model.safetensors"
    tensors = load_file(path)
    gone = next(each for each in sorted(tensors) if part in each)
    del tensors[gone]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ExchangeError, match=re.escape(gone)):
        from_pretrained(path.parent)


def test_families_are_told_apart_by_their_architecture(saved, tmp_path):
    row = next(row for row in ROWS if row.name == "llama")
    folder, _ = saved(row, 0)
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy/config.json"
    given = json.loads(path.read_text())
    del given["architectures"]
    path.write_text(json.dumps(given))
    assert open_pretrained(path.parent).family.name == "llama"
