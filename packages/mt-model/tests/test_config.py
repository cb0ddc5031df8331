import copy
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_files import FieldError
from mt_model import (
    GPT,
    PRESETS,
    Activation,
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    gpt,
    preset,
    validate_split,
)

MAMBA = {"num_heads": 2, "head_dim": 8, "state_size": 4}
SMALL = {"vocab_size": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_json(name):
    config = preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(max_examples=25, deadline=None)
@given(
    positions=st.sampled_from(["rope", "learned", "none"]),
    norm=st.sampled_from(["rms", "layer"]),
    activation=st.sampled_from(get_args(Activation)),
    flags=st.tuples(*[st.booleans()] * 4),
    qk_norm=st.sampled_from(["none", "head", "whole", "l2"]),
    sinks=st.sampled_from(["none", "zero", "learned"]),
    dropout=st.floats(0, 0.9),
)
def test_any_builder_choice_survives_json(
    positions, norm, activation, flags, qk_norm, sinks, dropout
):
    names = ("gated", "bias", "tied", "output_gate")
    config = gpt(
        **SMALL,
        positions=positions,
        norm=norm,
        activation=activation,
        dropout=dropout,
        qk_norm=qk_norm,
        sinks=sinks,
        **dict(zip(names, flags, strict=True)),
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layers_may_differ_and_lack_a_feed_forward():
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    config = ModelConfig(
        vocab_size=16,
        hidden_size=8,
        max_sequence_length=8,
        positions="none",
        layers=(
            LayerConfig(mixer=mixer),
            LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=16)),
        ),
    )
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.layers[0].feed_forward is None


def broken(**changes):
    data = gpt(**SMALL).to_dict()
    data["layers"] = [copy.deepcopy({**data["layers"][0], "repeat": 1}) for _ in range(2)]
    data["layers"][1]["mixer"].update(changes.pop("mixer", {}))
    data.update(changes)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken(hiden_size=4), "hiden_size: unknown key. Did you mean hidden_size?"),
        (broken(mixer={"num_head": 4}), r"layers\[1\].mixer.num_head: unknown key."),
        (
            broken(mixer={"num_heads": "4"}),
            r"layers\[1\].mixer.num_heads: expected an integer, found '4'",
        ),
        (broken(mixer={"type": "mamba"}), r"layers\[1\].mixer.type: 'mamba' is not known here"),
        (broken(layers=3), "layers: expected a list, each a mapping, found 3"),
        (broken(norm={"eps": None}), "norm.eps: expected a number, found nothing"),
        (broken(positions="alibi"), "positions: 'alibi' is not one of rope, learned, none"),
        (broken(vocab_size=True), "vocab_size: expected an integer, found True"),
        (broken(vocab_size=0), "vocab_size: 0 is too small; use 1 or more"),
        (broken(dropout=1.0), "dropout: 1.0 must be at least 0 and below 1"),
        ({"vocab_size": 3}, "hidden_size: missing; add `hidden_size:` with an integer"),
    ],
)
def test_broken_dict_names_the_path(data, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(data)


def test_a_configuration_is_read_without_torch():
    code = (
        "import sys, mt_model; mt_model.preset('tiny').to_dict(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_heads": 6, "num_kv_heads": 4, "head_dim": 2},
            r"num_heads: 6 is not a multiple of num_kv_heads=4.*Nearest num_kv_heads that does: "
            r"3 or 6",
        ),
        ({"num_heads": 8, "head_dim": 1}, "head_dim: 1 is odd"),
        ({"num_heads": 3}, "hidden_size: 8 does not divide by num_heads=3"),
        ({"positions": "learned", "num_layers": 0}, "num_layers: 0"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt(**{**SMALL, **changes})


def test_positions_must_match_the_layers():
    rotating = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, rope=RopeConfig())
    sizes = {"vocab_size": 8, "hidden_size": 8, "max_sequence_length": 8}
    with pytest.raises(ValueError, match=r"positions: 'learned', but layer 0 has a rope"):
        ModelConfig(**sizes, layers=(LayerConfig(mixer=rotating),), positions="learned")
    still = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match="no layer has a rope"):
        ModelConfig(**sizes, layers=(LayerConfig(mixer=still),))


def test_unknown_preset_and_override_suggest_the_nearest():
    with pytest.raises(
        ValueError, match=r"preset: 'lama3-8b' is not known. Did you mean llama3-8b"
    ):
        preset("lama3-8b")
    with pytest.raises(ValueError, match=r"hiden_size: unknown override.*Did you mean hidden_size"):
        preset("tiny", hiden_size=3)
    assert preset("tiny", num_layers=7).num_layers == 7


