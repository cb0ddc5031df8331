"""Layers and stages as CUDA graphs: on a CPU the bits of eager, and the rules held."""

import pytest
import torch
from mt_fusions import GraphError
from mt_model import GPT, GraphOptions, gpt, graph_stage

MODELS = {
    "dropout": {"dropout": 0.2, "attention_dropout": 0.2},
    "long": {"max_sequence_length": 1024},
    "learned": {"positions": "learned"},
    "mtp": {"mtp": {"depths": 1}},
    "fused": {},
}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def build(name, **overrides):
    how = {"kernels": "fused"} if name == "fused" else {}
    return GPT(gpt(**SIZES, **{**MODELS[name], **overrides}), seed=3, **how)


def batch(step, length=16, rows=2, device="cpu"):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (rows, length), generator=generator)
    ids = torch.arange(rows) + rows * step
    made = {"tokens": tokens, "labels": tokens.roll(-1, 1), "sample_ids": ids}
    return {key: x.to(device) for key, x in made.items()}


def train(model, run, batches):
    losses = []
    for own in batches:
        found = run(None, own)
        sum(loss for name, loss in found.items() if loss.requires_grad).backward()
        losses.append({name: loss.detach() for name, loss in found.items()})
    return losses, [param.grad for param in model.parameters()]


# A CPU's fused cross entropy asks whether a row is empty.
CASES = [(name, unit) for name in MODELS for unit in ("layer", "stage")]
CASES.remove(("fused", "stage"))


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_graphs_have_the_bits_of_eager(unit, name):
    ours, theirs = build(name), build(name)
    batches = [batch(step, length=520 if name == "long" else 16) for step in range(4)]
    captured = graph_stage(ours, unit)
    found, expected = train(ours, captured, batches), train(theirs, theirs, batches)
    assert found[0] == expected[0]
    for own, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(own, other)


def test_evaluation_and_generation_run_eagerly():
    model, plain = build("dropout"), build("dropout")
    captured = graph_stage(model, "layer")
    train(model, captured, [batch(step) for step in range(3)])
    model.eval(), plain.eval()
    own = batch(9, length=7)
    with torch.no_grad():
        assert captured(None, own) == plain(None, own)
    caches = (each.new_cache(batch_size=2, max_length=8) for each in (model, plain))
    found = [m.logits(own["tokens"], cache=c) for m, c in zip((model, plain), caches, strict=True)]
    assert torch.equal(*found)


def test_a_batch_of_another_shape_runs_eagerly_and_says_so_once():
    said, model = [], build("mtp")
    captured = graph_stage(model, "stage", GraphOptions(on_eager=said.append))
    train(model, captured, [batch(step) for step in range(3)])
    train(model, captured, [batch(step, rows=1) for step in range(3)])
    assert len(said) == 1
    assert "the stage of layers 0 to 1 runs eagerly: argument" in said[0]
    captured = graph_stage(build("mtp"), "stage")
    train(model, captured, [batch(step) for step in range(3)])
    with pytest.raises(GraphError, match="argument"):
        captured(None, batch(3, rows=1))


def test_a_wrong_unit_is_refused():
    with pytest.raises(ValueError, match="unit must be 'layer' or 'stage', got 'step'"):
        graph_stage(build("mtp"), "step")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("unit", ["layer", "stage"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_graphs_give_what_eager_gives(unit, name):
    ours, theirs = build(name).cuda(), build(name).cuda()
    batches = [batch(step, device="cuda") for step in range(6)]
    said = []
    captured = graph_stage(ours, unit, GraphOptions(on_eager=said.append))
    found, expected = train(ours, captured, batches), train(theirs, theirs, batches)
    assert not said
    torch.testing.assert_close(found[0], expected[0])
    for own, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(own, other)
