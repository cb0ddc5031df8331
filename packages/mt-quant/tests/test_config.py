"""Rules: order, conditions, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from mt_quant import RECIPES, QuantizationConfig, QuantizationError, Rule, ShapeCondition
from torch import nn

YAML = r"""
rules:
  - name: "*.1"
  - name: re:blocks\.0\..*
    weight: int8
    input: int8-tensor
  - shape: {inputs_multiple_of: 32}
    weight: {type: int4, group: 32, symmetric: false}
    method: rtn
  - {type: Attention, kv_cache: int8}
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 64)


def _model() -> nn.Module:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)) for _ in range(2))
    return nn.ModuleDict({"blocks": blocks, "odd": nn.Linear(9, 5), "attention": Attention()})


def _from_yaml(tmp_path: Path, text: str) -> QuantizationConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return QuantizationConfig.from_yaml(path)


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    found = _from_yaml(tmp_path, YAML).decide(_model())
    of = {name: (d.rule, str(d.weight)) for name, d in found.items()}
    assert of == {
        "blocks.0.0": (1, "int8-channel"),
        "blocks.0.1": (0, "None"),
        "blocks.1.0": (2, "int4-g32-asym"),
        "blocks.1.1": (0, "None"),
        "odd": (None, "None"),
        "attention": (3, "None"),
        "attention.out": (2, "int4-g32-asym"),
    }
    assert str(found["attention"].kv_cache) == "int8-token"


def test_the_explanation_is_a_table_with_the_rule_of_each_module(tmp_path: Path) -> None:
    lines = _from_yaml(tmp_path, YAML).explain(_model()).splitlines()
    assert len(lines) == 8
    assert lines[1].split(maxsplit=6)[:3] == ["blocks.0.0", "int8-channel", "int8-tensor"]
    assert lines[1].endswith(r"1: name='re:blocks\\.0\\..*'")
    assert any(line.startswith("odd ") and line.endswith("none matches") for line in lines)


def test_plain_values_make_an_equal_configuration(tmp_path: Path) -> None:
    config = _from_yaml(tmp_path, YAML)
    assert QuantizationConfig.from_dict(config.to_dict()) == config


def test_options_of_a_file_have_the_types_of_the_method(tmp_path: Path) -> None:
    options = "{damping: 0.02, act_order: true}"
    text = f"rules: [{{weight: int4-g32, method: gptq, options: {options}}}]"
    (rule,) = _from_yaml(tmp_path, text).rules
    assert rule.options == {"damping": 0.02, "act_order": True}
    assert [type(value) for value in rule.options.values()] == [float, bool]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_leaves_heads_and_routers(name: str) -> None:
    model = nn.ModuleDict({"up": nn.Linear(128, 128), "lm_head": nn.Linear(128, 128)})
    found = QuantizationConfig.named(name).decide(model)
    assert found["up"].weight is not None
    assert found["lm_head"].weight is None


@pytest.mark.parametrize("name", ["int4-rtn", "int4-gptq", "int4-awq", "w4a8"])
def test_a_recipe_takes_the_largest_group_that_divides(name: str) -> None:
    sizes = {"a": 256, "b": 576, "c": 96}
    model = nn.ModuleDict({key: nn.Linear(size, 16) for key, size in sizes.items()})
    found = QuantizationConfig.named(name).decide(model)
    assert {key: found[key].weight.group for key in sizes} == {"a": 128, "b": 64, "c": 32}
    method = QuantizationConfig.named(name).rules[-1].method
    assert {found[key].method for key in sizes} == {method}
    chosen = QuantizationConfig.named(name, group_size=16).decide(model)
    assert {chosen[key].weight.group for key in sizes} == {16}
    model["d"] = nn.Linear(72, 16)
    with pytest.raises(QuantizationError, match=r"^d: .*72 inputs"):
        QuantizationConfig.named(name).decide(model)


@pytest.mark.parametrize(("name", "size"), [("int8", 64), ("nvfp4", 16), ("int4-rtn", 1)])
def test_a_group_size_without_groups_is_refused(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="group"):
        QuantizationConfig.named(name, group_size=size)


def test_a_rule_that_matches_nothing_is_named() -> None:
    config = QuantizationConfig(
        rules=(Rule(name="layers.*.qvk", weight="int8"), Rule(weight="int8"))
    )
    with pytest.raises(
        QuantizationError, match=r"rules\[0\] \(name='layers.\*.qvk'\) matches nothing"
    ):
        config.decide(_model())


def test_every_layer_that_does_not_fit_is_named() -> None:
    config = QuantizationConfig(rules=(Rule(weight="int4-g64"),))
    with pytest.raises(QuantizationError) as caught:
        config.decide(_model())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "blocks.0.1",
        "blocks.1.1",
        "odd",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: []", "there is no rule"),
        ("rule: []", "unknown key. Did you mean rules?"),
        ("rules: [{weight: int5}]", r"rules\[0\].weight: unknown weight format 'int5'"),
        (
            "rules: [{weight: int8, input: int9}]",
            r"rules\[0\].input: unknown format of activations",
        ),
        ("rules: [{weight: int8, method: gtpq}]", "unknown method 'gtpq'"),
        ("rules: [{weight: int8, options: {damp: 1}}]", "has no options"),
        ("rules: [{weight: {type: int4, group: 1}}]", "2 or more inputs"),
        ("rules: [{name: 're:(', weight: int8}]", r"rules\[0\].name"),
        ("rules: [{input: int8}]", "only with a weight"),
        ("rules: [{weight: int8, shape: {min_inputs: 0}}]", "min_inputs"),
        ("rules: &a [*a]", "aliases"),
        ("rules: [1]\nrules: [2]", "already set"),
        ("rules: [", "recipe.yaml:1"),
        ("7", "expected a mapping"),
        ("", "expected a mapping"),
    ],
)
def test_a_broken_recipe_is_one_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        _from_yaml(tmp_path, text)


def test_a_shape_is_that_of_the_weight() -> None:
    condition = ShapeCondition(min_inputs=64, outputs_multiple_of=96)
    config = QuantizationConfig(rules=(Rule(shape=condition, weight="int8"),))
    found = config.decide(_model())
    assert [name for name, d in found.items() if d.weight] == ["blocks.0.0", "blocks.1.0"]