# Parameter counts as published with the models.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llava-1.5-7b", 7_063_427_072),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-1b", 999_885_952),
        ("phi3-mini", 3_821_079_552),
        ("granite3-2b", 2_533_531_648),
        ("llama3.1-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("olmo2-1b", 1_484_916_736),
        ("olmo2-7b", 7_298_617_344),
        ("pythia-410m", 405_334_016),
        ("gpt-neox-20b", 20_554_567_680),
        ("phi2", 2_779_683_840),
        ("bert-base", 109_514_298),
        ("bert-base-cased", 108_340_804),
        ("bert-large", 335_174_458),
        ("bert-large-cased", 333_610_308),
        ("mamba2-130m", 128_989_632),
        ("mamba2-2.7b", 2_702_599_680),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-11b", 11_307_321_344),
        ("flan-t5-small", 76_961_152),
        ("flan-t5-base", 247_577_856),
        ("flan-t5-xxl", 11_135_332_352),
        ("mt5-small", 300_176_768),
        ("mt5-xxl", 12_921_057_280),
        ("olmoe-1b-7b", 6_919_161_856),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("llama4-scout", 108_641_793_536 - 871_932_416),  # the encoder of images is left out
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_preset_has_the_published_parameter_count(name, count):
    config = preset(name)
    assert config.num_parameters + config.num_buffers == count


def test_flops_of_chunks_are_those_of_shorter_sequences():
    whole, cut = gpt(**SMALL), gpt(**SMALL, chunk=16)
    assert cut.flops_per_token(64) == whole.flops_per_token(16)
    assert cut.flops_per_token(8) == whole.flops_per_token(8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"chunk": 8, "window": 4}, "chunk: 8 does not go with window=4"),
        ({"chunk": 0}, "chunk: 0 is too small"),
        ({"temperature": {"strength": 0}}, "strength"),
        ({"temperature": {"intervall": 3}}, "Did you mean temperature.interval"),
    ],
)
def test_chunks_and_temperatures_that_are_not_built_are_named(given, says):
    with pytest.raises(ValueError, match=says):
        gpt(**SMALL, **given)


def test_flops_match_megatron_goldens():
    small = gpt(**SMALL, head_dim=4, ffn_size=32, gated=False)
    assert small.flops_per_token(16) * 16 == 196_608
    tera = preset("llama3-8b").flops_per_token(4096) * 2 * 4096 / 1e12
    assert tera == pytest.approx(395.257, abs=5e-4)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        (
            {"num_heads": 6, "head_dim": 4},
            4,
            r"num_heads=6 does not divide by tp=4. Nearest num_heads that does: 4 or 8; nearest "
            r"tp for num_heads=6: 3 \(layer 0\)",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 3, "head_dim": 4},
            4,
            r"num_kv_heads=3 does not divide by tp=4. Nearest num_kv_heads that does: 4; nearest "
            r"tp for num_kv_heads=3: 3",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6},
            4,
            r"head_dim=6 does not divide by tp=4. Nearest head_dim that does: 4 or 8",
        ),
        ({"vocab_size": 33}, 2, r"vocab_size=33 does not divide by tp=2.*32 or 34"),
        ({"ffn_size": 9}, 2, r"ffn_size=9 does not divide by tp=2.*8 or 10"),
    ],
)
def test_indivisible_split_names_both_and_the_nearest(changes, tp, message):
    config = gpt(**{**SMALL, **changes})
    validate_split(config, 1)
    with pytest.raises(ValueError, match=message):
        validate_split(config, tp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**30}, "num_heads|head_dim|hidden_size"),
        ({"hidden_size": None}, "^gpt.hidden_size: missing"),
        ({"hidden_size": 1e30}, r"hidden_size: expected an integer, found 1e\+30"),
        ({"num_layers": 10**9}, "num_layers: 1000000000"),
        ({"num_layers": 20_000}, "num_layers: 20000"),
        ({"num_layers": 2.5}, "num_layers: expected an integer, found 2.5"),
        ({"num_heads": 10**18 - 1}, "hidden_size: 8 does not divide"),
        ({"num_heads": 10**17, "hidden_size": 10**17}, "num_heads: 1000.* is too large"),
        ({"num_heads": 0}, "does not divide by num_heads=0"),
        ({"num_heads": "2"}, "num_heads: expected an integer, found '2'"),
        ({"vocab_size": 10**17}, "vocab_size: 1000.* is too large"),
        ({"max_sequence_length": 10**5000}, "an integer of 16610 bits"),
        ({"ffn_size": 2**40}, "ffn_size: 1099511627776 is too large"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a number, found nan"),
        ({"init_std": float("inf")}, "init_std: expected a number, found inf"),
        ({"dropout": float("nan")}, "dropout: expected a number, found nan"),
    ],
)
def test_absurd_sizes_are_refused_at_once(changes, message):
    began = time.perf_counter()
    with pytest.raises((ValueError, TypeError), match=message):
        gpt(**{**SMALL, **changes})
    assert time.perf_counter() - began < 0.5


