"""`/v1/embeddings`, `/score`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mt_infer.forms.refusal import FormError
from mt_infer.forms.texts import (
    DetokenizeForm,
    EmbeddingForm,
    ScoreForm,
    TokenizeForm,
    prompts_of,
)
from mt_infer.prompts.ask import Ask, adapter_of
from mt_infer.sampling import Sampling
from mt_infer.server.routes.reading import form_of
from mt_infer.server.serving import Serving

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    serving, form = Serving.of(request), await form_of(request, EmbeddingForm)
    name = form.model or serving.facts.model
    if adapter_of(serving.facts, name) is not None:
        raise FormError("model", "an adapter makes no vectors; use the model itself")
    prompts = await serving.prompts.of(prompts_of(form.input), "input")
    vectors = await serving.vectors(request, prompts, form.pooling)
    size = len(vectors[0])
    if form.dimensions not in (None, size):
        raise FormError("dimensions", f"{form.dimensions} is not the model's {size}")
    found = [
        {"object": "embedding", "index": index, "embedding": _encoded(each, form.encoding_format)}
        for index, each in enumerate(vectors)
    ]
    read = sum(len(each.tokens) for each in prompts)
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JSONResponse({"object": "list", "data": found, "model": name, "usage": usage})


@router.post("/score")
async def score(request: Request) -> Response:
    """Return the logprob of each token of texts except the first."""
    serving, form = Serving.of(request), await form_of(request, ScoreForm)
    name = form.model or serving.facts.model
    adapter = adapter_of(serving.facts, name)
    prompts = await serving.prompts.of(prompts_of(form.input), "input")
    how = Sampling(max_tokens=0, prompt_logprobs=0, seed=0)
    ask = Ask(prompts=prompts, sampling=how, adapter=adapter)
    found = [
        {"index": index, "tokens": prompts[index].tokens, "logprobs": each.prompt_logprobs}
        for index, each in enumerate(await serving.completions(request, ask))
    ]
    return JSONResponse({"object": "list", "data": found, "model": name})


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text."""
    serving, form = Serving.of(request), await form_of(request, TokenizeForm)
    adapter_of(serving.facts, form.model)
    (prompt,) = await serving.prompts.of([form.prompt], "prompt")
    most = serving.facts.max_sequence_length
    found = {"tokens": prompt.tokens, "count": len(prompt.tokens), "max_model_len": most}
    return JSONResponse(found)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    serving, form = Serving.of(request), await form_of(request, DetokenizeForm)
    adapter_of(serving.facts, form.model)
    (prompt,) = await serving.prompts.of([list(form.tokens)], "tokens")
    text = await asyncio.to_thread(serving.prompts.tokenizer.decode, prompt.tokens)
    return JSONResponse({"prompt": text})


def _encoded(vector: list[float], form: str) -> Any:
    if form == "float":
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
