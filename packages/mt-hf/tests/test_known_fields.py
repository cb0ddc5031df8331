"""A field of config.json that mt does not know is refused where transformers reads it."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
from mt_hf import ExchangeError, describe, known_families, read_end_tokens

TOOL = Path(__file__).parents[1] / "tools/known_fields.py"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 2}


def folder_of(tmp_path, given):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(given))
    return tmp_path


def test_the_table_is_that_of_the_installed_transformers():
    spec = importlib.util.spec_from_file_location("known_fields_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.TABLE.read_text() == tool.text(), f"run it anew: python {TOOL.name}"


def test_the_table_has_every_family():
    kinds = {family.model_types[0] for family in known_families().values()}
    spec = json.loads((TOOL.parents[1] / "src/mt_hf/family/known_fields.json").read_text())
    assert kinds == set(spec["model_types"])


def test_a_field_that_nobody_reads_is_said_once_for_a_folder(tmp_path, caplog):
    plain = describe(folder_of(tmp_path / "plain", LLAMA))
    given = {
        **LLAMA,
        "is_llama_config": True,
        "neftune_noise_alpha": 5,
        "transformers.js_config": {"a": 1},
    }
    folder = folder_of(tmp_path / "folder", given)
    with caplog.at_level(logging.WARNING, "mt_hf"):
        assert describe(folder) == describe(folder) == plain
        describe(folder_of(tmp_path / "other", given))
    assert len(caplog.messages) == 2
    assert str(folder) in caplog.messages[0]
    assert caplog.messages[0].endswith(
        "is_llama_config, neftune_noise_alpha, transformers.js_config"
    )
    assert "\n" not in caplog.messages[0]


@pytest.mark.parametrize("value", [None, False, 0.0, 1.0, "", [], {}])
def test_values_that_switch_nothing_on_are_read_in_silence(tmp_path, caplog, value):
    plain = describe(folder_of(tmp_path / "plain", LLAMA))
    assert describe(folder_of(tmp_path / "folder", {**LLAMA, "use_mrope": value})) == plain
    assert not caplog.messages


def test_a_known_field_with_its_default_is_read_in_silence(tmp_path, caplog):
    describe(
        folder_of(tmp_path, {**LLAMA, "pretraining_tp": 4, "is_causal": True, "use_cache": False})
    )
    bert = {"architectures": ["BertForMaskedLM"], "classifier_dropout": 0.3, "layer_types": None}
    describe(folder_of(tmp_path, bert))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({**LLAMA, "is_causal": False}, "is_causal"),
        ({**LLAMA, "sliding_window": 4}, "sliding_window"),
        ({**LLAMA, "per_layer_config": {"0": {"mlp_bias": True}}}, "per_layer_config"),
        ({**LLAMA, "cross_attention_hidden_size": 8}, "cross_attention_hidden_size"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types",
        ),
        ({"architectures": ["NemotronHForCausalLM"], "mamba_d_conv": 3}, "mamba_d_conv"),
    ],
)
def test_a_field_that_transformers_reads_is_refused_by_name(tmp_path, given, name):
    with pytest.raises(ExchangeError, match=rf"{name}: .*transformers reads"):
        describe(folder_of(tmp_path, given))


def test_the_second_name_of_a_field_counts(tmp_path, caplog):
    found = describe(folder_of(tmp_path / "a", {**GPT_OSS, "num_experts": 8}))
    assert found == describe(folder_of(tmp_path / "b", {**GPT_OSS, "num_local_experts": 8}))
    assert found.layers[0].feed_forward.num_experts == 8
    both = {**GPT_OSS, "num_experts": 8, "num_local_experts": 16}
    with pytest.raises(ExchangeError, match="num_experts: 8 is not num_local_experts=16"):
        describe(folder_of(tmp_path / "c", both))
    assert not caplog.messages


def test_fields_of_parts_are_said_with_the_name_of_the_part(tmp_path, caplog):
    text = {"model_type": "llama", "vocab_size": 32064, "use_resampler": True}
    given = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    tower = {"model_type": "clip_vision_model", "surprise": 3}
    describe(folder_of(tmp_path, {**given, "vision_config": tower}))
    assert "text_config.use_resampler, vision_config.surprise" in caplog.text
    with pytest.raises(ExchangeError, match="is_causal"):
        describe(
            folder_of(
                tmp_path,
                {**given, "vision_config": {}, "text_config": {**text, "is_causal": False}},
            )
        )


def test_infinity_is_read_as_transformers_wrote_it(tmp_path):
    given = {"architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 1}
    folder = folder_of(tmp_path, {**given, "time_step_limit": [0.0, float("inf")]})
    assert describe(folder).layers[0].mixer.max_dt is None
    assert read_end_tokens(folder) == frozenset()
    with pytest.raises(ExchangeError, match="rms_norm_eps"):
        describe(folder_of(tmp_path, {**LLAMA, "rms_norm_eps": float("inf")}))
