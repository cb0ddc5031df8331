"""Split attention against one whole sequence in fp64, by autograd over a dense score matrix."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import (
    AttentionDropout,
    AttentionMask,
    HierarchicalGroups,
    ReferenceKernel,
    context_parallel_attention,
    shard,
    unshard,
)
from mt_context_parallel.flex import FlexKernel
from mt_parallel_state import hash_key, random_uniform
from mt_testing import sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BATCH, DIM = 2, 8
KEY = hash_key("test", "dropout")
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention, whatever it is split over."""

    heads: int = 4
    groups: int = 4
    causal: bool = True
    window: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    documents: bool = False
    sinks: bool = False
    bias: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    length: int = 32
    dtype: torch.dtype = torch.float64

    def draw(self) -> dict[str, Tensor]:
        """Whole q, k, v, the output's gradient, sinks, and a bias by distance."""
        g = torch.Generator().manual_seed(11)
        shape = (BATCH, self.length, self.heads, DIM)
        narrow = (BATCH, self.length, self.groups, DIM)
        drawn = {
            "q": torch.randn(shape, generator=g, dtype=torch.float64),
            "k": torch.randn(narrow, generator=g, dtype=torch.float64),
            "v": torch.randn(narrow, generator=g, dtype=torch.float64),
            "dout": torch.randn(shape, generator=g, dtype=torch.float64),
            "sinks": torch.randn(self.heads, generator=g, dtype=torch.float64),
            "bias": torch.randn(self.heads, 2 * self.length - 1, generator=g, dtype=torch.float64),
        }
        return {name: x.to(self.dtype) for name, x in drawn.items()}

    def document_ids(self) -> Tensor:
        """[B, S]: other bounds in each sample, not multiples of anything."""
        position = torch.arange(self.length)
        return torch.stack([(position >= 5).long() + (position >= 17), (position >= 9).long()])

    def allowed(self) -> Tensor:
        """[B, 1, S, S], by definition."""
        position = torch.arange(self.length)
        distance = position[:, None] - position
        ok = torch.ones(BATCH, 1, self.length, self.length, dtype=torch.bool)
        if self.causal:
            ok &= distance >= 0
        if self.window is not None:
            ok &= distance.abs() < self.window
        if self.cu_seqlens is not None:
            ids = torch.bucketize(position, torch.tensor(self.cu_seqlens[1:]), right=True)
            ok &= ids[:, None] == ids
        if self.documents:
            ids = self.document_ids()
            ok &= (ids[:, :, None] == ids[:, None, :])[:, None]
        return ok