def test_a_long_context_costs_nothing_until_it_is_used():
    import torch

    model = GPT(gpt(**{**SMALL, "max_sequence_length": 10**7}))
    sizes = [x.numel() for x in (*model.buffers(), *model.parameters())]
    assert max(sizes) < 10**4
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 32)


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 2**31])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["attention", "mlp", "rope", "rms"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "mixer", "num_heads", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_hostile_values_give_a_value_error_or_a_config(data):
    layer = gpt(**SMALL).to_dict()["layers"][0]
    whole = {**gpt(**SMALL).to_dict(), "layers": [layer]}
    places = [whole, layer, layer["mixer"], layer["feed_forward"], whole["norm"]]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places))
        key = data.draw(st.sampled_from([*place, "unknown", 3, None, ("a", 1)]))
        place[key] = data.draw(HOSTILE)
    with suppress(ValueError):  # and nothing else
        ModelConfig.from_dict(whole)


def test_deep_and_long_values_are_cut_in_the_message():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**7, [0] * 10**7, {str(i): i for i in range(10**5)}):
        for field in ("hidden_size", "norm", "layers"):
            with pytest.raises(ValueError, match=field) as caught:
                ModelConfig.from_dict({**gpt(**SMALL).to_dict(), field: value})
            assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", PRESETS)
def test_the_plain_values_of_a_config_build_it(name):
    assert gpt(**json.loads(json.dumps(preset(name).to_dict()))) == preset(name)


def test_a_layer_takes_what_it_leaves_out_from_what_is_said_for_all():
    common = {**SMALL, "num_layers": 3, "ffn_size": 16, "rope_theta": 100.0}
    config = gpt(**common, layer={"mixer": {"window": 4}, "feed_forward": {"activation": "relu"}})
    expected = gpt(**common, window=4, activation="relu")
    assert config == expected
    listed = [{"repeat": 2, "mixer": {"window": 4}}, {"mixer": {"type": "mamba2", **MAMBA}}]
    config = gpt(**{**common, "num_layers": None}, layers=listed)
    assert [layer.mixer for layer in config.layers[:2]] == [expected.layers[0].mixer] * 2
    assert config.layers[2].mixer == Mamba2Config(**MAMBA)
    assert config.layers[2].feed_forward == gpt(**common).layers[0].feed_forward


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 2}, "num_layers"),
        ({"layers": None}, "num_layers"),
        ({"layers": 3}, "layers"),
        ({"layer": {"mixer": {"window": 0}}, "layers": None, "num_layers": 1}, "layer.mixer"),
        ({"attention_dropout": 2.0, "layers": None, "num_layers": 1}, "attention_dropout"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"windo": 2}, "windo: unknown key. Did you mean window"),
    ],
)
def test_what_is_wrong_is_named_where_it_was_said(changes, field):
    layers = gpt(**SMALL).to_dict()["layers"]
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_heads": 2}
    with pytest.raises(FieldError, match=field):
        gpt(**{**sizes, "layers": layers, **changes})


