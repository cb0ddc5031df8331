"""`POST /v1/completions`, `/v1/chat/completions` and `/v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mt_infer.answers.chat import ChatWriter
from mt_infer.answers.completions import CompletionWriter
from mt_infer.answers.responses import ResponseWriter
from mt_infer.answers.writer import Writer
from mt_infer.forms.chat import ChatForm
from mt_infer.forms.response import ResponseForm
from mt_infer.forms.texts import CompletionForm, prompts_of
from mt_infer.prompts.ask import Ask, ask_of, chat_ask
from mt_infer.server.routes.reading import form_of
from mt_infer.server.serving import Serving
from mt_infer.server.streams import streamed

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue texts or lists of tokens."""
    serving, form = Serving.of(request), await form_of(request, CompletionForm)
    ask = ask_of(
        serving.facts,
        form,
        await serving.prompts.of(prompts_of(form.prompt), "prompt"),
        max_tokens=form.max_tokens,
        logprobs=0 if form.receipt and form.logprobs is None else form.logprobs,
        prompt_logprobs=form.logprobs if form.echo else None,
    )
    writer = CompletionWriter(serving.backend, form, ask)
    return await _answer(request, ask, writer, is_stream=form.stream)


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """Continue a conversation."""
    serving, form = Serving.of(request), await form_of(request, ChatForm)
    ask = chat_ask(serving.facts, form, await serving.prompts.chat(form))
    writer = ChatWriter(serving.backend, form, ask, serving.prompts.form)
    return await _answer(request, ask, writer, is_stream=form.stream)


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    """Answer an input; nothing is stored."""
    serving, form = Serving.of(request), await form_of(request, ResponseForm)
    ask = chat_ask(serving.facts, form.chat, await serving.prompts.chat(form.chat))
    writer = ResponseWriter(serving.backend, form, ask, serving.prompts.form)
    return await _answer(request, ask, writer, is_stream=form.stream)


async def _answer(request: Request, ask: Ask, writer: Writer, *, is_stream: bool) -> Response:
    if is_stream:
        return await streamed(request, ask, writer)
    return JSONResponse(writer.whole(await Serving.of(request).completions(request, ask)))