def dense(case: Case) -> dict[str, Tensor]:
    """Output and gradients of the whole, in fp64 from the case's rounded inputs."""
    whole = {name: x.double().requires_grad_() for name, x in case.draw().items()}
    q = whole["q"].transpose(1, 2)
    k, v = (
        whole[n].repeat_interleave(case.heads // case.groups, dim=2).transpose(1, 2)
        for n in ("k", "v")
    )
    scores = (q @ k.transpose(-1, -2)) * DIM**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.bias:
        rows = [whole["bias"][:, i : i + case.length].flip(1) for i in range(case.length)]
        scores = scores + torch.stack(rows, dim=1)
    scores = scores.masked_fill(~case.allowed(), -torch.inf)
    if case.sinks:
        sinks = whole["sinks"][None, :, None, None].expand(BATCH, -1, case.length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : case.length]
    if case.dropout:
        n, heads = case.length, case.heads
        index = torch.arange(BATCH * heads * n * n).view(BATCH, heads, n, n) + 7 * heads * n * n
        weights = weights * (random_uniform(KEY, index) >= case.dropout) / (1 - case.dropout)
    out = (weights @ v).transpose(1, 2)
    out.backward(whole["dout"].detach())
    grads = {f"d{n}": whole[n].grad for n in ("q", "k", "v")}
    if case.sinks:
        grads["dsinks"] = whole["sinks"].grad
    if case.bias:
        grads["dbias"] = whole["bias"].grad
    return {"out": out.detach(), **grads}


ALGORITHMS = ("ring", "all_gather", "ulysses", "hierarchical")


def split_run(case: Case, algorithm: str, **options) -> dict[str, Tensor]:
    """The same over the world's ranks, put back together; sinks' and bias's gradients summed."""
    group, whole = dist.group.WORLD, case.draw()
    kind = {"split": options.pop("split", "zigzag"), "cu_seqlens": case.cu_seqlens}
    local = {n: shard(whole[n], group, **kind) for n in ("q", "k", "v", "dout")}
    for name in ("q", "k", "v"):
        local[name] = local[name].clone().requires_grad_()
    sinks = whole["sinks"].requires_grad_() if case.sinks else None
    bias = whole["bias"].requires_grad_() if case.bias else None
    groups = group
    if algorithm == "hierarchical":
        inner_size = options.pop("inner_size", max(1, group.size() // 2))
        groups = HierarchicalGroups.create(group, inner_size=inner_size)
    dropout = AttentionDropout(
        probability=case.dropout, key=KEY, sample_ids=torch.arange(BATCH) + 7
    )
    out = context_parallel_attention(
        *(local[n] for n in ("q", "k", "v")),
        group=groups,
        algorithm=algorithm,
        mask=AttentionMask(
            causal=case.causal,
            window=case.window,
            documents=case.document_ids() if case.documents else None,
        ),
        sinks=sinks,
        bias=bias,
        softcap=case.softcap,
        dropout=dropout if case.dropout else None,
        **kind,
        **options,
    )
    out.backward(local["dout"])
    parts = {"out": out.detach(), **{f"d{n}": local[n].grad for n in ("q", "k", "v")}}
    result = {name: unshard(x, group, **kind) for name, x in parts.items()}
    for name, x in (("dsinks", sinks), ("dbias", bias)):
        if x is not None:
            dist.all_reduce(x.grad, group=group)
            result[name] = x.grad
    return result


def worst(case: Case, result: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    expected = dense(case)
    assert set(result) == set(expected)
    return max(
        float((result[n].double() - expected[n]).abs().max() / expected[n].abs().max())
        for n in expected
    )


MASKS = [
    Case(),
    Case(causal=False),
    Case(groups=2, window=5),
    Case(groups=1, causal=False, window=3),
    Case(cu_seqlens=(0, 8, 32)),
    Case(cu_seqlens=(0, 16, 24, 32), groups=2, window=6, sinks=True),
    Case(documents=True, sinks=True),
    Case(dropout=0.3, groups=2),
    Case(dropout=0.3, documents=True, window=9, sinks=True, groups=2),
    Case(bias=True, causal=False, groups=2),
    Case(bias=True, dropout=0.3, documents=True, window=9, sinks=True, softcap=1.5, groups=2),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 4])
def test_split_attention_is_the_attention_of_the_whole_sequence(ranks, world, algorithm) -> None:
    def body() -> list[dict[str, Tensor]]:
        return [split_run(case, algorithm) for case in MASKS]

    for case, result in zip(MASKS, ranks(world, body)[0], strict=True):
        assert worst(case, result) < 1e-10, case


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bf16_is_exact_to_its_rounding(ranks, algorithm) -> None:
    cases = [replace(case, dtype=torch.bfloat16) for case in MASKS]

    def body() -> list[dict[str, Tensor]]:
        return [split_run(case, algorithm) for case in cases]

    for case, result in zip(cases, ranks(4, body)[0], strict=True):
        assert worst(case, result) < BOUNDS[torch.bfloat16], case


def attend_own(x: Tensor) -> Tensor:
    """Ring attention of a whole [1, S, 4, 8] tensor to itself, of this rank's tokens."""
    own = shard(x, dist.group.WORLD)
    return context_parallel_attention(own, own.sin(), own.cos(), group=dist.group.WORLD)


def out_and_grad(attend) -> tuple[Tensor, Tensor]:
    """Return the output, and the input's gradient of a function summed over all ranks."""
    whole = Case().draw()["q"].requires_grad_()
    out = attend(whole)
    out.sin().sum().backward()
    return out.detach(), whole.grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(ranks, mode) -> None:
    def body() -> bool:
        with mode():
            out = attend_own(Case().draw()["q"])
        return torch.equal(out, out_and_grad(attend_own)[0]) and not out.requires_grad

    assert ranks(2, body) == [True, True]


def test_activation_checkpointing_changes_nothing(ranks) -> None:
    def body() -> list[bool]:
        pairs = zip(
            out_and_grad(lambda x: checkpoint(attend_own, x, use_reentrant=False)),
            out_and_grad(attend_own),
            strict=True,
        )
        return [torch.equal(ours, plain) for ours, plain in pairs]

    assert ranks(2, body) == [[True, True]] * 2


def test_a_compiled_function_around_it_is_the_same(ranks) -> None:
    def body() -> list[bool]:
        compiled = torch.compile(lambda x: attend_own(x * 1.5) + 1, backend="eager")
        found = out_and_grad(compiled)
        expected = out_and_grad(lambda x: attend_own(x * 1.5) + 1)
        return [
            torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True)
        ]

    assert ranks(2, body) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("world", "algorithm"),
    sample(itertools.product((3, 5, 6, 8), ("ring", "all_gather", "ulysses")), every=5),
)
def test_any_number_of_ranks_will_do(ranks, world, algorithm) -> None:
    cases = [replace(case, length=8 * world) for case in MASKS[:4]]
    if algorithm == "ulysses":  # as many key heads as ranks, and one
        cases = [replace(case, heads=2 * world, groups=world) for case in cases[:3]] + [
            replace(cases[3], heads=world)
        ]

    def body() -> list[dict[str, Tensor]]:
        return [
            split_run(case, algorithm, split=split)
            for case in cases
            for split in ("zigzag", "contiguous")
        ]

    for index, result in enumerate(ranks(world, body)[0]):
        assert worst(cases[index // 2], result) < 1e-10, cases[index // 2]


@pytest.mark.parametrize("inner", [2, 4])
def test_both_levels_of_eight_ranks(ranks, inner) -> None:
    case = Case(groups=2, window=9, length=64)

    def body() -> dict[str, Tensor]:
        return split_run(case, "hierarchical", inner_size=inner)

    assert worst(case, ranks(8, body)[0]) < 1e-10


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_one_rank_is_the_attention_of_the_whole_sequence(case) -> None:
    whole = case.draw()
    q, k, v = (whole[n].requires_grad_() for n in ("q", "k", "v"))
    sinks = whole["sinks"].requires_grad_() if case.sinks else None
    bias = whole["bias"].requires_grad_() if case.bias else None
    dropout = AttentionDropout(
        probability=case.dropout, key=KEY, sample_ids=torch.arange(BATCH) + 7
    )
    documents = case.document_ids() if case.documents else None
    out = context_parallel_attention(
        *(q, k, v),
        group=None,
        mask=AttentionMask(causal=case.causal, window=case.window, documents=documents),
        cu_seqlens=case.cu_seqlens,
        sinks=sinks,
        bias=bias,
        softcap=case.softcap,
        dropout=dropout if case.dropout else None,
        kernels=(ReferenceKernel(block=7),),
    )
    out.backward(whole["dout"])
    result = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sinks is not None:
        result["dsinks"] = sinks.grad
    if bias is not None:
        result["dbias"] = bias.grad
    assert worst(case, result) < 1e-10


@pytest.mark.parametrize("strided", ["q", "k", "v", "dout"])
def test_heads_with_other_strides_are_read_right(strided: str) -> None:
    case = Case(groups=2)
    whole = case.draw()
    moved = whole[strided].movedim(-1, 0).contiguous().movedim(0, -1)
    assert moved.stride(-1) != 1
    whole[strided] = moved
    q, k, v = (whole[n].requires_grad_() for n in ("q", "k", "v"))
    out = context_parallel_attention(q, k, v, group=None)
    out.backward(whole["dout"])
    assert worst(case, {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}) < 1e-10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("world", "case"),
    sample(
        ((n, case) for n in (1, 3) for case in MASKS if not (case.dropout or case.bias)), every=3
    ),
)
def test_flex_computes_every_tile(ranks, case, world) -> None:
    """Its unfused form; windows, documents and tiles of other queries than keys in the ring."""
    case = replace(case, length=48, cu_seqlens=case.cu_seqlens and (0, 12, 48))

    def body() -> dict[str, Tensor]:
        # torch refuses flex's backward on a CPU, though its unfused form has one.
        with patch("torch.nn.attention.flex_attention._validate_device"):
            return split_run(case, "ring", kernels=(FlexKernel(block=10, fused=False),))

    assert worst(case, ranks(world, body)[0]) < 1e-10


GRID = [
    (world, algorithm, split, replace(MASKS[0], **dict(zip(names, values, strict=True))))
    for world in (1, 2, 4)
    for algorithm in ALGORITHMS
    for split in ("zigzag", "contiguous")
    for names in [("groups", "causal", "window", "cu_seqlens", "sinks", "dropout", "dtype")]
    for values in itertools.product(
        (1, 2, 4),
        (True, False),
        (None, 6),
        (None, (0, 8, 32)),
        (False, True),
        (0.0, 0.3),
        (torch.float64, torch.float32),
    )
]


def _check_cells(ranks, cells) -> None:
    for world in (1, 2, 4):
        here = [cell for cell in cells if cell[0] == world]

        def body(here=here) -> list[dict[str, Tensor]]:
            return [split_run(case, name, split=split) for _, name, split, case in here]

        results = ranks(world, body)[0] if here else []
        for cell, result in zip(here, results, strict=True):
            assert worst(cell[3], result) < BOUNDS[cell[3].dtype], cell


def test_a_sample_of_the_grid_agrees_with_one_rank(ranks) -> None:
    _check_cells(ranks, random.Random(20).sample(GRID, 60))


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(24))
def test_the_whole_grid_agrees_with_one_rank(ranks, part) -> None:
    _check_cells(ranks, GRID[part::24])
