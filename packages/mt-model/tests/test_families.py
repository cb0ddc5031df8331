"""Every family computes, loads, saves and generates what it does in transformers."""

import json
import shutil

import mt_model
import pytest
import torch
import torch.distributed as dist
from family_row import DRAWS, FIRST, PLACED, ROWS, SEQUENCE
from mt_context_parallel import shard, unshard
from mt_model import (
    describe_pretrained,
    from_pretrained,
    known_families,
    open_pretrained,
    save_pretrained,
)
from mt_parallel_state import ParallelLayout, ParallelState
from safetensors import safe_open

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2pp2": {"tp": 2, "pp": 2}, "cp2": {"cp": 2}}
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a drawn model, and the model."""
    made = {}

    def save(row, index):
        if (row.name, index) not in made:
            folder = tmp_path_factory.mktemp(row.name) / "model"
            model = row.build(index)
            model.save_pretrained(folder)
            made[row.name, index] = folder, model
        return made[row.name, index]

    return save


def tokens_of(config, rows=3):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, config.vocab_size, (rows, SEQUENCE), generator=generator)


def oracle(row, model):
    """The same model of transformers with every number in fp64."""
    with row.in_fp64():
        wide = type(model)(model.config).double().eval()
    wide.load_state_dict(model.state_dict())
    return wide


def bytes_of(folder):
    """Dtype, shape and bytes of each tensor, read by the safetensors library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                found[name] = (tensor.dtype, tuple(tensor.shape), bytes(raw.tolist()))
    return found


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_logits_are_those_of_transformers(saved, row, index):
    folder, model = saved(row, index)
    tokens = tokens_of(model.config)
    ours = from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert (ours(tokens) - model(tokens).logits).abs().max() < 1e-5
    wide = oracle(row, model)
    with row.in_fp64(), torch.no_grad():
        expected = wide(tokens).logits
    got = from_pretrained(folder, dtype=torch.float64)(tokens)
    assert got.dtype == expected.dtype == torch.float64
    assert (got - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_gradients_of_padded_sequences_are_those_of_transformers(saved, row, index):
    """Two sequences end early: padding has no labels there and a mask here."""
    folder, model = saved(row, index)
    tokens, labels = tokens_of(model.config), tokens_of(model.config).roll(-1, 1)
    mask = torch.ones_like(tokens)
    for sequence, length in enumerate((SEQUENCE, SEQUENCE - 3, SEQUENCE - 7)):
        mask[sequence, length:] = 0
        labels[sequence, length - 1 :] = -100
    wide = oracle(row, model)
    with row.in_fp64():
        logits = wide(tokens, attention_mask=mask).logits
        args = {"ignore_index": -100, "reduction": "sum"}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **args)
        loss.backward()
    ours = from_pretrained(folder, dtype=torch.float64)
    losses = ours(tokens, labels=labels)
    losses["lm"].backward()
    assert losses["tokens"] == (labels != -100).sum()
    assert torch.allclose(losses["lm"], loss, rtol=1e-10, atol=0)
    found = open_pretrained(folder)
    grads = {name: param.grad for name, param in wide.named_parameters()}
    # A bias of all keys moves no softmax: what is left of its gradient is rounding.
    rounding = 1e-12 * max(grad.norm() for grad in grads.values())
    for name, param in ours.named_parameters():
        for link in found.links[name]:
            expected = link.window(grads[row.in_memory(link.source)], param.shape)
            got = param.grad[tuple(slice(*ends) for ends in link.area(param.shape))]
            assert (got - expected).norm() <= max(1e-4 * expected.norm(), rounding), link.source


@pytest.mark.parametrize(("row", "index"), DRAWS)
def test_packed_documents_are_those_of_transformers_one_by_one(saved, row, index):
    folder, model = saved(row, index)
    tokens, lengths = tokens_of(model.config, rows=1), (5, 1, SEQUENCE - 6)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    wide = oracle(row, model)
    with row.in_fp64(), torch.no_grad():
        parts = [wide(part).logits for part in tokens.split(lengths, 1)]
    ours = from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        got = ours(None, {"tokens": tokens, "documents": documents, "positions": positions})
    assert (got - torch.cat(parts, 1)).abs().max() < 1e-10


@pytest.mark.parametrize(("row", "index"), DRAWS)
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
    tokens = tokens_of(model.config)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


def depth_and_width(folder):
    described = describe_pretrained(folder).config
    return described.num_layers, described.hidden_size


def on_layout(folder, out, sizes, tokens):
    """This rank's logits of the whole batch in fp64, and the model written again."""
    state = ParallelState(ParallelLayout(**sizes))
    count, width = depth_and_width(folder)
    stage, cut = state.index("pp"), -(-count // 2)
    layers = range(count) if state.size("pp") == 1 else (range(cut), range(cut, count))[stage]
    arguments = {"dtype": torch.float64, "state": state, "layers": layers}
    model = from_pretrained(folder, **arguments)
    batch, x = {"tokens": shard(tokens, state.group("cp"))}, None
    stages = state.group("pp")
    with torch.no_grad():
        if stage:
            x = torch.empty(*batch["tokens"].shape, width, dtype=torch.float64)
            dist.recv(x, group=stages, group_src=stage - 1)
        y = model(x, batch)
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
    tokens, sizes = tokens_of(model.config), LAYOUTS[layout]
    with torch.no_grad():
        expected = from_pretrained(folder, dtype=torch.float64)(tokens)
    world = ParallelLayout(**sizes).world_size
    found = ranks(world, on_layout, folder, tmp_path / "out", sizes, tokens)
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


@pytest.mark.parametrize("row", FIRST)
def test_greedy_generation_is_that_of_transformers(saved, row):
    folder, model = saved(row, 0)
    tokens = tokens_of(model.config, rows=1)[:, :7]
    wide = oracle(row, model)
    with row.in_fp64():
        expected = wide.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    ours = from_pretrained(folder, dtype=torch.float64)
    assert torch.equal(greedy(ours, tokens, cached=True), expected)
    assert torch.equal(greedy(ours, tokens, cached=False), expected)


def test_every_family_has_a_row():
    assert {row.name for row in ROWS} == set(known_families())
    assert mt_model.Family is type(known_families()["llama"])


def test_families_are_told_apart_by_their_architecture(saved, tmp_path):
    row = next(row for row in ROWS if row.name == "llama")
    folder, _ = saved(row, 0)
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy/config.json"
    given = json.loads(path.read_text())
    del given["architectures"]
    path.write_text(json.dumps(given))
    assert open_pretrained(path.parent).family.name == "llama"
