"""The section `quantization`: refusals with a fix, rounded tensors, and learning."""

from __future__ import annotations

import json

import pytest
import torch
from mt_model import fake_quantize
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import Decision, QuantizationConfig, Rule, quantize_weight
from mt_tensor_parallel import ColumnParallelLinear
from mt_train import ConfigError, load_config
from mt_train.parts.quantization import FakeQuantization
from mt_train.training.trainer import NonFiniteLossError
from torch import nn

SIZES = ["model.hidden_size=64", "model.num_heads=2", "model.ffn_size=64", "model.num_layers=2"]
SIZES += ["training.sequence_length=32", "training.steps=2"]


def losses(out) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["quantization.recipe=int8", "quantization.config=rules.yaml"],
            "quantization.config: contradicts quantization.recipe; leave one of them out",
        ),
        (
            ["quantization.recipe=int8", "precision.recipe=mxfp8"],
            "quantization: 'int8' does not go with precision.recipe mxfp8: a layer multiplies",
        ),
        (
            ["quantization.recipe=int8", "training.compile=true"],
            "true does not go with quantization 'int8', whose weights are quantised once",
        ),
        (
            ["quantization.recipe=int8", "training.cuda_graphs=layer"],
            "use no recipe, or cuda_graphs: none",
        ),
        (["quantization.group_size=32"], "group_size: is for quantization.recipe"),
        (["quantization.recipes=int8"], "unknown key. Did you mean quantization.recipe"),
    ],
)
def test_what_a_section_can_not_mean_is_refused(given, words, tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{name: layers.*.qvk, weight: int8}", "matches nothing; correct it, or say"),
        ("{weight: int4-g48}", "groups of 48 inputs (int4-g48) do not divide 64 inputs"),
        ("{name: '*mixer*', weight: int8, method: gptq}", "has the method gptq, which reads data"),
        ("{name: '*mixer*', weight: int8, input: int8-static}", "with one scale for all tokens"),
        ("{name: '*mixer*', weight: nvfp4, input: nvfp4}", "with one scale for all tokens"),
        ("{type: Attention, kv_cache: fp8-head}", "makes one for each head of each token: use fp8"),
        ("{type: MLP, kv_cache: fp8}", "layers.0.feed_forward, which keeps no keys and values"),
        ("{name: '*mixer*'}", "no layer gets a format of its weight; name one, or leave it out"),
        ("{weight: int9}", "int9"),
    ],
)
def test_rules_that_training_can_not_follow_are_refused_before_a_step(
    rule, words, tiny, tmp_path
) -> None:
    (tmp_path / "rules.yaml").write_text(f"rules: [{rule}]")
    given = [*SIZES, f"quantization.config={tmp_path / 'rules.yaml'}"]
    with pytest.raises(ConfigError) as caught:
        tiny.run(tmp_path / "run", *given)
    assert "quantization.config: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "layer"),
    [
        ("{weight: int4-g64}", "layers.0.mixer.out has groups of 64 inputs, and 32 in a row"),
        ("{weight: int8, input: mxfp8}", None),
        ("{weight: int4-g32}", None),
        ("{weight: int8}", None),
    ],
)
def test_groups_that_ranks_cut_are_refused(rule, layer, tiny, tmp_path) -> None:
    (tmp_path / "rules.yaml").write_text(f"rules: [{rule}]")
    path = tmp_path / "rules.yaml"
    given = [*SIZES, "parallel.tp=2", f"quantization.config={path}"]
    loaded = load_config(tiny.config, given)
    if layer is None:
        FakeQuantization.check(loaded, loaded.model(300), None)
        return
    with pytest.raises(ConfigError) as caught:
        FakeQuantization.check(loaded, loaded.model(300), None)
    assert layer in str(caught.value)
    assert "use a divisor of 32, or fewer ranks" in str(caught.value)


