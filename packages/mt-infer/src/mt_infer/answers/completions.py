"""The bodies of answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mt_infer.answers.writer import ChoicesWriter, bounded, token_bytes
from mt_infer.backends.backend import Backend
from mt_infer.completion import Completion, Delta
from mt_infer.forms.texts import CompletionForm
from mt_infer.prompts.ask import Ask
from mt_infer.prompts.prompt import Prompt


class CompletionWriter(ChoicesWriter):
    """A writer of the bodies of continuations of texts; see `ChoicesWriter`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, backend: Backend, form: CompletionForm, ask: Ask) -> None:
        super().__init__(backend, form, ask)
        self._echo, self._logprobs = form.echo, form.logprobs
        self._begun: dict[int, int] = {}  # lengths of texts so far

    def choice(self, index: int, found: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._tokens(found.tokens, found.logprobs, found.top_logprobs, 0)
            if self._echo:
                logprobs = self._with_prompt(index, found, logprobs)
        text = self._before(index) + (found.text or "")
        return _part(index, text, logprobs, found)

    def parts(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the choice of the chunk of a delta."""
        begun = self._begun.get(delta.index)
        text = delta.text if begun is not None else self._before(delta.index) + delta.text
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._tokens(delta.tokens, delta.logprobs, delta.top_logprobs, begun or 0)
        self._begun[delta.index] = (begun or 0) + len(text)
        yield _part(delta.index, text, logprobs, delta.completion)

    def _prompt(self, index: int) -> Prompt:
        return self.ask.prompts[index // self.ask.sampling.n]

    def _before(self, index: int) -> str:
        """Return the text of the prompt, if it is echoed."""
        if not self._echo:
            return ""
        prompt = self._prompt(index)
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.backend.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.tokens)

    def _with_prompt(
        self, index: int, found: Completion, own: dict[str, list[Any]]
    ) -> dict[str, list[Any]]:
        tokens, logprobs = self._prompt(index).tokens, found.prompt_logprobs
        first = self._tokens(tokens[:1], None, None, 0)
        rest = self._tokens(tokens[1:], logprobs, found.prompt_top_logprobs, 0)
        whole = {name: first[name] + rest[name] + own[name] for name in own}
        whole["text_offset"] = _offsets(whole["tokens"], 0)
        return whole

    def _tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        tops: Sequence[Mapping[int, float]] | None,
        offset: int,
    ) -> dict[str, list[Any]]:
        """Return tokens with their logprobs; None stands for a missing logprob."""
        texts = [self._text(each) for each in tokens]
        found = [None] * len(tokens) if logprobs is None else [bounded(each) for each in logprobs]
        likely = [
            {self._text(token): bounded(logprob) for token, logprob in each.items()}
            for each in tops or ()
        ]
        return {
            "tokens": texts,
            "token_logprobs": found,
            "top_logprobs": likely or [None] * len(tokens),
            "text_offset": _offsets(texts, offset),
        }

    def _text(self, token: int) -> str:
        """Return the text of a token, or its bytes if they are no text."""
        tokenizer = self.backend.tokenizer
        if tokenizer is None:
            return f"token:{token}"
        content = token_bytes(tokenizer, token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _part(
    index: int, text: str, logprobs: Mapping[str, Any] | None, found: Completion | None
) -> dict[str, Any]:
    end = None if found is None else "stop" if found.end == "stop" else "length"
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": end}


def _offsets(texts: Sequence[str], first: int) -> list[int]:
    found = []
    for text in texts:
        found.append(first)
        first += len(text)
    return found
