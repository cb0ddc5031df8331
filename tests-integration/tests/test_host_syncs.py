"""Where the host waits for the GPU in a training step, counted without one.

The forward and the optimizer run on fake CUDA tensors. The backward and packed documents run on
`meta`, which takes the CPU's branches: without a device torch refuses a backward of fake CUDA
tensors, and to tell the capability that the kernels for documents are chosen by.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from mt_model import GPT, gpt
from mt_optim import AdamW, OptimizerConfig, build_optimizer, clip_grad_norm, grad_norm
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import HostSyncs
from torch._subclasses.fake_tensor import FakeTensorMode

# Grouped queries, RoPE, RMSNorm, packed documents and labels that are ignored, as in pretraining.
CONFIG = gpt(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_sequence_length=16,
    positions="rope",
    norm="rms",
)
BF16 = {"dtype": torch.bfloat16}
MODELS = {"fp32": {}, "bf16": BF16}
# The one wait of a step: whether it is taken depends on its norm.
MEASURED, DECIDED = ["clip.py"], ["guard.py"]


@pytest.fixture(params=["meta", "cuda"])
def device(request):
    with FakeTensorMode() if request.param == "cuda" else nullcontext():
        yield request.param


def batch_on(device):
    tokens, documents = torch.arange(32).view(2, 16), torch.arange(16).expand(2, 16) // 6
    labels = tokens.masked_fill(documents == 1, -100)
    batch = {"tokens": tokens, "labels": labels, "documents": documents}
    return {name: x.to(device) for name, x in batch.items()}


def loss_of(model, batch):
    losses = model(None, batch)
    return losses["lm"] / losses["tokens"]


def check(syncs, files=()):
    found = [sync.file.rpartition("/")[2] for sync in syncs]
    assert found == list(files), f"the host waits at\n{syncs}\nwhere these may: {list(files)}"


def with_grads(device):
    model = GPT(CONFIG, device=device, **BF16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    state = ParallelState(ParallelLayout(), device=torch.device(device))
    return list(model.named_parameters()), state


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_waits_nowhere(name):
    with FakeTensorMode():
        model, batch = GPT(CONFIG, device="cuda", **MODELS[name]), batch_on("cuda")
        del batch["documents"]  # their kernels ask for the device's capability
        with HostSyncs("cuda") as syncs:
            loss = loss_of(model, batch)
        assert loss.is_cuda
        assert loss.requires_grad
    check(syncs)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_forward_and_its_backward_wait_nowhere(name):
    model, batch = GPT(CONFIG, device="meta", **MODELS[name]), batch_on("meta")
    with HostSyncs("meta") as syncs:
        loss = loss_of(model, batch)
    check(syncs)
    with HostSyncs("meta") as syncs:
        loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    check(syncs)


def test_norm_and_clip_wait_once_and_adamw_nowhere(device):
    named, state = with_grads(device)
    with HostSyncs(device) as syncs:
        grad_norm(named, state)
    check(syncs, MEASURED)
    with HostSyncs(device) as syncs:
        assert clip_grad_norm(named, state, 0.5) == 1.0  # above, so that gradients are scaled
    check(syncs, MEASURED)
    optimizer = AdamW(named, lr=1e-3, weight_decay=0.1)
    for _ in range(2):  # the first makes masters and moments
        with HostSyncs(device) as syncs:
            optimizer.step()
        check(syncs)


@pytest.mark.parametrize(
    ("settings", "copied"),
    [({}, []), ({"count_zeros": True, "statistics": "layer"}, []), ({"ema": 0.9}, ["ema.py"])],
)
def test_a_step_of_a_built_optimizer_waits_once(settings, copied):
    """And an average of weights once more, for its weight, which is counted on the host."""
    named, state = with_grads("meta")
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_norm=0.5, **settings)
    optimizer = build_optimizer(named, config, state)
    for _ in range(2):
        with HostSyncs("meta") as syncs:
            result = optimizer.step()
        assert result.stepped
        check(syncs, [*DECIDED, *copied])


class Peeks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.amax().item()


def scales(module, args, output):
    return output / output.detach().amax().item()


def test_a_number_that_a_layer_asks_for_fails_the_check_and_is_named():
    with FakeTensorMode():
        model, batch = GPT(CONFIG, device="cuda"), batch_on("cuda")
        del batch["documents"]
        model.layers["0"].feed_forward.register_forward_hook(scales)
        with HostSyncs("cuda") as syncs:
            loss_of(model, batch)
    line = scales.__code__.co_firstlineno + 1
    with pytest.raises(AssertionError, match=rf"test_host_syncs\.py:{line} aten::_local_scalar"):
        check(syncs)


def test_a_number_that_a_backward_asks_for_fails_the_check_and_is_named():
    model = GPT(CONFIG, device="meta")
    model.layers["0"].feed_forward.register_forward_hook(lambda *call: Peeks.apply(call[2]))
    loss = loss_of(model, batch_on("meta"))
    with HostSyncs("meta") as syncs:
        loss.backward()
    line = Peeks.backward.__code__.co_firstlineno + 2
    with pytest.raises(AssertionError, match=rf"test_host_syncs\.py:{line} aten::_local_scalar"):
        check(syncs)
