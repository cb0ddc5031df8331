"""What each kernel can compute, what it says of the rest, and how it is called."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from mt_context_parallel import AttentionDropout, ReferenceKernel, Tile, context_parallel_attention
from mt_context_parallel.attention import default_kernels
from mt_context_parallel.flex import FlexKernel
from mt_context_parallel.kernels import CudnnKernel, FlashKernel, SdpaCpuKernel
from mt_context_parallel.splits import Segment
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize(
    ("kernel", "groups"), [(FlashKernel, 4), (FlashKernel, 2), (CudnnKernel, 4), (CudnnKernel, 2)]
)
def test_the_calls_of_a_cuda_kernel_fit_the_operators_of_this_torch(
    kernel, groups, monkeypatch
) -> None:
    # Shapes and types alone, on the meta device; the values are tested on a GPU.
    monkeypatch.setattr(kernel, "obstacle", lambda *_: None)
    qkv = [
        torch.empty(2, 64, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (4, groups, groups)
    ]
    out = context_parallel_attention(*qkv, group=None, kernels=(kernel(),))
    out.sum().backward()
    assert out.shape == qkv[0].shape
    assert [x.grad.shape for x in qkv] == [x.shape for x in qkv]


REASONS = [
    # kernel, head_dim, key heads, dtype, options of the mask, part of the reason
    (FlashKernel(), 64, 4, torch.bfloat16, {}, None),
    (FlashKernel(), 64, 4, torch.float32, {}, "dtype torch.float32"),
    (FlashKernel(), 60, 4, torch.bfloat16, {}, "head_dim 60, not a multiple of 8 up to 256"),
    (FlashKernel(), 64, 4, torch.bfloat16, {"window": 3}, "a window of 3"),
    (FlashKernel(), 64, 4, torch.bfloat16, {"gpu": (8, 0)}, None),
    (FlashKernel(), 64, 4, torch.bfloat16, {"gpu": (7, 5)}, "compute capability (7, 5), below 8.0"),
    (
        FlashKernel(),
        64,
        4,
        torch.bfloat16,
        {"flash": False},
        "a torch built without flash attention",
    ),
    (FlashKernel(), 224, 4, torch.bfloat16, {}, None),
    (FlashKernel(), 192, 4, torch.bfloat16, {"gpu": (8, 9)}, None),
    (FlashKernel(), 256, 4, torch.bfloat16, {"gpu": (8, 9)}, None),
    *[
        (
            *(FlashKernel(), width, 4, torch.float16, {"gpu": gpu}),
            f"head_dim {width} in backward on compute capability {gpu}",
        )
        for width, gpu in [(200, (8, 6)), (224, (8, 9)), (224, (12, 0))]
    ],
    (CudnnKernel(), 64, 4, torch.bfloat16, {"gpu": (7, 5)}, "compute capability (7, 5), below 8.0"),
    (CudnnKernel(), 64, 2, torch.bfloat16, {}, None),
    (CudnnKernel(), 136, 4, torch.bfloat16, {}, "head_dim 136, not a multiple of 8 up to 128"),
    (CudnnKernel(), 64, 4, torch.float32, {}, "dtype torch.float32"),
    (FlexKernel(), 64, 2, torch.bfloat16, {"window": 3}, None),
    (FlexKernel(), 64, 2, torch.float64, {}, "dtype torch.float64"),
    (FlexKernel(), 8, 2, torch.bfloat16, {}, "head_dim 8, below 16"),
    (FlexKernel(), 64, 2, torch.bfloat16, {"dropout": 0.1}, "dropout by global index"),
    (SdpaCpuKernel(), 64, 2, torch.bfloat16, {}, "device cuda"),
    (ReferenceKernel(), 8, 2, torch.float64, {"dropout": 0.1, "window": 2}, None),
]


@pytest.mark.parametrize(("kernel", "width", "groups", "dtype", "options", "reason"), REASONS)
def test_a_kernel_says_why_it_cannot(
    kernel, width, groups, dtype, options, reason, monkeypatch
) -> None:
    gpu, flash = options.get("gpu", (9, 0)), options.get("flash", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    run = Segment(0, 8, 0, 0)
    dropout = None
    if "dropout" in options:
        dropout = AttentionDropout(probability=0.1, key=1, sample_ids=torch.arange(1))
    tile = Tile(
        q=run, kv=run, causal=True, window=options.get("window"), documents=None, length=8,
        dropout=dropout, scale=1.0,
    )  # fmt: skip
    with FakeTensorMode():
        q = torch.empty(1, 8, 4, width, dtype=dtype, device="cuda")
        k = torch.empty(1, 8, groups, width, dtype=dtype, device="cuda")
        assert kernel.obstacle(q, k, k, tile) == reason


def test_flex_is_compiled_for_every_size_however_many(ranks) -> None:
    def body() -> tuple[int, int]:
        graphs, calls = [], []

        def recording(graph, _):
            graphs.append(graph)
            return lambda *inputs: calls.append(graph) or graph(*inputs)

        kernel = FlexKernel()
        kernel._backend = recording
        for length in (2, 3, 4, 5, 2, 3, 4, 5):
            q, k, v = (torch.randn(1, length, heads, 8) for heads in (2, 1, 1))
            run = Segment(0, length, 0, 0)
            tile = Tile(
                q=run, kv=run, causal=True, window=None, documents=None, length=length,
                dropout=None, scale=0.3,
            )  # fmt: skip
            found = kernel.forward(q, k, v, tile)
            for ours, plain in zip(found, ReferenceKernel().forward(q, k, v, tile), strict=True):
                torch.testing.assert_close(ours, plain)
        return len(graphs), len(calls)

    def limited() -> tuple[int, int]:
        # As after the 8 sizes that torch compiles by default: what it compiles no more it runs as
        # it is, with no more than a warning.
        from torch._dynamo import config

        with config.patch(recompile_limit=2):
            return body()

    assert ranks(1, limited) == [(4, 8)]


@pytest.mark.parametrize(
    ("gpu", "cudnn", "first"),
    [
        (None, 92000, "flash"),
        ((8, 0), 92000, "flash"),
        ((9, 0), 91500, "flash"),
        ((9, 0), 91501, "cudnn"),
        ((10, 0), 92000, "cudnn"),
        ((12, 0), 92000, "flash"),
    ],
)
def test_fused_kernels_come_first_in_torchs_order(gpu, cudnn, first, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    device = torch.device("cpu" if gpu is None else "cuda")
    names = [kernel.name for kernel in default_kernels(device)]
    second = "cudnn" if first == "flash" else "flash"
    assert names == [first, second, "flex", "sdpa-cpu", "reference"]


OPERATORS = {
    # name: (device, the arguments that the calls here rely on, in order)
    "_scaled_dot_product_flash_attention_for_cpu": (
        "CPU", "query key value dropout_p is_causal attn_mask scale"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "CPU",
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    ),
    "_flash_attention_forward": (
        "CUDA",
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask "
        "scale",
    ),
    "_flash_attention_backward": (
        "CUDA",
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal rng_state unused scale",
    ),
    "_scaled_dot_product_cudnn_attention": (
        "CUDA",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "CUDA",
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q "
        "cum_seq_k max_q max_k dropout_p is_causal scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_this_torch_has_the_operators_that_are_called(name: str) -> None:
    device, arguments = OPERATORS[name]
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments][: len(arguments.split())] == (
        arguments.split()
    )
    if device == "CUDA" and torch.version.cuda is None:
        pytest.skip("this torch has no CUDA kernels")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device)


def test_every_operator_that_is_called_is_in_the_table() -> None:
    source = Path(inspect.getfile(ReferenceKernel)).parent
    text = "".join(path.read_text() for path in source.glob("*.py"))
    assert set(re.findall(r"torch\.ops\.aten\.(\w+)", text)) == {*OPERATORS}


def test_torchs_layout_is_recognised_where_shapes_tell() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)  # [B, heads, S, head_dim]
    with pytest.raises(ValueError, match=r"look like \[B, heads, S, head_dim\], the layout of to"):
        context_parallel_attention(q, k, k, group=None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, k))
    assert context_parallel_attention(q, k, v, group=None).shape == (1, 6, 4, 8)