def test_rules_are_found_beside_the_yaml_file_from_any_folder(tiny, tmp_path, monkeypatch) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{weight: int8}]")
    (tmp_path / "run.yaml").write_text(
        tiny.config.read_text() + "quantization: {config: rules.yaml}\n"
    )
    monkeypatch.chdir("/")
    loaded = load_config(tmp_path / "run.yaml")
    FakeQuantization.check(loaded, loaded.model(300), None)
    assert loaded.config.quantization.config == str(tmp_path / "rules.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    loaded = load_config(tmp_path / "run.yaml", ["quantization.config=folder"])
    with pytest.raises(ConfigError, match=r"quantization\.config: .*folder"):
        FakeQuantization.check(loaded, loaded.model(300), None)


def test_an_unknown_recipe_is_refused(tiny, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'int88'\. Did you mean int8"):
        tiny.run(tmp_path / "run", *SIZES, "quantization.recipe=int88")


def test_rounding_passes_gradients_on_as_they_are() -> None:
    torch.manual_seed(0)
    stage = nn.ModuleDict({"layers": nn.ModuleList([ColumnParallelLinear(32, 16, group=None)])})
    rule = Rule(weight="int4-g16", input="int8").decision(0)
    assert set(fake_quantize(stage, {"layers.0": rule})) == {"layers.0"}
    layer = stage["layers"][0]
    rounded = quantize_weight(layer.weight, "int4-g16").dequantize()
    x = torch.randn(2, 3, 32, requires_grad=True)
    y = layer(x)
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    inputs = (x.detach() / scale).round() * scale
    torch.testing.assert_close(y, inputs @ rounded.T + layer.bias)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ rounded)
    torch.testing.assert_close(layer.weight.grad, grad.flatten(0, 1).T @ inputs.flatten(0, 1))


def test_a_layer_without_a_format_stays() -> None:
    stage = nn.ModuleDict({"layers": nn.ModuleList([ColumnParallelLinear(32, 16, group=None)])})
    assert fake_quantize(stage, {"layers.0": Decision()}) == {}


def test_losses_are_those_of_rounded_weights_and_fall(tiny, tmp_path, capsys) -> None:
    given = [*SIZES, "training.steps=3", "optimizer.lr=3e-2"]
    tiny.run(tmp_path / "plain", *given)
    tiny.run(tmp_path / "run", *given, "quantization.recipe=int8")
    said = capsys.readouterr().out
    assert said.count("quantization int8: 8 linear layers are rounded") == 1
    plain, rounded = losses(tmp_path / "plain"), losses(tmp_path / "run")
    assert rounded != plain
    assert rounded[0] == pytest.approx(plain[0], rel=1e-3)
    assert rounded == pytest.approx(plain, rel=2e-2)
    assert rounded[-1] < rounded[0]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            "{type: Attention, kv_cache: fp8}",
            "0 linear layers are rounded, and the keys and values of 2",
        ),
        (
            "{weight: int8, kv_cache: fp8}",
            "8 linear layers are rounded, and the keys and values of 2",
        ),
    ],
)
def test_keys_and_values_are_rounded_as_a_cache_keeps_them(
    rules, says, tiny, tmp_path, capsys
) -> None:
    (tmp_path / "rules.yaml").write_text(
        f"rules: [{{name: 're:(head|embedding).*', optional: true}}, {rules}]"
    )
    given = [*SIZES, "training.steps=3", "optimizer.lr=3e-2"]
    tiny.run(tmp_path / "plain", *given)
    tiny.run(tmp_path / "run", *given, f"quantization.config={tmp_path / 'rules.yaml'}")
    assert says in capsys.readouterr().out
    plain, rounded = losses(tmp_path / "plain"), losses(tmp_path / "run")
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=2e-2)
    assert rounded[-1] < rounded[0]


@pytest.mark.parametrize("recipe", ["int8", "int8-dynamic", "fp8"])
def test_what_is_not_finite_ends_a_run(recipe, tiny, tmp_path) -> None:
    given = [*SIZES, f"quantization.recipe={recipe}", "training.dtype=fp32", "optimizer.lr=1e38"]
    with pytest.raises(NonFiniteLossError, match=r"The step was not applied"):
        tiny.run(tmp_path / "run", *given)


def test_decisions_are_those_of_the_whole_model(tiny) -> None:
    loaded = load_config(tiny.config, SIZES)
    with ParallelState(ParallelLayout(), device="cpu") as state:
        model = loaded.model(300).build(state)
        decisions = QuantizationConfig.named("int8").decide(model)
        made = fake_quantize(model, decisions)
    assert len(made) == 8
    assert all(name.startswith("layers.") for name in made)
