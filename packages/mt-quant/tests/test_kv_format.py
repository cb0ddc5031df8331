"""Formats of keys and values: rounding to the nearest code, scales, and refusals."""

import pytest
import torch
from mt_files import FieldError
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import (
    KV_LEAVES,
    CalibrationError,
    KVCalibrator,
    KVFormat,
    KVScheme,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    Rule,
    compressed_state,
    kv_format_of,
    quantize,
    read_kv_scales,
)
from torch import nn

NAMES = ("fp8", "int8", "fp8-head", "int8-head", "fp8-tensor", "int8-tensor")


def drawn(seed=0):
    torch.manual_seed(seed)
    return torch.randn(2, 7, 3, 16) * torch.tensor([1e-3, 1.0, 50.0])[:, None]


def codes_of(kind):
    """All finite values of a code."""
    if kind == "int8":
        return torch.arange(-127, 128).double()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return every[every.isfinite()].unique()


@pytest.mark.parametrize("name", NAMES)
def test_every_value_becomes_the_nearest_code(name):
    format, x = KVFormat.named(name), drawn()
    static = {"head": x.abs().amax((0, 1, 3)), "tensor": x.abs().amax().expand(3)}
    given = static[format.group] / format.limit if format.is_static else None
    codes, scale = format.encode(x, given)
    assert codes.dtype == format.dtype
    assert scale.shape == ((3, 1) if format.is_static else (2, 7, 3, 1))
    known = codes_of(format.type)
    scaled = x.double() / scale.double()
    nearest = (scaled[..., None] - known).abs().amin(-1)
    assert ((codes.double() - scaled).abs() <= nearest + 1e-4 * scaled.abs()).all()
    values = format.decode(codes, scale, torch.float64)
    torch.testing.assert_close(values, codes.double() * scale.double())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_each_head_of_each_token_uses_all_codes(kind):
    format = KVFormat(type=kind)
    codes, _ = format.encode(drawn())
    assert (codes.float().abs().amax(-1) == format.limit).all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_values_beyond_a_static_scale_become_the_largest_code(kind):
    format = KVFormat(type=kind, group="head")
    x = torch.tensor([-9.0, 3.0, torch.inf])[:, None]
    values = format.decode(
        *format.encode(x.view(3, 1, 1), torch.tensor([1 / format.limit])), x.dtype
    )
    torch.testing.assert_close(values.flatten(), torch.tensor([-1.0, 1.0, 1.0]))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_zeros_stay_and_what_is_no_number_shows(kind):
    format = KVFormat(type=kind)
    x = torch.zeros(1, 3, 1, 4)
    x[0, 2, 0, 1] = torch.nan
    values = format.decode(*format.encode(x), x.dtype)
    assert not values[0, :2].any()
    assert values[0, 2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_values_have_the_dtype_that_is_asked_for(name, dtype):
    format, x = KVFormat.named(name), drawn().to(dtype)
    codes, scale = format.encode(x)
    assert scale.dtype == torch.float32
    values = format.decode(codes, scale, dtype)
    assert values.dtype == dtype
    assert ((values - x).abs() <= x.abs().amax(-1, keepdim=True) / 15).all()


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: KVFormat.named("mxfp4"), QuantizationError, "unknown format of keys and values"),
        (lambda: KVFormat.named("fp8-static"), QuantizationError, "Known: fp8, fp8-head"),
        (lambda: KVFormat(type="nvfp4"), FieldError, "type"),
        (lambda: Rule(kv_cache="nvfp4"), FieldError, "kv_cache: unknown format of keys and values"),
        (
            lambda: QuantizationConfig.from_dict({"rules": [{"kv_cache": {"type": "mxfp8"}}]}),
            QuantizationError,
            "kv_cache",
        ),
        (
            lambda: KVFormat.named("fp8-head").encode(drawn()),
            CalibrationError,
            "fp8-head has scales from calibration, and there are none",
        ),
        (
            lambda: KVScheme(format=KVFormat.named("int8-tensor")),
            CalibrationError,
            "int8-tensor has scales from calibration, and there are none",
        ),
        (
            lambda: KVFormat.named("fp8-head").encode(drawn(), torch.ones(2)),
            QuantizationError,
            r"shape \[2\], and \[3\] is needed",
        ),
        (
            lambda: KVFormat.named("fp8").encode(drawn(), torch.ones(3)),
            QuantizationError,
            "makes its own scales",
        ),
    ],
)
def test_what_is_no_format_of_a_cache_is_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


