"""The engine as a model of lm-eval."""
# ruff: noqa: FBT001, FBT002 - the signatures are lm-eval's

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]
from mt_files import build, read_json
from mt_tokenizer import ChatTemplate
from tqdm import tqdm

from mt_infer.eval.scorer import EvalOptions, Scorer
from mt_infer.loading import Run, open_run

_CHUNK = 16  # batches between two steps of the progress bar
_USUAL_TOKENS = 256  # tokens of a continuation, as with lm-eval's other models


class EngineLM(TemplateLM):
    """A run of mt-train or a folder of Hugging Face, served by the engine.

    Args:
        folder: The folder.
        device: Device; None for the GPU if there is one.
        batch_size: Ignored, since the engine batches by itself.
        max_batch_size: Ignored too.
        options: Fields of `EvalOptions`.
    """

    def __init__(
        self,
        folder: str,
        *,
        device: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        **options: Any,
    ) -> None:
        super().__init__()
        how = build(EvalOptions, options)
        with open_run(Path(str(folder)), how.step) as run:
            self._scorer = Scorer.from_run(run, how, device=device)
        self._own_tokenizer, self._folder = run.tokenizer, run.chat_folder
        self._prefix = _begin_id(run) if how.prefix_token_id is None else how.prefix_token_id
        self._chunk = _CHUNK * how.max_batch
        self._template: ChatTemplate | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._own_tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token before texts without context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return self._own_tokenizer.sha256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, which may already begin with the token that begins texts."""
        begin = self._own_tokenizer.decode([self._prefix])
        if add_special_tokens is False or (add_special_tokens is None and string.startswith(begin)):
            return self._own_tokenizer.encode_chat(string)
        return self._own_tokenizer.encode_prompt(string)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the logprobs of whole texts."""
        texts = [self.tok_encode(each.args[0]) for each in requests]
        found: list[float] = []
        for part in self._parts(texts, disable_tqdm):
            found += self._scorer.score_texts(part, self._prefix)
        for each, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", each.args, score)
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuations of prompts."""
        found: list[str] = []
        for part in self._parts(requests, disable_tqdm):
            prompts = [self.tok_encode(each.args[0]) or [self._prefix] for each in part]
            given = [normalize_gen_kwargs(each.args[1], _USUAL_TOKENS) for each in part]
            found += self._scorer.generate(prompts, given)
        for each, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", each.args, text)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        for part in self._parts(requests, disable_tqdm):
            found += self._scorer.score([(context, rest) for _, context, rest in part])
        for (text, _, _), score in zip(requests, found, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, score)
        return found

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template, if it is wanted."""
        return self._own_template().source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text; without a prompt its last message may be continued."""
        template = self._own_template()
        text = template.write(chat_history, add_generation_prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def _own_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate.from_folder(self._folder)
        return self._template

    def _parts(self, requests: Sequence[Any], disable_tqdm: bool) -> Any:
        size = self._chunk
        starts = tqdm(range(0, len(requests), size), disable=disable_tqdm, desc="mt")
        return (requests[start : start + size] for start in starts)


def _begin_id(run: Run) -> int:
    """Return the token that begins texts, else the one that ends documents."""
    path, tokenizer = run.hugging_face / "tokenizer_config.json", run.tokenizer
    given = read_json(path, limit=1 << 26) if path.exists() else {}
    begin = given.get("bos_token") if isinstance(given, dict) else None
    name = begin.get("content") if isinstance(begin, dict) else begin
    return tokenizer.special_tokens.get(str(name), tokenizer.eod_id)
