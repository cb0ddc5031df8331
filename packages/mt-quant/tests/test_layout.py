"""Checkpoints of other software: each layout is read as its definition says, one code at a time."""

from __future__ import annotations

import json

import pytest
import torch
from mt_quant import (
    Layout,
    QuantizationConfig,
    QuantizationError,
    Rule,
    StoredLinear,
    WeightFormat,
    compressed_state,
    install,
    join_rows,
    quantize,
    quantize_weight,
)
from mt_quant.checkpoints.compressed import describe_compressed, write_compressed
from torch import nn

OUT, IN = 16, 64


def words(codes, order, bits=4):
    """Pack each row of codes: the i-th code of a word is column `order[i]` of its columns."""
    each = 32 // bits
    rows = []
    for row in codes.tolist():
        packed = []
        for start in range(0, len(row), each):
            value = sum(row[start + order[i]] << (bits * i) for i in range(each))
            packed.append(value - (1 << 32) if value >= 1 << 31 else value)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def sample(bits=4, groups=4):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (OUT, IN), generator=generator)
    zeros = torch.randint(1, 1 << bits, (OUT, groups), generator=generator)
    scales = torch.rand(OUT, groups, generator=generator).half() + 0.5
    return codes, zeros, scales


def values(codes, zeros, scales, group):
    """Return what each code stands for, one by one."""
    found = torch.empty(OUT, IN)
    for i in range(OUT):
        for j in range(IN):
            g = int(group[j])
            found[i, j] = (int(codes[i, j]) - int(zeros[i, g])) * float(scales[i, g])
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("version", "less"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_is_read_with_its_zero_points_and_its_order(bits, version, less, ordered):
    codes, zeros, scales = sample(bits)
    group = torch.arange(IN) // 16
    if not ordered:
        group = group[torch.randperm(IN, generator=torch.Generator().manual_seed(1))]
    natural = list(range(32 // bits))
    tensors = {
        "qweight": words(codes, natural, bits).t().contiguous(),
        "qzeros": words(zeros.t() - less, natural, bits),
        "scales": scales.t().contiguous(),
        "g_idx": group.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    layout = Layout.of(config)
    assert layout.shape(tensors) == (OUT, IN)
    read = layout.read("x", tensors)
    assert torch.equal(read.dequantize(), values(codes, zeros, scales, group))
    if ordered:
        assert str(read.take().weight.format) == f"int{bits}-g16-asym"
    else:
        with pytest.raises(QuantizationError, match="g_idx"):
            read.take()


def test_zero_points_in_the_middle_are_a_symmetric_format():
    codes, zeros, scales = sample()
    zeros = torch.full_like(zeros, 8)
    tensors = {
        "qweight": words(codes, range(8)).t().contiguous(),
        "qzeros": words(zeros.t() - 1, range(8)),
        "scales": scales.t().contiguous(),
    }
    read = Layout.of({"quant_method": "gptq", "bits": 4}).read("x", tensors)
    assert str(read.weight.format) == "int4-g16"
    assert torch.equal(read.dequantize(), values(codes, zeros, scales, torch.arange(IN) // 16))


def test_awq_is_read_with_its_order_of_outputs():
    codes, zeros, scales = sample()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.t(), order),
        "qzeros": words(zeros.t(), order),
        "scales": scales.t().contiguous(),
    }
    config = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
    layout = Layout.of(config)
    assert layout.shape(tensors) == (OUT, IN)
    read = layout.read("x", tensors)
    assert torch.equal(read.dequantize(), values(codes, zeros, scales, torch.arange(IN) // 16))


@pytest.mark.parametrize("shape", [(256, 256), (200, 192), (128, 64)])
def test_blocks_of_fp8_are_read_with_their_scales(shape):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    read = Layout.of(config).read("x", {"weight": data, "weight_scale_inv": scale})
    expected = data.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            expected[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] *= scale[i, j]
    assert torch.equal(read.dequantize(), expected)


def test_modelopt_is_read_with_both_of_its_scales():
    weight = quantize_weight(torch.randn(OUT, IN), "nvfp4")
    tensors = {
        "weight": weight.data,
        "weight_scale": weight.scale.view(torch.float8_e4m3fn),
        "weight_scale_2": weight.level.view(()),
    }
    layout = Layout.of({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert layout.shape(tensors) == (OUT, IN)
    assert torch.equal(layout.read("x", tensors).dequantize(), weight.dequantize())
    data = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    scales = {"weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}
    read = Layout.of({"quant_method": "modelopt", "quant_algo": "FP8"}).read(
        "x", {"weight": data, **scales}
    )
    assert torch.equal(read.dequantize(), data.float() / 2)
    assert (str(read.input), read.step.item()) == ("fp8-static", 0.25)


def test_modelopt_is_read_with_a_scale_for_each_box_or_channel_and_by_layer():
    data, boxes = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    layout = Layout.of({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"})
    read = layout.read("x", {"weight": data, "weight_scale": boxes.view(2, 1, 3, 1)})
    steps = boxes.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(read.dequantize(), data.float() * steps)
    layers = {"x": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    layout = Layout.of({"quant_method": "modelopt", "quantization": mixed})
    read = layout.read("x", {"weight": data, "weight_scale": steps[:, 0].contiguous()})
    assert torch.equal(read.dequantize(), data.float() * steps[:, :1])
    assert str(read.input) == "fp8-token"


FORMATS = [
    *("int8", "int8-g32", "int8-channel-asym", "int8-tensor", "int4-g32", "int4-g32-asym"),
    *("fp8", "fp8-tensor", "fp8-g32", "mxfp8", "mxfp4", "nvfp4"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_tensors_come_back_as_the_same_values(name):
    weight = quantize_weight(torch.randn(OUT, IN), name)
    config = describe_compressed({"a.b": (weight.format, None)})
    tensors = write_compressed(StoredLinear(weight=weight), torch.float32)
    layout = Layout.of(config)
    assert layout.shape(tensors) == (OUT, IN)
    assert torch.equal(layout.read("a.b", tensors).dequantize(), weight.dequantize())


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(leaf):
    codes, zeros, scales = sample()
    tensors = {
        "qweight": words(codes, range(8)).t().contiguous(),
        "qzeros": words(zeros.t(), range(8)),
        "scales": scales.t().contiguous(),
    }
    layout = Layout.of({"quant_method": "gptq", "bits": 4})
    if leaf != "qweight":  # whose rows are the inputs, however many there are
        with pytest.raises(QuantizationError, match=r"shape|group"):
            layout.read("x", {**tensors, leaf: tensors[leaf][:1]})
    del tensors[leaf]
    with pytest.raises(QuantizationError, match=f"{leaf} is missing"):
        layout.read("x", tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gtpq"}, "Did you mean gptq"),
        ({}, "quant_method None"),
    ],
)
def test_an_unknown_layout_is_refused(config, message):
    with pytest.raises(QuantizationError, match=message):
        Layout.of(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "use 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8"},
            "NVFP4_AWQ, W8A8_SQ_PER_CHANNEL, FP8_PB_WO",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "quantized_layers does not name it",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
    ],
)
def test_a_setting_that_is_not_read_is_refused(config, message):
    names = ("qweight", "qzeros", "scales", "weight", "weight_scale")
    tensors = dict.fromkeys(names, torch.zeros(16, 16, dtype=torch.int32))
    with pytest.raises(QuantizationError, match=message):
        Layout.of(config).read("x", tensors)


def test_rows_of_parts_with_other_scales_of_the_tensor_keep_their_values():
    weights = [quantize_weight(torch.randn(4, 8) * s, "fp8-tensor") for s in (1, 9)]
    parts = [StoredLinear(weight=weight) for weight in weights]
    rows = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    joined = join_rows(parts, rows)
    expected = torch.cat([part.dequantize() for part in parts])[rows.argsort()]
    assert torch.equal(joined.dequantize(), expected)
    assert joined.weight.format == WeightFormat.named("fp8")


def test_a_module_of_ones_own_is_exported_with_all_that_it_has():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8, bias=False))
    rules = (Rule(name="0", weight="int4-g32"), Rule(name="2", weight="fp8", input="fp8"))
    plain = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(QuantizationError, match="call quantize first"):
        compressed_state(model)
    quantize(model, QuantizationConfig(rules=rules))
    tensors, config = compressed_state(model)
    layout = Layout.of(json.loads(json.dumps(config)))
    for name in ("0", "2"):
        own = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(name)}
        found = layout.read(name, own).dequantize()
        assert torch.equal(found, model.get_submodule(name).quantized_weight.dequantize())
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(tensors[name], plain[name])
    assert {n.partition(".")[0] for n in tensors} == {"0", "1", "2"}


def test_a_layer_of_another_size_is_not_put_in():
    model = nn.Sequential(nn.Linear(8, 4))
    stored = StoredLinear(weight=quantize_weight(torch.randn(4, 16), "int8"))
    with pytest.raises(QuantizationError, match=r"0: its weight is \(4, 16\)"):
        install(model, {"0": stored})
    assert type(model[0]) is nn.Linear


def compressed(name):
    weight = quantize_weight(torch.randn(OUT, IN), name)
    config = describe_compressed({"x": (weight.format, None)})
    tensors = write_compressed(StoredLinear(weight=weight), torch.float32)
    return config, config["config_groups"]["group_0"]["weights"], tensors


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "channel", "group_size": None},
        {"strategy": "tensor", "group_size": None},
        {"strategy": "group", "group_size": 8},
        {"strategy": "group", "group_size": 7},
        {"strategy": "group", "group_size": None},
        {"strategy": "token"},
    ],
)
def test_scales_of_another_shape_than_the_scheme_s_are_refused(name, change):
    config, weights, tensors = compressed(name)
    if weights["strategy"] == change["strategy"] and weights["group_size"] is None:
        return  # it is the scheme's own
    weights |= change
    with pytest.raises(QuantizationError, match=r"strategy|group_size"):
        Layout.of(config).read("x", tensors)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 0.0])
def test_scales_that_no_writer_makes_are_refused(name, value):
    config, _, tensors = compressed(name)
    scale = tensors["weight_scale"]
    if scale.dtype == torch.uint8 or (value == 0 and not name.startswith("int")):
        return  # a scale of 8 bits is a power of 2; a float weight may be all zeros
    scale.view(-1)[0] = torch.tensor(value).to(scale.dtype)
    if not scale.view(-1)[:1].float().equal(torch.tensor([value])) and value == value:
        return  # e4m3 has no infinity
    with pytest.raises(QuantizationError, match="scale"):
        Layout.of(config).read("x", tensors)


@pytest.mark.parametrize(("method", "size"), [("gptq", 32), ("gptq", -1), ("awq", 8), ("awq", 0)])
def test_a_group_size_that_the_scales_don_t_have_is_refused(method, size):
    codes, zeros, scales = sample()  # in groups of 16
    order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else range(8)
    rows = codes.t() if method == "awq" else codes
    tensors = {
        "qweight": words(rows, order) if method == "awq" else words(rows, order).t().contiguous(),
        "qzeros": words(zeros.t(), order),
        "scales": scales.t().contiguous(),
    }
    config = {"quant_method": method, "bits": 4, "group_size": 16}
    assert Layout.of(config).read("x", tensors).weight.shape == (OUT, IN)
    with pytest.raises(QuantizationError, match="group_size"):
        Layout.of(config | {"group_size": size}).read("x", tensors)
