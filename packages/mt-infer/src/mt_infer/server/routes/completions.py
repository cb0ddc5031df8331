"""`POST /v1/completions`."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from mt_infer.completion import Completion
from mt_infer.sampling import Sampling
from mt_infer.server.refusal import RefusedError
from mt_infer.server.serving import Ask, Serving

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> dict[str, Any]:
    """Continue a list of tokens or a text."""
    serving = Serving.of(request)
    try:
        body = json.loads(await request.body())
        model, prompt = body["model"], body["prompt"]
        how = Sampling(
            **{name: body[name] for name in ("max_tokens", "seed", "temperature") if name in body}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(400, f"the body is not a request: {error}") from error
    tokenizer = serving.backend.tokenizer
    tokens: list[int] = prompt
    if isinstance(prompt, str) and tokenizer is not None:
        tokens = tokenizer.encode_prompt(prompt)
    ask = Ask(prompts=[tokens], sampling=how, adapter=serving.adapter_of(model))
    found = await serving.completions(request, ask)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": serving.facts.fingerprint(found[0].step),
        "choices": [_choice(index, each) for index, each in enumerate(found)],
        "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(found[0].tokens)},
    }


def _choice(index: int, found: Completion) -> dict[str, Any]:
    end = "stop" if found.end == "stop" else "length"
    return {"index": index, "text": found.text or "", "finish_reason": end, "logprobs": None}