def test_rules_give_modules_formats_by_name_and_by_fields():
    model = nn.ModuleDict({"attention": nn.Identity(), "other": nn.Identity()})
    for given in ("fp8-head", {"type": "fp8", "group": "head"}):
        rules = {"rules": [{"name": "attention", "kv_cache": given}]}
        config = QuantizationConfig.from_dict(rules)
        assert config.decide(model)["attention"].kv_cache == KVFormat(type="fp8", group="head")
        assert QuantizationConfig.from_dict(config.to_dict()) == config


def test_a_rule_for_everything_gives_what_is_no_linear_layer_keys_and_values_alone():
    model = nn.ModuleDict({"attention": nn.Identity(), "linear": nn.Linear(8, 4)})
    config = QuantizationConfig(rules=(Rule(weight="int8", input="int8", kv_cache="fp8"),))
    found = config.decide(model)
    assert found["attention"].weight is None
    assert found["attention"].input is None
    assert found["attention"].kv_cache == KVFormat(type="fp8")
    assert isinstance(quantize(model, config)["linear"], QuantizedLinear)


@pytest.mark.parametrize("name", ["fp8-head", "int8-tensor"])
def test_scales_come_back_from_a_checkpoint(name):
    model = quantize(nn.Sequential(nn.Linear(8, 4)), QuantizationConfig.named("int8"))
    format = KVFormat.named(name)
    calibrator = KVCalibrator()
    calibrator.update("a", drawn(1), drawn(2))
    scheme = KVScheme(format=format, scales=calibrator.scales(format)["a"])
    tensors, config = compressed_state(model, kv_schemes={"attn": scheme})
    stored = {leaf: tensors[f"attn.{leaf}"] for leaf in KV_LEAVES}
    assert kv_format_of(config) == format
    again = read_kv_scales(stored, format, 3)
    assert again.format == format
    assert torch.equal(again.scales.key, scheme.scales.key)
    assert torch.equal(again.scales.value, scheme.scales.value)
    assert len(read_kv_scales(stored, format, 1).scales.key) == 1


def test_a_model_without_a_scheme_has_none_in_a_checkpoint():
    model = quantize(nn.Sequential(nn.Linear(8, 4)), QuantizationConfig.named("int8"))
    assert kv_format_of(compressed_state(model)[1]) is None
    assert kv_format_of({"kv_cache_quant_algo": "FP8"}) == KVFormat.named("fp8-tensor")
    assert kv_format_of({"kv_cache_quant_algo": "NVFP4"}) is None


def test_a_head_of_zeros_leaves_the_scale_of_its_layer_alone():
    keys = drawn(3)
    keys[:, :, 0] = 0
    calibrator = KVCalibrator()
    calibrator.update("a", keys, keys)
    formats = KVFormat.named("int8-head"), KVFormat.named("int8-tensor")
    by_head, by_layer = (calibrator.scales(format)["a"] for format in formats)
    assert by_head.key[0] == 1
    assert torch.equal(by_layer.key, (keys.abs().amax() / 127).expand(3))


BY_LAYER = KVFormat.named("int8-tensor")


def seen_by_a_rank(rank):
    keys = torch.zeros(1, 4, 1, 8) if rank == 0 else drawn(3)[:, :, :1]
    calibrator = KVCalibrator()
    calibrator.update("a", keys, keys)
    return calibrator


def on_rank():
    with ParallelState(ParallelLayout(tp=2)) as state:
        calibrator = seen_by_a_rank(state.index("tp"))
        return calibrator.scales(BY_LAYER, group=state.group("tp"))["a"].key


def test_the_scale_of_a_layer_is_that_of_all_ranks_heads(ranks):
    expected = seen_by_a_rank(1).scales(BY_LAYER)["a"].key
    for found in ranks(2, on_rank):
        assert torch.equal(found, expected)
