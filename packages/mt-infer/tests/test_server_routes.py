"""The official client of OpenAI against the server: what goes in, and what comes out."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_infer.server import create_app
from mt_model import GPT, gpt
from mt_tokenizer import Tokenizer, train_tokenizer
from openai import OpenAI
from pydantic import BaseModel
from serving import Site, served

CORPUS = ['{"name": "to be", "parameters": {"city": "Paris"}}\n', "or not to be\n"] * 20
TEMPLATE = """{# <think> #}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ effort or '' }}<|assistant|>"""
TALK: list[Any] = [{"role": "user", "content": "to be or not"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Paris", "Oslo"]}},
    },
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    config = gpt(
        vocab_size=512,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        max_sequence_length=512,
        init_std=0.2,
    )
    save_pretrained(GPT(config, seed=3), path)
    train_tokenizer(CORPUS, 320).save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_folder(folder, blocks=512, max_batch=8)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    with served(create_app(engine)) as found:
        yield found


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[OpenAI]:
    url = f"http://127.0.0.1:{site.port}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None
    return engine.tokenizer


def alone(engine: Engine, prompt: Any, **how: Any) -> Any:
    """What the engine makes of one prompt."""
    return engine.generate(prompt, Sampling(**how))


def test_a_completion_has_the_engines_text_logprobs_and_usage(
    client: OpenAI, engine: Engine
) -> None:
    how: dict[str, Any] = {"seed": 5, "n": 2, "max_tokens": 6}
    found = client.completions.create(model="model", prompt=["to be", "or"], logprobs=2, **how)
    expected = alone(engine, ["to be", "or"], logprobs=2, **how)
    assert [each.text for each in found.choices] == [each.text for each in expected]
    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    for choice, whole in zip(found.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == whole.logprobs
        assert [len(each) for each in choice.logprobs.top_logprobs or ()] == [2] * len(whole.tokens)
        assert choice.finish_reason == ("stop" if whole.end == "stop" else "length")
    assert found.usage is not None
    assert found.usage.completion_tokens == sum(len(each.tokens) for each in expected)
    assert found.system_fingerprint == f"mt-{engine.digest[:16]}-float32-tp1-pp1"


def test_an_echo_scores_the_prompt(client: OpenAI, engine: Engine, tokenizer: Tokenizer) -> None:
    how: Any = {"model": "model", "echo": True, "logprobs": 1, "max_tokens": 0}
    found = client.completions.create(prompt="to be or", **how).choices[0]
    tokens = tokenizer.encode_prompt("to be or")
    assert found.text == "to be or"
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs == [None, *engine.score(tokens).tolist()]
    assert "".join(found.logprobs.tokens or ()) == "to be or"
    assert (found.logprobs.text_offset or [])[-1] == len("to be or") - len(
        found.logprobs.tokens[-1]
    )
    same = client.completions.create(prompt=tokens, **how).choices[0]
    assert same.logprobs == found.logprobs


def test_a_stream_joins_to_the_whole(client: OpenAI) -> None:
    how: Any = {"model": "model", "prompt": "to be", "seed": 2, "n": 2, "max_tokens": 9}
    whole = client.completions.create(logprobs=1, **how)
    options = {"include_usage": True}
    *chunks, last = client.completions.create(
        stream=True, stream_options=options, logprobs=1, **how
    )
    for choice in whole.choices:
        mine = [each.choices[0] for each in chunks if each.choices[0].index == choice.index]
        assert "".join(each.text for each in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        logprobs = [p for each in mine for p in each.logprobs.token_logprobs]
        assert logprobs == choice.logprobs.token_logprobs
    assert last.choices == []
    assert last.usage == whole.usage
    assert {each.system_fingerprint for each in chunks} == {whole.system_fingerprint}


def test_a_chat_is_the_template_and_the_engine(
    client: OpenAI, engine: Engine, tokenizer: Tokenizer
) -> None:
    how: Any = {"seed": 5, "max_tokens": 6}
    found = client.chat.completions.create(
        model="model", messages=TALK, logprobs=True, top_logprobs=2, **how
    )
    prompt = tokenizer.encode_chat("<|user|>to be or not<|assistant|>")
    (expected,) = alone(engine, prompt, logprobs=2, **how)
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    logprobs = (choice.logprobs.content if choice.logprobs else None) or []
    assert [each.logprob for each in logprobs] == expected.logprobs
    assert tokenizer.decode_bytes(expected.tokens) == bytes(
        byte for each in logprobs for byte in each.bytes or ()
    )
    assert {len(each.top_logprobs) for each in logprobs} == {2}
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(prompt)


def test_a_chat_in_events_joins_to_the_whole(client: OpenAI) -> None:
    how: Any = {"model": "model", "messages": TALK, "seed": 3, "max_tokens": 9, "n": 2}
    whole = client.chat.completions.create(logprobs=True, **how)
    *chunks, last = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, logprobs=True, **how
    )
    for choice in whole.choices:
        mine = [each.choices[0] for each in chunks if each.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        tokens = [t for each in mine if each.logprobs for t in each.logprobs.content or ()]
        assert tokens == (choice.logprobs.content if choice.logprobs else None)
    assert last.usage == whole.usage


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_asked_for_comes_and_its_result_goes_back(
    client: OpenAI, choice: Any
) -> None:
    how: Any = {"model": "model", "tools": TOOLS, "max_tokens": 99}
    how |= {"parallel_tool_calls": False, "tool_choice": choice, "seed": 1}
    found = client.chat.completions.create(messages=TALK, **how).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    parts = [
        change
        for each in client.chat.completions.create(messages=TALK, stream=True, **how)
        for change in each.choices[0].delta.tool_calls or ()
    ]
    assert parts[0].function.name == "weather"
    assert "".join(each.function.arguments or "" for each in parts) == call.function.arguments
    talk = [*TALK, found.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    how["tool_choice"] = "auto"
    answer = client.chat.completions.create(messages=talk, **how | {"max_tokens": 3})
    assert answer.choices[0].message.content is not None


# What the answer is made to be, and how it is then taken apart.
SPOKEN: list[tuple[str, list[tuple[str, str]], str]] = [
    ("<think>it rains</think>to be", [], "stop"),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
        [("weather", '{"city": "Oslo"}')],
        "tool_calls",
    ),
    (
        '<think>ok</think>be<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
        [("weather", "{}"), ("weather", '{"city": "Paris"}')],
        "tool_calls",
    ),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', [], "stop"),
    ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', [], "stop"),
]


@pytest.mark.parametrize(("text", "calls", "end"), SPOKEN)
def test_reasoning_and_calls_are_taken_apart_whole_and_in_events(
    client: OpenAI, text: str, calls: list[tuple[str, str]], end: str
) -> None:
    how: Any = {"model": "model", "messages": TALK, "tools": TOOLS, "max_tokens": 200}
    how["extra_body"] = {"regex": re.escape(text)}
    whole = client.chat.completions.create(**how).choices[0]
    assert whole.finish_reason == end
    found = [(e.function.name, e.function.arguments) for e in whole.message.tool_calls or ()]
    assert found == calls
    thought = text.partition("<think>")[2].partition("</think>")[0]
    assert getattr(whole.message, "reasoning_content", "") == thought
    parts = [each.choices[0] for each in client.chat.completions.create(stream=True, **how)]
    assert parts[-1].finish_reason == end
    said = "".join(each.delta.content or "" for each in parts)
    assert said == (whole.message.content or "")
    mine = [getattr(each.delta, "reasoning_content", None) or "" for each in parts]
    assert "".join(mine) == thought
    if calls:
        changes = [change for each in parts for change in each.delta.tool_calls or ()]
        for index, call in enumerate(calls):
            own = [each.function for each in changes if each.index == index]
            assert (own[0].name, "".join(each.arguments for each in own)) == call


class Place(BaseModel):
    city: str
    number: int


def test_an_answer_follows_its_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}, "number": {"enum": [1, 2]}},
        "required": ["city", "number"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    how: Any = {"model": "model", "messages": TALK, "seed": 1, "max_tokens": 200}
    found = client.chat.completions.create(response_format=form, **how)
    assert Place.model_validate_json(found.choices[0].message.content or "").city == "Paris"
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema}}
    answer = client.responses.create(model="model", input="to be", text=text, store=False)
    assert Place.model_validate_json(answer.output_text).city == "Paris"


def test_a_response_comes_whole_and_in_events(client: OpenAI) -> None:
    how: Any = {"model": "model", "max_output_tokens": 8, "extra_body": {"seed": 4}}
    talk: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "to be"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"role": "user", "content": "or not"},
    ]
    whole = client.responses.create(input=talk, instructions="be", **how)
    events = list(client.responses.create(input=talk, instructions="be", stream=True, **how))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == text
    assert last.response.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8


