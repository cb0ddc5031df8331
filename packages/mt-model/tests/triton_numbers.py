"""Prints how far fused kernels in Triton's interpreter are from the plain forms, as JSON.

A program, as Triton decides when it is imported whether it interprets kernels.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from mt_model import GPT, gpt
from torch.utils._python_dispatch import TorchDispatchMode

assert triton.knobs.runtime.interpret
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "max_sequence_length": 8,
    "init_std": 0.3,
    "window": 5,
}
FORMS = {
    "gemma": {"norm_zero_centered": True, "activation": "gelu_tanh", "norms": "sandwich"},
    "gpt2": {
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "bias": True,
        "dropout": 0.1,
    },
}


class Ran(TorchDispatchMode):
    """Notes the operators of mt-fusions that run, and by which kernel."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mt_fusions":
            names = [arg.name for arg in func._schema.arguments]
            self.found.add((func._opname, args[names.index("kernel")]))
        return func(*args, **(kwargs or {}))


def numbers(form, kernels, dtype):
    model = GPT(gpt(**{**SIZES, **FORMS[form]}), kernels=kernels, dtype=dtype)
    drawn = GPT(model.config, dtype=torch.float64, seed=3)
    with torch.no_grad():
        for param, value in zip(model.parameters(), drawn.parameters(), strict=True):
            param.copy_(value.float())
    tokens = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(4))
    with Ran() as ran:
        ids = torch.arange(1)
        loss = model(tokens[:, :-1], labels=tokens[:, 1:], sample_ids=ids)["lm"]
        loss.backward()
    grads = [param.grad.double().flatten() for param in model.parameters()]
    return torch.cat([loss.detach().double()[None], *grads]), sorted(ran.found)


def main():
    told = {}
    for form in FORMS:
        exact, _ = numbers(form, "reference", torch.float64)
        plain, _ = numbers(form, "reference", torch.float32)
        fused, ran = numbers(form, "fused", torch.float32)
        errors = [float((x - exact).norm() / exact.norm()) for x in (plain, fused)]
        told[form] = {"plain": errors[0], "fused": errors[1], "ran": ran}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
