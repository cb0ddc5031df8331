"""Tasks for the engine, from the forms of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mt_files import did_you_mean

from mt_infer.backends.backend import Facts, Job
from mt_infer.forms.chat import ChatForm
from mt_infer.forms.choosing import Choosing
from mt_infer.forms.refusal import FormError, RefusedError
from mt_infer.prompts.calls import call_grammar
from mt_infer.prompts.prompt import Prompt
from mt_infer.sampling import Sampling
from mt_infer.service import Service


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A route's task for the engine.

    Attributes:
        prompts: The prompts.
        sampling: Parameters of the choice of tokens.
        adapter: Name of the adapter.
        cache_salt: Salt of the cached blocks: only this client's requests with it find them.
        deadline_s: Seconds after which the request ends, complete or not, if that is sooner than
            the server's own deadline.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    adapter: str | None = None
    cache_salt: str = ""
    deadline_s: float | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each prompt."""
        return [each.tokens for each in self.prompts]

    def job(self, service: Service) -> Job:
        """Return the job of the engine."""
        images = [each.images for each in self.prompts]
        return Job(
            prompts=self.tokens,
            sampling=self.sampling,
            images=images if any(images) else None,
            adapter=self.adapter,
            service=service,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.tokens))

    @property
    def num_continuations(self) -> int:
        """Number of continuations."""
        return len(self.prompts) * self.sampling.n

    @property
    def max_num_tokens(self) -> int:
        """Largest number of tokens of the prompts and continuations."""
        written = self.num_continuations * max(1, self.sampling.max_tokens)
        return self.num_prompt_tokens * self.sampling.n + written


def adapter_of(facts: Facts, model: str) -> str | None:
    """Return the adapter that a request's `model` names; None for the model, or for no name.

    Raises:
        RefusedError: There is no such model.
    """
    known = facts.model, *facts.adapters
    if model in ("", facts.model):
        return None
    if model in known:
        return model
    message = f"model {model[:80]!r} is not served. {did_you_mean(model[:80], known)}"
    raise RefusedError(404, message, param="model", code="model_not_found")


def ask_of(
    facts: Facts,
    form: Choosing,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    **sampling: Any,
) -> Ask:
    """Return the engine's task.

    Args:
        facts: The model.
        form: The fields.
        prompts: The prompts.
        max_tokens: Largest number of tokens; None for the rest of the context.
        sampling: Further parameters of the choice.

    Raises:
        RefusedError: There is no such model.
        FormError: A receipt can't be made.
    """
    adapter = adapter_of(facts, form.model)
    if form.receipt and (adapter is not None or any(each.images for each in prompts)):
        raise FormError("receipt", "is not made for images or adapters; leave it out")
    shortest = 1 if facts.has_encoder else min(len(each.tokens) for each in prompts)
    room = facts.max_sequence_length - shortest
    return Ask(
        prompts=prompts,
        sampling=form.sampling(
            max_tokens=room if max_tokens is None else min(room, max_tokens), **sampling
        ),
        adapter=adapter,
        cache_salt=form.cache_salt,
        deadline_s=form.deadline_s,
    )


def chat_ask(facts: Facts, form: ChatForm, prompt: Prompt) -> Ask:
    """Return the engine's task for a conversation; see `ask_of`."""
    logprobs = (form.top_logprobs or 0) if form.logprobs or form.receipt else None
    how = {"grammar": call_grammar(form)} if form.must_call else {}
    return ask_of(facts, form, [prompt], max_tokens=form.limit, logprobs=logprobs, **how)
