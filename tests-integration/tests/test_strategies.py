"""A strategy that quantises, in every layer of a model on two tensor and two pipeline ranks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from mt_model import GPT, gpt
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    all_gather,
    gather_from_group,
    sharding_of,
)
from mt_pipeline import Executor, TensorSpec, make_schedule
from mt_schedule import split_layers
from mt_tensor_parallel import Gemm, TorchGemm, choose_gemms
from torch import nn

F64, BLOCK, MICROBATCHES = torch.float64, 16, 3
CONFIG = gpt(
    vocab_size=64,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=64,
    max_sequence_length=16,
    tied=False,
)


class Int8(NamedTuple):
    """Blocks of 16 along the last dim, with a power of two each."""

    values: torch.Tensor
    exponents: torch.Tensor

    def whole(self) -> torch.Tensor:
        blocks = self.values.unflatten(-1, (-1, BLOCK)).to(F64)
        return torch.ldexp(blocks, self.exponents.unsqueeze(-1).int()).flatten(-2)


class Int8Gemm(Gemm, nn.Module):
    """Multiplies what int8 keeps of fp64 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.roles = Counter()
        self.weight = None

    def operand(self, x, role):
        key = (x.data_ptr(), x._version)
        if role == "weight" and self.weight is not None and self.weight[0] == key:
            return self.weight[1]
        self.roles[role] += 1
        blocks = x.detach().unflatten(-1, (-1, BLOCK))
        exponents = torch.frexp(blocks.abs().amax(-1).clamp(min=2.0**-100)).exponent - 7
        values = torch.ldexp(blocks, -exponents.unsqueeze(-1)).round().clamp(-127, 127)
        made = Int8(values.flatten(-2).to(torch.int8), exponents.to(torch.int8))
        if role == "weight":
            self.weight = key, made
        return made

    def saved(self, operand):
        return tuple(operand)

    def restored(self, tensors, role):
        return Int8(*tensors)

    def gather(self, operand, group):
        whole = Int8(*(all_gather(x, group, dim=1) for x in operand))
        return lambda: whole

    def forward(self, x, weight, bias=None):
        return TorchGemm().forward(x.whole(), weight.whole(), bias)

    def dgrad(self, grad_y, weight):
        return TorchGemm().dgrad(grad_y.whole(), weight.whole())

    def wgrad(self, grad_y, x):
        return TorchGemm().wgrad(grad_y.whole(), x.whole())


def batches():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 64, (MICROBATCHES, 2, 17), generator=generator)
    return [{"tokens": each[:, :-1].clone(), "labels": each[:, 1:].clone()} for each in drawn]


def test_each_tensor_is_quantised_once_on_every_layout(ranks):
    """With sequence parallelism, recomputation, accumulation and split backwards."""

    def body():
        whole = GPT(CONFIG, seed=3, dtype=F64)
        choose_gemms(whole, lambda name: Int8Gemm())
        for batch in batches():
            whole(None, batch)["lm"].backward()
        expected = dict(whole.named_parameters())
        with ParallelState(ParallelLayout(tp=2, pp=2)) as state:
            model = GPT(
                CONFIG,
                state,
                layers=split_layers(CONFIG.num_layers, 2)[state.index("pp")],
                sequence_parallel=True,
                recompute="full",
                seed=3,
                dtype=F64,
            )
            choose_gemms(model, lambda name: Int8Gemm())
            executor = Executor(
                make_schedule("zb-h1", 2, MICROBATCHES),
                model,
                group=state.group("pp"),
                activation=lambda batch: TensorSpec((2, 8, 64), F64),
            )
            executor.run(batches(), objective=lambda output, _: output["lm"])
            checked = 0
            for name, param in model.named_parameters():
                dims = sharding_of(param).spec.dims
                if "layers" not in name or not any(dims):
                    continue
                dim = next(i for i, axes in enumerate(dims) if axes)
                grad = gather_from_group(param.grad, state.group("tp"), dim=dim)
                torch.testing.assert_close(grad, expected[name].grad, rtol=1e-9, atol=1e-11)
                checked += 1
            assert checked == 2 * 4  # of four linear layers in each of this stage's two
            gemms = [layer for layer in model.modules() if isinstance(layer, Int8Gemm)]
            assert len(gemms) == checked
            # A weight once a step, a gradient once a micro-batch, and an input as often as it is
            # made: again in backward.
            for gemm in gemms:
                assert gemm.roles == {
                    "weight": 1,
                    "input": 2 * MICROBATCHES,
                    "grad": MICROBATCHES,
                }

    ranks(4, body, timeout=120)
