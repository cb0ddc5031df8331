"""Messages between processes and ranks: each value comes out as it went in."""

from __future__ import annotations

import asyncio

import pytest
import torch
from mt_infer import Completion, Delta, Sampling, Service
from mt_infer.backends.backend import EngineDownError, Facts, Job, Picture, Setup
from mt_infer.backends.wire import next_message
from mt_infer.engine.message import pack as pack_tensors
from mt_infer.engine.message import unpack as unpack_tensors
from mt_infer.message import HEAD, pack, size_behind, unpack

TOPS = [{7: -0.5, 3: -1.0}]
WHOLE = Completion(tokens=[1, 2], text=None, end="stop", seed=3, prompt_top_logprobs=TOPS)
MESSAGES = [
    {"setup": Setup(folder="run", name="m", adapters={"a": "b"}, options={"max_batch": 4})},
    {"facts": Facts(model="m", vocab_size=8, max_sequence_length=4, dtype="float32", layout="tp1")},
    {"delta": Delta(index=1, tokens=[5], text="\u00e9\ud800", top_logprobs=TOPS, completion=WHOLE)},
    {"done": b"\0" * 70, "other": [b"", b"a"]},
    {"done": None, "bytes": {"size": 3}, "Delta": {"tokens": []}},
]


def received(content: bytes) -> object:
    async def read() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(content)
        reader.feed_eof()
        return await next_message(reader)

    return asyncio.run(read())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: next(iter(each)))
def test_a_message_to_the_engines_process_comes_out_as_it_went_in(message) -> None:
    assert received(pack(message)) == message


def test_a_job_keeps_its_pixels_and_each_digest_its_step() -> None:
    picture = Picture(width=1, height=2, rgb=b"abcdef")
    how = Sampling(json_schema={"bytes": 1}, logit_bias={4: 2.0}, stop=["a"], seed=1)
    service = Service(priority=2, caller="ann")
    job = Job(prompts=((1, 2), (3,)), sampling=how, images=([picture], []), service=service)
    facts = Facts(
        model="m",
        vocab_size=8,
        max_sequence_length=4,
        dtype="float32",
        layout="tp1",
        step=4,
        digests={None: "a", 4: "b"},
        adapters=("x",),
    )
    found = received(pack({"job": job, "facts": facts}))
    assert isinstance(found, dict)
    assert found["facts"] == facts
    assert [list(each) for each in found["job"].prompts] == [[1, 2], [3]]
    assert (found["job"].sampling, found["job"].service) == (how, service)
    assert found["job"].images == ([picture], [])


def test_a_message_that_is_cut_or_too_long_is_no_message() -> None:
    content = pack({"done": b"abc"})
    assert size_behind(content[:HEAD]) == len(content) - HEAD
    assert received(b"") is None
    assert received(content[:-1]) is None
    with pytest.raises(EngineDownError, match="exceeds"):
        received(content[: HEAD - 8] + b"\xff" * 8)


def test_only_expected_dataclasses_are_made_and_only_known_values_sent() -> None:
    with pytest.raises(ValueError, match="Service is not expected"):
        unpack(pack([Service()]), Sampling)
    with pytest.raises(TypeError, match="complex can't be sent"):
        pack([1j])
    with pytest.raises(TypeError, match="complex can't be sent"):
        pack_tensors([1j])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype) -> None:
    values = torch.arange(6).reshape(2, 3).to(dtype)
    found = unpack_tensors(pack_tensors({"x": [values, values[:0], b"between", values.T]}))
    x, empty, between, turned = found["x"]
    assert between == b"between"
    for each, expected in ((x, values), (empty, values[:0]), (turned, values.T)):
        assert (each.dtype, each.shape) == (dtype, expected.shape)
        assert each.tolist() == expected.tolist()
