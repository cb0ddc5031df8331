"""The adapter of Transformer Engine, against a stand-in for what it documents, and itself."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mt_fp8 import QTensor, Scaling, matmul, quantize
from mt_fp8 import transformer_engine as adapter
from torch import Tensor

INSTALLED = importlib.util.find_spec("transformer_engine") is not None
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LINES, SQUARES = (Scaling(block=block, scale="pow2") for block in ((1, 128), (128, 128)))
MX = Scaling(block=(1, 32), scale="e8m0")
FP4, FP4_SQUARES = (
    Scaling(format="e2m1", block=block, scale="nvfp4") for block in ((1, 16), (16, 16))
)
PAIRS = {
    "tensor": (Scaling(), Scaling()),
    "tensor e5m2": (Scaling(format="e5m2"), Scaling()),
    "lines squares": (LINES, SQUARES),
    "squares lines": (SQUARES, LINES),
    "lines": (LINES, LINES),
    "mxfp8": (MX, MX),
    "nvfp4": (FP4, FP4_SQUARES),
}
CAPABILITIES = {"mxfp8": (10, 0), "nvfp4": (10, 0)}


class DType(Enum):
    kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = range(3)  # noqa: N815 - their names


FLOATS = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def storage(name: str, *fields: str) -> type:
    """A class of Transformer Engine: it takes these by name, and no others."""

    def init(self, *, fake_dtype: torch.dtype, **given: object) -> None:
        assert sorted(given) == sorted(fields), name
        self.__dict__ |= given | {"fake_dtype": fake_dtype}

    return type(name, (), {"__init__": init})


BOTH = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
STORAGES = [
    storage("Float8TensorStorage", "data", "fp8_scale_inv", "fp8_dtype"),
    storage("Float8BlockwiseQTensorStorage", *BOTH, "fp8_dtype", "quantizer", "is_2D_scaled"),
    storage("MXFP8TensorStorage", *BOTH, "fp8_dtype", "quantizer", "with_gemm_swizzled_scales"),
    storage(
        *("NVFP4TensorStorage", *BOTH, "amax_rowwise", "amax_columnwise", "fp4_dtype"),
        *("quantizer", "with_gemm_swizzled_scales"),
    ),
]


def decoded(x) -> Tensor:
    """What the bytes of a storage stand for, as Transformer Engine documents them."""
    if hasattr(x, "data"):
        assert x.fp8_scale_inv.shape == (1,)
        return x.data.view(FLOATS[x.fp8_dtype]).float() * x.fp8_scale_inv
    data, scales = x.rowwise_data, x.rowwise_scale_inv
    rows = len(data)
    if hasattr(x, "fp4_dtype"):
        assert not x.with_gemm_swizzled_scales
        codes = torch.stack((data & 15, data >> 4), -1).flatten(1).long()
        values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        assert (scales.shape[0] % 128, scales.shape[1] % 4) == (0, 0)
        steps = scales.view(torch.float8_e4m3fn).float()[:rows, : values.shape[1] // 16]
        steps = steps * (x.amax_rowwise / (448 * 6))
        return values * steps.repeat_interleave(16, 1)
    values = data.view(FLOATS[x.fp8_dtype]).float()
    columns = values.shape[1]
    if scales.dtype == torch.uint8:
        assert not x.with_gemm_swizzled_scales
        assert (scales.shape[0] % 128, scales.shape[1] % 4) == (0, 0)
        steps = torch.exp2(scales.float() - 127)[:rows, : columns // 32]
        return values * steps.repeat_interleave(32, 1)
    assert scales.shape[1] % 4 == 0
    if x.is_2D_scaled:
        steps = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        return values * steps[:, :columns]
    return values * scales[:, :rows].t().repeat_interleave(128, 1)[:, :columns]


@pytest.fixture
def engine(monkeypatch):
    """Stands in for the package, and counts its products."""
    calls = []

    def general_gemm(
        a, b, *, out_dtype: torch.dtype, bias: Tensor | None, use_split_accumulator: bool
    ):
        calls.append((type(a).__name__, type(b).__name__))
        assert use_split_accumulator
        assert bias is None or bias.dtype == out_dtype
        y = decoded(b) @ decoded(a).t()
        return (y if bias is None else y + bias.float()).to(out_dtype), None, None, None

    names = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {kind.__name__: kind for kind in STORAGES},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        "transformer_engine_torch": {"DType": DType},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    adapter._package_obstacle.cache_clear()
    yield SimpleNamespace(calls=calls)
    adapter._package_obstacle.cache_clear()


def drawn(pair: str, rows: int, columns: int) -> tuple[QTensor, QTensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, columns, generator=generator) for n in (rows, 72))
    return tuple(quantize(x, how) for x, how in zip((a, b), PAIRS[pair], strict=True))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(8, 32), (40, 160), (256, 384)])
@pytest.mark.parametrize("pair", PAIRS)
def test_products_are_of_the_codes_and_scales_that_are_there(
    pair, rows, columns, dtype, with_bias, engine
) -> None:
    a, b = drawn(pair, rows, columns)
    bias = torch.arange(72.0) if with_bias else None
    found = adapter.engine_matmul(a, b, bias, dtype)
    expected = matmul(a, b, bias=bias, out_dtype=dtype, kernel="emulation")
    assert found.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-3)
    assert len(engine.calls) == 1


@pytest.mark.parametrize("pair", PAIRS)
def test_it_serves_where_the_chip_has_the_product(pair, engine, monkeypatch) -> None:
    a, b = drawn(pair, 16, 256)
    kinds = adapter._kind(a), adapter._kind(b)
    own = CAPABILITIES.get(pair, (9, 0))
    for capability in ((8, 0), own, (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        found = adapter._device_obstacle(torch.device("cuda"), kinds)
        serves = capability == own or (capability == (12, 0) and "lines" not in pair)
        assert (found is None) == serves
        assert serves or "compute capability" in found


def test_what_it_does_not_serve_is_said(engine) -> None:
    def why(a: Tensor, how: Scaling, b: Tensor | None = None, other: Scaling | None = None) -> str:
        left, right = quantize(a, how), quantize(a if b is None else b, other or how)
        return adapter.engine_obstacle(left, right, None, torch.bfloat16) or ""

    x = torch.randn(16, 32)
    assert "it is for CUDA, and the tensor on cpu" in why(x, Scaling())
    assert "scales of row and row, which it has no product for" in why(x, Scaling(block="row"))
    assert "e5m2 x e5m2" in why(x, Scaling(format="e5m2"))
    assert "it takes multiples of 8 rows and 16 columns" in why(x[:15], Scaling())
    assert "multiples of 8 rows and 32 columns" in why(torch.randn(16, 48), FP4)
    rotated = Scaling(format="e2m1", block=(1, 16), scale="nvfp4", hadamard=True)
    assert why(x, rotated, x, FP4) == "one operand is rotated"
    with pytest.raises(ValueError, match=r"'te' .* it is for CUDA"):
        matmul(quantize(x, MX), quantize(x, MX), kernel="te")


def test_a_package_that_is_missing_old_or_broken_is_said(monkeypatch, engine) -> None:
    def why() -> str | None:
        adapter._package_obstacle.cache_clear()
        return adapter._package_obstacle()

    assert why() is None
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "MXFP8TensorStorage")
    assert why() == "Transformer Engine is too old: pip install -U 'transformer-engine[pytorch]'"
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert "Transformer Engine can't be imported" in why()
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    assert why() == "Transformer Engine is not installed: pip install 'transformer-engine[pytorch]'"


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="transformer-engine is not installed")
@pytest.mark.parametrize("pair", PAIRS)
def test_the_package_itself_has_the_products_of_the_definition(pair) -> None:
    a, b = (
        QTensor(
            data=x.data.cuda(), scales=x.scales.cuda(), scaling=x.scaling, dtype=torch.bfloat16,
            shape=x.shape, global_scale=None if x.global_scale is None else x.global_scale.cuda(),
        )
        for x in drawn(pair, 256, 512)
    )  # fmt: skip
    if (obstacle := adapter.engine_obstacle(a, b, None, torch.bfloat16)) is not None:
        pytest.skip(obstacle)
    expected = matmul(a, b, kernel="emulation")
    torch.testing.assert_close(matmul(a, b, kernel="te"), expected, rtol=2**-7, atol=1e-2)
