"""Bodies are read strictly: what JSON readers disagree about is refused, with its field and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mt_infer.forms.bodies import read_form
from mt_infer.forms.refusal import FormError
from mt_infer.forms.texts import CompletionForm, prompts_of

NO_JSON = {
    b"": "is not valid JSON",
    b"\xff": "is not UTF-8",
    b"\xef\xbb\xbf{}": "BOM",
    '{"prompt":"a"}'.encode("utf-16"): "is not UTF-8",
    b'{"prompt": NaN}': "NaN is no JSON number",
    b'{"prompt": -Infinity}': "-Infinity is no JSON number",
    b'{"prompt": 1e999}': "the number 1e999 is too large",
    b'{"prompt": "a", "prompt": "b"}': "the key 'prompt' is there twice",
    b"[" * 100_000: "nested too deeply",
    b"9" * 5000: "an integer of 5000 digits",
    b"[]": "send a JSON object",
    b'"a"': "send a JSON object",
}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing"),
    ({"prompt": []}, "prompt", "give one prompt or more"),
    ({"prompt": ["a", 1]}, "prompt", "mixes tokens with texts"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate at character 0"),
    ({"prompt": "a", "\udfff": 1}, "?", "lone surrogate"),
    ({"prompt": [True]}, "prompt[0]", "found True"),
    ({"prompt": [1 << 63]}, "prompt[0]", "does not fit 64 bits"),
    ({"prompt": "a", "seed": 10**30}, "seed", "does not fit 64 bits"),
    ({"prompt": "a", "n": True}, "n", "expected an integer, found True"),
    ({"prompt": "a", "n": 1.0}, "n", "expected an integer, found 1.0"),
    ({"prompt": "a", "n": 0}, "n", "use 1 or more"),
    ({"prompt": "a", "n": 10**9}, "n", "use 128 or less"),
    ({"prompt": "a", "temperature": "0.7"}, "temperature", "remove the quotes"),
    ({"prompt": "a", "temperature": 1e-300}, "temperature", "use 0, or 0.001 on"),
    ({"prompt": "a", "top_p": 2}, "top_p", "use 1 or less"),
    ({"prompt": "a", "temprature": 1}, "temprature", "Did you mean temperature?"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "is not served here"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias", "is no number of a token"),
    ({"prompt": "a", "logit_bias": {"1": 1e9}}, "logit_bias", "use -100 to 100"),
    ({"prompt": "a", "stop": ["x"] * 2000}, "stop", "use at most 1024"),
    ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage", "unknown key"),
    ({"prompt": json.loads("[" * 70 + "]" * 70)}, "", "nested deeper than 64"),
]


@pytest.mark.parametrize("content", NO_JSON, ids=lambda content: repr(content[:20]))
def test_what_is_no_plain_json_is_refused(content: bytes) -> None:
    with pytest.raises(FormError) as refused:
        read_form(CompletionForm, content)
    assert refused.value.code == "invalid_json"
    assert NO_JSON[content] in str(refused.value)


@pytest.mark.parametrize(("body", "param", "text"), WRONG)
def test_a_wrong_field_is_named_with_its_value(body: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(FormError) as refused:
        read_form(CompletionForm, json.dumps(body).encode())
    assert refused.value.param == (param or None)
    assert text in str(refused.value)
    assert (str(refused.value) + str(refused.value.param)).encode()


def test_nulls_and_fields_that_change_no_token_are_accepted() -> None:
    body = {"prompt": "a", "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"}
    nulls = {"suffix": None, "temperature": None, "stop": None, "logit_bias": None}
    form = read_form(CompletionForm, json.dumps(body | nulls).encode())
    assert form == CompletionForm(prompt="a")


def test_a_body_chooses_tokens_by_the_fields_of_sampling() -> None:
    given = {"seed": 7, "temperature": 0.5, "top_k": 3, "logit_bias": {"5": -1}, "stop": "x"}
    form = read_form(CompletionForm, json.dumps({"prompt": [[1, 2], [3]], **given}).encode())
    assert prompts_of(form.prompt) == [[1, 2], [3]]
    found = form.sampling(max_tokens=4)
    assert (found.seed, found.temperature, found.top_k) == (7, 0.5, 3)
    assert (found.logit_bias, found.stop, found.max_tokens) == ({5: -1.0}, ("x",), 4)
