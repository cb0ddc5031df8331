"""A strategy that quantises does so once for each tensor, and keeps and sends what it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from mt_fusions import LossOptions
from mt_parallel_state import (
    WgradStore,
    all_gather,
    copy_to_group,
    gather_from_group,
    scatter_to_group,
)
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Gemm,
    RowParallelLinear,
    TorchGemm,
    choose_gemms,
    defer_weight_gradients,
    linear_cross_entropy,
    recompute,
    sum_weight_gradients,
)
from torch import Tensor, nn

BLOCK, HIDDEN, FFN, VOCAB, TOKENS = 16, 32, 64, 64, 8


class Int8(NamedTuple):
    """Blocks of 16 along the last dim, with a power of two each."""

    values: Tensor
    exponents: Tensor
    dtype: torch.dtype

    def whole(self) -> Tensor:
        blocks = self.values.unflatten(-1, (-1, BLOCK)).to(self.dtype)
        scaled = torch.ldexp(blocks, self.exponents.unsqueeze(-1).to(torch.int32))
        return scaled.to(self.dtype).flatten(-2)


class Int8Gemm(Gemm, nn.Module):
    """Multiplies what int8 keeps of the tensors. Its state is a count of what it has quantised."""

    quantised: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("quantised", torch.zeros((), dtype=torch.int64))
        self.roles: Counter[str] = Counter()
        self._weight: tuple[tuple[int, int], Int8] | None = None

    def operand(self, x: Tensor, role: str) -> Int8:
        key = (x.data_ptr(), x._version)
        if role == "weight" and self._weight is not None and self._weight[0] == key:
            return self._weight[1]  # the step's other micro-batches
        self.roles[role] += 1
        self.quantised += 1
        blocks = x.detach().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1).clamp(min=2.0**-100)
        exponents = torch.frexp(largest.double()).exponent - 7
        values = torch.ldexp(blocks.double(), -exponents.unsqueeze(-1)).round().clamp(-127, 127)
        made = Int8(values.flatten(-2).to(torch.int8), exponents.to(torch.int8), x.dtype)
        if role == "weight":
            self._weight = key, made
        return made

    def saved(self, operand: Int8) -> tuple[Tensor, ...]:
        self._dtype = operand.dtype
        return operand[:2]

    def restored(self, tensors: Sequence[Tensor], role: str) -> Int8:
        return Int8(*tensors, self._dtype)

    def gather(self, operand: Int8, group: dist.ProcessGroup) -> Callable[[], Int8]:
        values, exponents = (all_gather(x, group, dim=1) for x in operand[:2])
        return lambda: Int8(values, exponents, operand.dtype)

    def forward(self, x: Int8, weight: Int8, bias: Tensor | None = None) -> Tensor:
        return TorchGemm().forward(x.whole(), weight.whole(), bias)

    def dgrad(self, grad_y: Int8, weight: Int8) -> Tensor:
        return TorchGemm().dgrad(grad_y.whole(), weight.whole())

    def wgrad(self, grad_y: Int8, x: Int8) -> Tensor:
        return TorchGemm().wgrad(grad_y.whole(), x.whole())

    def __repr__(self) -> str:
        return "Int8Gemm()"


class Net(nn.Module):
    """An MLP, head and loss; each layer has a strategy of its own."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        gemm_for: Callable[[str], Gemm],
        *,
        dtype: torch.dtype = torch.float64,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.sequence_parallel = group, sequence_parallel
        options = {"group": group, "dtype": dtype, "sequence_parallel": sequence_parallel}
        self.up = ColumnParallelLinear(HIDDEN, (2, FFN), shard_dim=1, **options)
        self.down = RowParallelLinear(FFN, HIDDEN, **options)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, group=group, dtype=dtype)
        choose_gemms(self, gemm_for)
        self.recompute = False

    def hidden(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).unbind(-2)
        return x + self.down(gate.tanh() * value)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = recompute(self.hidden, x) if self.recompute else self.hidden(x)
        if self.sequence_parallel:
            h = all_gather(h, self.group, dim=1)
        else:
            h = copy_to_group(h, self.group)
        return linear_cross_entropy(
            h,
            self.head.weight,
            labels,
            options=LossOptions(block_size=5),
            group=self.group,
            gemm=self.head.gemm,
        )


def _batches(count: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(2, TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, VOCAB, (2, TOKENS), generator=generator),
        )
        for _ in range(count)
    ]


def _step(net: Net, batches: list[tuple[Tensor, Tensor]], *, sequence_parallel: bool) -> float:
    total = 0.0
    for x, labels in batches:
        own = scatter_to_group(x, net.group, dim=1) if sequence_parallel else x
        loss = net(own.clone().requires_grad_(), labels)
        loss.backward()
        total += loss.item()
    return total


