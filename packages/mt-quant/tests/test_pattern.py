"""Patterns out of files match what `re` matches, in linear time, or are refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mt_quant import Layout, QuantizationConfig, QuantizationError, Rule
from mt_quant.pattern import MAX_PATTERN, Pattern

HANGS = r"(([a-z0-9_.])+)+$!"

ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "^", "$", "[a-c_]", "1"])


def _larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{1,}"])
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda found: f"({'|'.join(found)})"),
        st.tuples(parts, repeats).map(lambda found: f"(?:{found[0]}){found[1]}"),
    )


@given(st.recursive(ATOMS, _larger, max_leaves=6), st.text("ab.1_", max_size=6))
def test_a_pattern_matches_what_re_matches(pattern: str, text: str) -> None:
    own, expected = Pattern(pattern), re.compile(pattern)
    assert own.matches(text, whole=True) == (expected.fullmatch(text) is not None)
    assert own.matches(text, whole=False) == (expected.match(text) is not None)
    assert own.matches(text, whole=True) == (expected.fullmatch(text) is not None)  # looked up


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj$", "model.layers.11.mlp.up_proj", True),
        (r".*(gate|up|down)_proj", "model.layers.0.mlp.gate", False),
        (r"(.*\.)?(lm_head|head)(\..*)?", "model.lm_head", True),
        ("^lm_head", "model.lm_head", False),
    ],
)
def test_patterns_that_writers_make_are_read(pattern: str, name: str, matches: bool) -> None:
    assert Pattern(pattern).matches(name, whole=False) == matches


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a", "a)", "[a", "a**", "a++", "{2}", "a{2,1}", "a{101}", "*", r"\b", "[z-a]"),
        *(
            "(?=a)",
            "(?!a)b",
            "(?P<x>a)",
            r"(a)\1",
            "a" * (MAX_PATTERN + 1),
            "((((a{99}){99}){99}))",
        ),
        *("(" * 60 + ")" * 60, "((((){99}){99}){99}){99}"),
    ],
)
def test_a_pattern_of_another_form_is_refused(pattern: str) -> None:
    with pytest.raises(QuantizationError, match=r"pattern|class"):
        Pattern(pattern)


def _config(*targets: str) -> dict:
    scheme = {"targets": list(targets), "weights": {"num_bits": 8, "type": "int"}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}}


@pytest.mark.parametrize("pattern", [HANGS, "(a|a)*" * 20 + "b", ".*" * 200 + "!", "(a?){50}a{50}"])
def test_a_pattern_that_would_hang_answers_at_once(pattern: str) -> None:
    name = "model.layers.11.self_attn.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.q_proj"
    start = time.process_time()
    with pytest.raises(QuantizationError, match="no group of quantization_config names it"):
        Layout.of(_config(f"re:{pattern}")).read(name, {})
    rule = QuantizationConfig(rules=(Rule(name=f"re:{pattern}", weight="int8"),))
    assert not rule.rules[0].name.startswith(name)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([f"re:layers.{i}" for i in range(1001)], "more than 1000 patterns"),
        (["re:" + "a" * 501], "more than 500 characters"),
    ],
)
def test_too_many_or_too_long_targets_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        Layout.of(_config(*targets)).read("x", {})


def test_names_of_layers_may_be_as_many_as_a_model_has() -> None:
    with pytest.raises(QuantizationError, match="missing"):  # the layer is found, its tensors not
        Layout.of(_config(*(f"layers.{i}" for i in range(2000)))).read("layers.1999", {})
