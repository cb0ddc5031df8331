"""Hostile requests by seed: bodies that parsers disagree about, and values that make no sense."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "model",
        "prompt": "to be",
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["\n"],
        "logprobs": 1,
        "logit_bias": {"5": 1},
        "seed": 3,
        "stream": False,
        "echo": False,
    },
    "/v1/chat/completions": {
        "model": "model",
        "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "to be"}]},
        ],
        "max_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": "model",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "to be"}]}],
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
        "store": False,
        "stream": False,
    },
    "/v1/embeddings": {"model": "model", "input": ["to be", "or"], "encoding_format": "float"},
    "/score": {"model": "model", "input": [[1, 2, 3]]},
    "/tokenize": {"model": "model", "prompt": "to be"},
    "/detokenize": {"model": "model", "tokens": [1, 2, 3]},
}
# JSON texts, so that numbers which Python can't hold are among them.
VALUES = (
    *("null", "true", "false", "-1", "0", "1", "-0.0", "1.0", "1.5", "1e308", "1e999", "-1e999"),
    *("NaN", "Infinity", "-Infinity", "9" * 30, f"-{'9' * 30}", str(2**31), str(2**63), "1e-300"),
    *(str(-(2**63)), "9" * 5000, '""', '"x"', '"0.7"', '"true"', '"\\ud800"', '"\\u0000"', "[]"),
    *('"\\udc00\\ud800"', '"<|eod|>"', '"\\u202e\\u001b[2J\\r\\n"', "{}", "[[]]", "[null]", "[{}]"),
    *(
        '["a", 1]',
        '[1, "a"]',
        "[1.5]",
        "[-1]",
        "[99999]",
        "[true]",
        '{"type": "text"}',
        "[[1], []]",
    ),
    *('{"type": "json_object"}', '{"type": "json_schema"}', '{"a": {"b": {"c": [1, 2, {}]}}}'),
    *('"data:image/png;base64,AAAA"', '"http://127.0.0.1/x.png"', '"file:///etc/passwd"'),
    *('"required"', '"none"', '{"999999": 1}', '{"-1": 1}', '{"5": 1e9}', '{"\\ud800": 1}'),
    json.dumps("a" * 5000),
    json.dumps("😀\u0301" * 500),
    json.dumps(["a"] * 1100),
    json.dumps(list(range(300))),
    json.dumps([[1]] * 20),
    "[" * 60 + "]" * 60,
    "[" * 70 + "]" * 70,
    '{"a":' * 70 + "1" + "}" * 70,
)
_WORDS = """
temprature best_of suffix functions function_call store prediction audio user metadata
grammar regex top_k min_p typical_p repetition_penalty presence_penalty
frequency_penalty min_tokens stop_token_ids allowed_token_ids bad_words cache_salt
deadline_s receipt stream_options model previous_response_id conversation include
background instructions reasoning dimensions seed response_format tool_choice
parallel_tool_calls chat_template_kwargs reasoning_effort n logprobs
max_completion_tokens top_logprobs echo logit_bias pooling __class__ constructor"""


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """A request.

    Attributes:
        path: Its route.
        body: Its body.
        headers: Its headers.
    """

    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]]


def drawn(seed: int, number: int) -> Hostile:
    """Return a request of a seed."""
    rng = random.Random(f"{seed} {number}")
    path = rng.choice(list(ROUTES))
    text = json.dumps(ROUTES[path])
    body = rng.choice(WAYS)(rng, text)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if rng.random() < 0.03:
        headers.append(
            rng.choice(
                [
                    (b"content-type", b"application/json; charset=utf-16"),
                    (b"content-encoding", b"gzip"),
                    (b"origin", b"https://elsewhere.example"),
                    (b"content-length", b"-1"),
                    (b"authorization", b"Bearer \xff\x00"),
                ]
            )
        )
    return Hostile(path=path, body=body, headers=headers)


def _value(rng: random.Random, text: str) -> bytes:
    """Another value at one place, or at several."""
    whole = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2])):
        holder, key = rng.choice(_places(whole))
        holder[key] = _Raw(rng.choice(VALUES))
    return _written(whole).encode(errors="surrogatepass")


def _word(rng: random.Random, text: str) -> bytes:
    """A further field, which may be known, of another route, or of no one."""
    word = rng.choice(_WORDS.split())
    return f"{text[:-1]}, {json.dumps(word)}: {rng.choice(VALUES)}}}".encode()


def _twice(rng: random.Random, text: str) -> bytes:
    key = rng.choice(list(json.loads(text)))
    return f"{text[:-1]}, {json.dumps(key)}: {rng.choice(VALUES)}}}".encode()


def _without(rng: random.Random, text: str) -> bytes:
    whole = json.loads(text)
    holder, key = rng.choice(_places(whole))
    del holder[key]
    return json.dumps(whole).encode()


def _bytes(rng: random.Random, text: str) -> bytes:
    """A text with changed, removed or added bytes, or cut."""
    content = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(content))
        match rng.randrange(4):
            case 0:
                content[place] ^= 1 << rng.randrange(8)
            case 1:
                content[place:place] = rng.choice(
                    [b"\xff", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf"]
                )
            case 2:
                del content[place : place + rng.randint(1, 9)]
            case 3:
                content[place:place] = rng.choice(
                    [b"{", b"]", b'"', b"\\", b",", b":", b"1e9", b"//"]
                )
        content = content or bytearray(b" ")
    return bytes(content[: rng.choice([None, None, rng.randrange(len(content) + 1)])])


def _other(rng: random.Random, text: str) -> bytes:
    """Bytes without any JSON object."""
    return rng.choice(
        [
            b"",
            rng.randbytes(rng.randint(1, 400)),
            rng.choice(VALUES).encode(errors="surrogatepass"),
            text.encode("utf-16"),
            text.encode("utf-32"),
            b"\xef\xbb\xbf" + text.encode(),
            text.encode() + b"\0",
            text.encode() * 2,
            b"[" * rng.choice([10, 1000, 20_000]),
            b'{"a":' * rng.choice([10, 1000, 5000]),
            b"prompt=to+be&max_tokens=2",
            b" " * rng.choice([1, 70_000]),
        ]
    )


WAYS: list[Callable[[random.Random, str], bytes]] = [
    *[_value] * 5,
    *[_word] * 2,
    _twice,
    _without,
    *[_bytes] * 2,
    _other,
]


class _Raw(str):
    """A text in JSON."""

    __slots__ = ()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return each place of a value, as its holder and key."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def _written(value: Any) -> str:
    if isinstance(value, _Raw):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)