class _Sum:
    def __init__(self, param: Tensor) -> None:
        self.total, self.count = torch.zeros_like(param), 0

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, self.count > 0

    def end(self) -> None:
        self.count += 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_each_tensor_is_quantised_once_and_layouts_agree(ranks, sequence_parallel, again) -> None:
    """Over two micro-batches, with recomputation, and with weight gradients that wait in sinks."""

    def body() -> None:
        group, batches = dist.group.WORLD, _batches(2)
        whole = Net(None, lambda name: Int8Gemm())
        expected = _step(whole, batches, sequence_parallel=False)
        net = Net(group, lambda name: Int8Gemm(), sequence_parallel=sequence_parallel)
        net.recompute = again
        sinks = {net.up.weight: _Sum(net.up.weight), net.down.weight: _Sum(net.down.weight)}
        sum_weight_gradients(net, sinks.get)
        defer_weight_gradients(net, store := WgradStore())
        with store.deferring() as compute:
            loss = _step(net, batches, sequence_parallel=sequence_parallel)
        compute()
        assert loss == pytest.approx(expected, rel=1e-12)
        for layer, dim in ((net.up, 1), (net.down, 1)):
            grad = gather_from_group(sinks[layer.weight].total, group, dim=dim)
            reference = (whole.up if layer is net.up else whole.down).weight.grad
            torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-12)
            # A weight once a step, an input and a gradient once each micro-batch; what is made
            # again in backward is another tensor.
            runs = 4 if again else 2
            assert layer.gemm.roles == {"weight": 1, "input": runs, "grad": 2}
        blocks = 2 * 4  # of 5 tokens, in two micro-batches of 16
        assert net.head.gemm.roles == {"weight": 1, "input": blocks, "grad": blocks}

    ranks(2, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_kept_and_sent_is_half_of_bf16(ranks, sequence_parallel) -> None:
    def body() -> None:
        measured = {}
        gather = dist.all_gather_into_tensor
        for name, make in (("plain", TorchGemm), ("int8", Int8Gemm)):
            net = Net(
                dist.group.WORLD,
                lambda _, make=make: make(),
                dtype=torch.bfloat16,
                sequence_parallel=sequence_parallel,
            )
            weights = {param.data_ptr() for param in net.parameters()}
            kept, sent = [], []

            def pack(x: Tensor, kept=kept, weights=weights, net=net) -> Tensor:
                if x.data_ptr() not in weights and x.dim() == 3:
                    kept.append(x.nbytes)
                return x

            def noted(out, x, sent=sent, **options):
                sent.append(x.nbytes)
                return gather(out, x, **options)

            x, _ = _batches(1, torch.bfloat16)[0]
            own = scatter_to_group(x, net.group, dim=1) if sequence_parallel else x
            dist.all_gather_into_tensor = noted
            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    y = net.up(own.requires_grad_())
                y.sum().backward()
            finally:
                dist.all_gather_into_tensor = gather
            measured[name] = sum(kept), sum(sent)
        kept, sent = (measured["int8"][i] / max(1, measured["plain"][i]) for i in (0, 1))
        assert kept == 17 / 32
        assert sent == (17 / 32 if sequence_parallel else 0)

    ranks(2, body)


def test_a_strategys_state_is_in_the_state_dict_of_its_layer() -> None:
    net, other = (Net(None, lambda name: Int8Gemm()) for _ in range(2))
    _step(net, _batches(1), sequence_parallel=False)
    state = net.state_dict()
    assert {name for name in state if "gemm" in name} == {
        f"{layer}.gemm.quantised" for layer in ("up", "down", "head")
    }
    assert state["up.gemm.quantised"] == 3
    other.load_state_dict(state)
    assert other.up.gemm.quantised == 3


def test_layers_ask_for_their_strategy_by_name() -> None:
    names: list[str] = []
    net = Net(None, lambda name: names.append(name) or TorchGemm())
    assert names == ["up", "down", "head"]
    choose_gemms(net, lambda name: Int8Gemm() if name == "up" else TorchGemm())
    choose_gemms(net, lambda name: Int8Gemm() if name == "down" else TorchGemm())
    assert [type(layer.gemm) for layer in (net.up, net.down)] == [TorchGemm, Int8Gemm]


def test_what_a_strategy_overrides_says_how_much_of_it_is_torchs() -> None:
    class OtherWgrad(TorchGemm):
        def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
            return 2 * super().wgrad(grad_y, x)

    class OtherForward(TorchGemm):
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return 2 * super().forward(x, weight, bias)

    facts = {
        gemm: (gemm.keeps_tensors, gemm.is_torch, gemm.is_autograd)
        for gemm in (TorchGemm(), OtherWgrad(), OtherForward(), Int8Gemm())
    }
    assert list(facts.values()) == [
        (True, True, True),
        (True, True, False),
        (True, False, False),
        (False, False, False),
    ]
    layer = ColumnParallelLinear(2, 2, gemm=OtherWgrad())
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0, 2.0]] * 2  # on one rank too
    with pytest.raises(TypeError, match=r"x is torch\.float32 and the weight torch\.float64"):
        ColumnParallelLinear(2, 2, gemm=OtherWgrad(), dtype=torch.float64)(torch.ones(1, 2))
