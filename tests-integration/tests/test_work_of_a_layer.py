"""How many operations a layer and an optimizer step give a GPU, and how many bytes these move.

Counted on `meta` tensors that say they are on CUDA, with the flash operator in the place of torch's
choice of an attention, which needs a device. `work_of_a_layer.json` is the budget: what grows
fails, and what shrinks asks for a lower number, so that it can't grow back unseen.
"""

import json
from pathlib import Path

import pytest
import torch
from mt_model import GPT, gpt
from mt_optim import OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import DeviceWork, HostSyncs
from torch import nn

BUDGET = Path(__file__).with_name("work_of_a_layer.json")
ROWS, LENGTH, HIDDEN = 2, 2048, 1024
SIZES = {"vocab_size": 128, "hidden_size": HIDDEN, "num_layers": 1, "num_heads": 16}
LAYERS = {
    "llama": {**SIZES, "num_kv_heads": 4, "ffn_size": 2816, "positions": "rope", "norm": "rms"},
    "gpt2": {
        **SIZES,
        "ffn_size": 4096,
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu_tanh",
        "bias": True,
    },
}


def flash(q, k, v, *, dropout_p=0.0, is_causal=False, scale=None, **_):
    """What torch's attention gives a GPU for these sizes, without asking the GPU."""
    out = torch.ops.aten._scaled_dot_product_flash_attention
    return out(q, k, v, dropout_p, is_causal, scale=scale)[0]


@pytest.fixture
def like_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", flash)
    monkeypatch.setattr("mt_kernels.device.triton_is_interpreted", lambda: True)


def shown(work):
    return {"operations": work.count, "MiB": round(work.bytes / 2**20)}


def work_of(layer, kernels):
    """The work of one layer, forward and backward, and of one step of AdamW on its parameters."""
    model = GPT(gpt(**LAYERS[layer]), device="meta", dtype=torch.bfloat16, kernels=kernels)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    x = torch.empty(ROWS, LENGTH, HIDDEN, device="meta", dtype=torch.bfloat16, requires_grad=True)
    _, shared = model.begin(None, {"tokens": tokens, "labels": tokens})
    with DeviceWork("meta") as forward:
        y, _ = model.run_layers(x, shared)
    grad = torch.empty_like(y)
    with DeviceWork("meta") as backward:
        y.backward(grad)
    return {"forward": shown(forward), "backward": shown(backward)}, (forward, backward)


def work_of_optimizer(layer):
    """Norm, clip and AdamW of one layer's parameters, in bf16 with fp32 masters."""
    model = GPT(gpt(**LAYERS[layer]), device="meta", dtype=torch.bfloat16)
    named = list(model.layers.named_parameters())
    for _, param in named:
        param.grad = torch.empty_like(param)
    state = ParallelState(ParallelLayout(), device=torch.device("meta"))
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_norm=0.5)
    optimizer = build_optimizer(named, config, state)
    with HostSyncs("meta"), DeviceWork("meta") as work:  # the norm is 1, and is clipped
        assert optimizer.step().stepped
    return {"optimizer": shown(work)}, (work,)


def check(name, found, works):
    budget = json.loads(BUDGET.read_text())
    allowed = budget.get(name)
    if found == allowed:
        return
    whole = json.dumps({**budget, name: found}, indent=1)
    ops = "\n".join(str(dict(work.ops.most_common())) for work in works)
    assert allowed is not None, f"{name} has no budget; the file with it is\n{whole}"
    grown = [
        f"{part} {what}: {value}, the budget is {allowed[part][what]}"
        for part, own in found.items()
        for what, value in own.items()
        if value > allowed[part][what]
    ]
    assert not grown, f"{name} has more work than its budget: {'; '.join(grown)}\n{ops}"
    if torch.__version__.startswith(budget["torch"]):
        raise AssertionError(f"{name} has less work: lower its budget, so that it stays\n{whole}")


@pytest.mark.parametrize("kernels", ["reference", "auto", "fused"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_work_of_a_layer_is_its_budget(like_cuda, layer, kernels):
    check(f"{layer} {kernels}", *work_of(layer, kernels))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_work_of_an_optimizer_step_is_its_budget(like_cuda, layer):
    check(f"{layer} optimizer", *work_of_optimizer(layer))


def test_fused_kernels_have_less_work_than_their_references():
    budget = json.loads(BUDGET.read_text())
    for layer in LAYERS:
        fused, reference = budget[f"{layer} fused"], budget[f"{layer} reference"]
        for part in ("forward", "backward"):
            for what in ("operations", "MiB"):
                assert fused[part][what] < reference[part][what]


def test_a_copy_that_somebody_adds_is_above_the_budget(like_cuda, monkeypatch):
    run = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda q, *args, **rest: run(q.clone(), *args, **rest),
    )
    text = "gpt2 fused has more work than its budget: forward operations: 10, the budget is 9;"
    with pytest.raises(AssertionError, match=text):
        check("gpt2 fused", *work_of("gpt2", "fused"))


def test_work_that_is_gone_asks_for_a_lower_budget():
    budget = json.loads(BUDGET.read_text())
    less = {part: {**own, "MiB": own["MiB"] - 1} for part, own in budget["gpt2 fused"].items()}
    if torch.__version__.startswith(budget["torch"]):
        with pytest.raises(AssertionError, match="gpt2 fused has less work: lower its budget"):
            check("gpt2 fused", less, ())
    else:  # another torch may have fewer operations of its own
        check("gpt2 fused", less, ())