def test_a_response_calls_a_function(client: OpenAI) -> None:
    how: Any = {"model": "model", "input": "to be", "tools": [{"type": "function", **WEATHER}]}
    how |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 99}
    whole = client.responses.create(extra_body={"seed": 1}, **how)
    (call,) = whole.output
    assert (call.type, call.name) == ("function_call", "weather")
    events = list(client.responses.create(extra_body={"seed": 1}, stream=True, **how))
    kind = "response.function_call_arguments.delta"
    assert "".join(each.delta for each in events if each.type == kind) == call.arguments
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")


def test_embeddings_come_as_numbers_and_as_bytes(client: OpenAI, engine: Engine) -> None:
    expected = engine.embed(["to be", "or not"])
    for form in ("float", "base64"):
        found = client.embeddings.create(
            model="model", input=["to be", "or not"], encoding_format=form
        )
        rows = [
            np.frombuffer(base64.b64decode(each.embedding), "<f4")
            if isinstance(each.embedding, str)
            else each.embedding
            for each in found.data
        ]
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_texts_become_tokens_and_scores(site: Site, engine: Engine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode_prompt("to be or not")
    assert site.post("/tokenize", {"prompt": "to be or not"}).body["tokens"] == tokens
    assert site.post("/detokenize", {"tokens": tokens}).body["prompt"] == "to be or not"
    found = site.post("/score", {"input": ["to be or not", tokens]}).body["data"]
    assert [each["logprobs"] for each in found] == [engine.score(tokens).tolist()] * 2


def test_models_are_listed(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["model"]


ERRORS: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"model": "modle"}, openai.NotFoundError, "Did you mean model?"),
    ({"messages": []}, openai.BadRequestError, "give one message"),
    ({"messages": [{"role": "usr", "content": "a"}]}, openai.BadRequestError, "Did you mean user"),
    ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "Did you mean temperature?"),
    ({"functions": [{"name": "f"}]}, openai.BadRequestError, "use tools"),
    ({"store": True}, openai.BadRequestError, "nothing is stored"),
    ({"messages": [{"role": "user", "content": "a " * 999}]}, openai.BadRequestError, "context"),
    ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "999999"),
    ({"extra_body": {"grammar": "start: ("}}, openai.BadRequestError, "llguidance"),
    ({"tools": TOOLS * 2}, openai.BadRequestError, "the same name"),
]


@pytest.mark.parametrize(("change", "error", "text"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_an_error_of_the_client(
    client: OpenAI, change: Any, error: type[openai.APIStatusError], text: str, stream: bool
) -> None:
    how: Any = {"model": "model", "messages": TALK, "max_tokens": 2}
    with pytest.raises(error, match=text):
        client.chat.completions.create(stream=stream, **how | change)


def test_an_error_of_the_engine_names_the_field(site: Site) -> None:
    found = site.post("/v1/completions", {"prompt": "to be", "regex": "("})
    assert (found.status, found.body["error"]["param"]) == (400, "regex")