def test_a_list_of_layers_may_repeat_entries_and_leave_out_the_usual_kinds():
    mixer = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "rope": {"theta": 100.0}}
    still = {**mixer, "rope": None}
    data = {"vocab_size": 32, "hidden_size": 8, "max_sequence_length": 16}
    data["layers"] = [
        {"mixer": mixer, "feed_forward": {"ffn_size": 16}, "repeat": 3},
        {"mixer": {"type": "attention", **still}},
    ]
    config = ModelConfig.from_dict(data)
    rotating = AttentionConfig(**{**mixer, "rope": RopeConfig(theta=100.0)})
    entry = LayerConfig(mixer=rotating, feed_forward=MLPConfig(ffn_size=16))
    assert config.layers == (*(entry,) * 3, LayerConfig(mixer=AttentionConfig(**still)))
    assert [each.get("repeat") for each in config.to_dict()["layers"]] == [3, 1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"repeat": 0}, r"layers\[0\].repeat: 0 is too small; use 1 or more"),
        ({"repeat": "3"}, r"layers\[0\].repeat: expected an integer, found '3'"),
        ({"repeat": 10**9}, r"layers\[0\].repeat: 1000000000 is too large; use 4096 or less"),
        ({"repeats": 3}, r"layers\[0\].repeats: unknown key"),
        ({"mixer": {"type": "mlp"}}, r"layers\[0\].mixer.type: 'mlp' is not known here"),
        ({"mixer": None, "feed_forward": None}, r"layers\[0\].mixer"),
    ],
)
def test_a_wrong_entry_of_the_list_is_named_by_its_place(entry, message):
    data = gpt(**SMALL).to_dict()
    data["layers"] = [{**data["layers"][0], **entry}, data["layers"][0]]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "first"}, "norms: 'first' is not one of pre, output, sandwich, post"),
        ({"parallel": True, "norms": "post"}, r"parallel: True, but .*\(norms='post'\). Use"),
        ({"shared_norm": True}, "shared_norm: True, but only parallel branches"),
        ({"shared_norm": True, "parallel": True, "norms": "output"}, "shared_norm: True, but"),
        ({"residual_scale": 0.0}, "residual_scale: 0.0 must be greater than 0"),
        ({"norm": "layer", "norm_rounds_first": True}, "rounds_first: True, which says when"),
        ({"norm_weight": False, "norm_zero_centered": True}, "zero_centered: True, but there is"),
        ({"logit_softcap": 0.0}, "logit_softcap: 0.0 must be greater than 0"),
        ({"embedding_scale": -1.0}, "embedding_scale: -1.0 must be greater than 0"),
        ({"z_loss": -0.1}, "z_loss: -0.1 is too small; use 0 or more"),
        ({"token_types": 10**9}, "token_types: 1000000000 is too large"),
        ({"gated": False, "clamp": 7.0}, "clamp: 7.0, which a plain feed-forward does not have"),
        ({"clamp": 0.0}, "clamp: 0.0 must be greater than 0"),
    ],
)
def test_blocks_that_make_no_sense_are_refused_with_a_way_out(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt(**{**SMALL, **changes})


def test_a_layer_without_a_second_branch_is_not_parallel():
    mixer = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    with pytest.raises(ValueError, match="parallel: True, but there is only one branch"):
        LayerConfig(mixer=mixer, parallel=True)


@pytest.mark.parametrize("name", ["gemma2-2b", "gemma3-1b"])
def test_layers_of_a_preset_take_turns_and_overrides_are_of_all(name):
    windows = [layer.mixer.window for layer in preset(name).layers]
    turn = 2 if name == "gemma2-2b" else 6
    assert len(set(windows[: turn - 1])) == 1
    assert windows[turn - 1] is None
    assert windows[turn:] == windows[:-turn]
    small = preset(name, window=3, num_layers=4)
    assert [layer.mixer.window for layer in small.layers] == [3] * 4


def test_a_config_prints_as_a_table_of_its_layers():
    config = gpt(**{**SMALL, "num_layers": 3, "ffn_size": 16, "max_sequence_length": 16})
    odd = replace(config.layers[0], norms="sandwich", residual_scale=0.5, feed_forward=None)
    config = replace(config, layers=(*config.layers[:2], odd), norm=NormConfig(eps=1e-6))
    text = str(config)
    first, second, others, total, _, summary = text.splitlines()[1:]
    assert first.split()[:2] == ["0-1", f"{2 * (2 * 8 + 4 * 64 + 3 * 128):,}"]
    assert second.split()[:2] == ["2", f"{2 * 8 + 4 * 64}"]
    assert "sandwich scale=0.5  attention(num_heads=2, num_kv_heads=2, head_dim=4" in second
    assert second.endswith(" -")
    assert "head = embedding" in others
    assert total.split()[:2] == ["total", f"{config.num_parameters:,}"]
    assert "norm=(eps=1e-06)" in summary
    assert f"{config.flops_per_token(16) / 1000:.3g} K" in total
    assert str(preset("llama3-70b")).count("\n") == 5


@pytest.mark.parametrize(
    ("entries", "repeat", "message"),
    [
        (1000, 4000, "layers: 4000000 layers with their repeats; use at most 4096"),
        (100_000, 1, "layers: a list of 100000 is too long; use at most 4096"),
    ],
)
def test_too_many_layers_are_refused_before_they_are_built(entries, repeat, message):
    data = gpt(**SMALL).to_dict()
    data["layers"] = [{**data["layers"][0], "repeat": repeat}] * entries
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(data)
