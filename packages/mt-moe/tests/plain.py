"""A mixture of experts written as its formula, and what tests draw."""

import torch
import torch.nn.functional as F

F64 = torch.float64


def drawn(*shape, seed=0, dtype=F64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def plain_expert(x, layer, expert, options):
    """One expert's feed-forward."""
    up = layer.experts.up.weight[expert]
    bias = options.bias
    acts = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "gelu_quick": lambda v: v * torch.sigmoid(1.702 * v),
        "relu": F.relu,
        "relu2": lambda v: F.relu(v).square(),
    }
    act = acts[options.activation]
    if options.gated:
        gate, value = x @ up[0].T, x @ up[1].T
        if bias:
            gate = gate + layer.experts.up.bias[expert, 0]
            value = value + layer.experts.up.bias[expert, 1]
        if options.clamp is not None:
            gate = gate.clamp(max=options.clamp)
            value = value.clamp(-options.clamp, options.clamp)
        hidden = act(gate) * (value + options.up_offset)
    else:
        hidden = act(x @ up.T + (layer.experts.up.bias[expert] if bias else 0))
    y = hidden @ layer.experts.down.weight[expert].T
    return y + layer.experts.down.bias[expert] if bias else y


def plain_layer(x, layer, weights, experts):
    """Apply every expert to every token, times the weights of the chosen experts."""
    options, total = layer.options.experts, torch.zeros_like(x)
    for expert in range(layer.num_experts):
        share = (weights * (experts == expert)).sum(1, keepdim=True)
        if layer.options.scale_input:
            scaled = plain_expert(share.to(x.dtype) * x, layer, expert, options)
            total = total + (experts == expert).any(1, keepdim=True) * scaled
            continue
        total = total + share.to(x.dtype) * plain_expert(x, layer, expert, options)
    return total


def gradients(output, grad, module, *inputs):
    """Gradients of inputs and parameters by name, as the module has them."""
    params = dict(module.named_parameters())
    found = torch.autograd.grad(output, [*inputs, *params.values()], grad, allow_unused=True)
    names = [*(f"input{i}" for i in range(len(inputs))), *params]
    return dict(zip(names, found, strict=True))


def assert_same(found, expected, *, tolerance=1e-12):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            scale = max(1.0, float(value.detach().abs().max())) if value.numel() else 1.0
            torch.testing.assert_close(
                found[name],
                value,
                rtol=0,
                atol=tolerance * scale,
                msg=lambda m, n=name: f"{n}: {m}",
            )
