"""Guesses of the next tokens, which a single pass verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from mt_model import GPT
from torch import Tensor

from mt_infer.choosing.draws import NO_TOKEN
from mt_infer.engine.answer import Answer
from mt_infer.engine.chooser import Wanted, choose_next
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.request import Part, Request, Span
from mt_infer.engine.runner import Runner

_LONGEST, _SHORTEST = 4, 2
_WINDOW = 4096

Places = list[list[int]]


class NgramDrafter:
    """Guesses by the tokens that followed the same text before, and the base of other drafters.

    Args:
        options: Sizes and switches of the engine.

    Attributes:
        runners: Models that guess, if any; the engine's model may be one.
    """

    def __init__(self, options: EngineOptions, *runners: Runner) -> None:
        self._most, self.runners = options.num_drafts, runners

    def guess(self, request: Request, most: int) -> list[int]:
        """Return up to `most` guesses of a request's next tokens, or zeros that `fill` replaces."""
        return ngram_drafts(request.tokens, min(most, self._most))

    def fill(self, parts: list[Part], answers: Mapping[Request, Answer]) -> list[Part]:
        """Return the parts of a pass, with the guesses that grammars allow."""
        return [_cut(part, answers[part.request]) for part in parts]

    def unseen(self, part: Part, chosen: int) -> int:
        """Return the number of held tokens that are unseen after a pass; see `Request.unseen`."""
        del part, chosen
        return 0

    def keep(self, parts: Sequence[Part]) -> None:
        """Keep the state that the next guesses need, after the requests of a pass have advanced."""


class ScoredDrafter(NgramDrafter, ABC):
    """Guesses chosen by a model's scores, with the random keys of the verifying draws.

    Args:
        runner: The model that guesses.
        options: Sizes and switches of the engine.
        vocab_size: Number of tokens to choose from.
    """

    least_rounds = 1

    def __init__(self, runner: Runner, options: EngineOptions, vocab_size: int) -> None:
        super().__init__(options, runner)
        self._runner, self._vocab_size = runner, vocab_size
        self._longest = runner.model.config.max_sequence_length

    def guess(self, request: Request, most: int) -> list[int]:
        """Return zeros, which `fill` replaces."""
        most = min(most, self._most, self._longest - len(request.tokens))
        return [0] * max(0, most)

    def fill(self, parts: list[Part], answers: Mapping[Request, Answer]) -> list[Part]:
        """Guess for all requests of a pass at once, in one round for each draft."""
        guesses: list[list[int]] = [[] for _ in parts]
        for number in range(max(self.least_rounds, *(len(part.drafts) for part in parts))):
            scores = self.round(number, parts, guesses)
            wanting = [row for row, part in enumerate(parts) if _wants(part, guesses[row], number)]
            if scores is None or not wanting:
                continue
            wanted = [
                Wanted(
                    part=replace(parts[row], drafts=tuple(guesses[row])),
                    answer=answers[parts[row].request],
                    prompt=range(0),
                    next=range(number, number + 1),
                )
                for row in wanting
            ]
            drawn = choose_next(scores[:, : self._vocab_size], wanted)
            for row, each in zip(wanting, drawn, strict=True):
                token = each.tokens[0]  # nothing follows an end
                if token != NO_TOKEN and token not in answers[parts[row].request].ends:
                    guesses[row].append(token)
        rows = zip(parts, guesses, strict=True)
        return [replace(part, drafts=tuple(own)) for part, own in rows]

    @abstractmethod
    def round(self, number: int, parts: Sequence[Part], guesses: list[list[int]]) -> Tensor | None:
        """Return scores for one more guess of each part that wants more than `number` guesses."""


class ModelDrafter(ScoredDrafter):
    """Guesses of a smaller model, with its own pages for the same numbers of blocks."""

    def round(self, number: int, parts: Sequence[Part], guesses: list[list[int]]) -> Tensor | None:
        """Read the tokens of all parts, then in each round the last guess of each part."""
        spans, places = list[Span](), Places()
        for part, own in zip(parts, guesses, strict=True):
            request, wants, start = part.request, _wants(part, own, number), part.start + number
            fed: Sequence[int] = own[-1:]
            if not number:
                start -= request.unseen
                fed = request.tokens[start : part.start + part.count]
            if (wants or not number) and start + len(fed) <= self._longest:
                spans.append(Span(request=request, start=start, fed=fed))
                places.append([len(fed) - 1] if wants else [])
        return self._runner.scores(spans, places) if spans else None

    def unseen(self, part: Part, chosen: int) -> int:
        """Return 1 if all guesses were right: the model has not read the last guess."""
        return int(0 < len(part.drafts) < chosen)


class MTPDrafter(ScoredDrafter):
    """Guesses of a model's MTP modules, which predict further tokens one after the other.

    Module k reads the features of a place and the token k further on. Its keys are final once that
    token is known, so the last places are read again in the next pass. For more guesses than
    modules, the last module continues with its own features in place of the next token's features.
    """

    def __init__(self, runner: Runner, options: EngineOptions, vocab_size: int) -> None:
        super().__init__(runner, options, vocab_size)
        self.least_rounds = len(runner.model.mtp)
        self._kept: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()
        self._row: dict[Request, Tensor] = {}

    def guess(self, request: Request, most: int) -> list[int]:
        """Return zeros if the features of the previous token are kept."""
        end, _ = self._kept.get(request, (None, None))
        return super().guess(request, most) if end == request.held else []

    def round(self, number: int, parts: Sequence[Part], guesses: list[list[int]]) -> Tensor | None:
        """Run the next module over all places, or the last module over the previous guess."""
        if not number:
            kept = ((part.request, part.start, self._kept.get(part.request)) for part in parts)
            self._row = {own: x[1] for own, start, x in kept if x is not None and x[0] == start}
        last = self.least_rounds
        if number >= last:
            pairs = zip(parts, guesses, strict=True)
            wanting = {part.request for part, own in pairs if _wants(part, own, number)}
            self._row = {own: x[-1:] for own, x in self._row.items() if own in wanting}
        spans, places = list[Span](), Places()
        for part, own in zip(parts, guesses, strict=True):
            if part.request not in self._row:
                continue
            count = len(self._row[part.request])
            start = part.start + max(0, number + 1 - last) - count
            text, first = [*part.request.tokens, *own], start + min(number + 1, last)
            fed = text[first : first + count]
            fed += [0] * (count - len(fed))  # not known yet; these places are read again
            spans.append(Span(request=part.request, start=start, fed=fed))
            places.append([count - 1] if _wants(part, own, number) else [])
        if not spans:
            return None
        features = torch.cat([self._row[span.request] for span in spans])
        scores, row = self._runner.ahead(min(number + 1, last), features, spans, places)
        pieces = row.split([len(span.fed) for span in spans])
        self._row = {span.request: x for span, x in zip(spans, pieces, strict=True)}
        return scores

    def keep(self, parts: Sequence[Part]) -> None:
        """Keep the features of accepted tokens, and of earlier tokens for the next pass."""
        assert self._runner.features is not None, "the pass had them"  # noqa: S101
        pieces = self._runner.features[0].split([len(part.fed) for part in parts])
        for part, own in zip(parts, pieces, strict=True):
            request = part.request
            end, before = self._kept.pop(request, (None, own[:0]))
            if request.state is None:
                continue
            again = self.least_rounds - 1 if end == part.start else 0
            rows = before[len(before) - min(again, len(before)) :], own[: request.held - part.start]
            self._kept[request] = request.held, torch.cat(rows)

    def unseen(self, part: Part, chosen: int) -> int:
        """Return the tokens of the pass, and the earlier ones that it reads again."""
        return part.count + max(0, chosen - 1) + self.least_rounds - 1


def drafter_of(runner: Runner, options: EngineOptions, vocab_size: int) -> NgramDrafter | None:
    """Return the drafter of the next tokens; None without guesses.

    Args:
        runner: The engine's model.
        options: Sizes and switches.
        vocab_size: Number of tokens to choose from.

    Raises:
        ValueError: The model can't take guesses back, or the options name no possible drafter.
    """
    how = options.speculate
    if how is None:
        return None
    name = type(how).__name__ if isinstance(how, GPT) else how
    if problem := _obstacle(runner, how):
        raise ValueError(f"speculate={name}: {problem}")
    if how == "mtp":
        return MTPDrafter(runner, options, vocab_size)
    if not isinstance(how, GPT):
        return NgramDrafter(options)
    guessing = Runner(how, replace(options, speculate=None), runner.state, runner.blocks)
    if guessing.has_states or guessing.by_length:
        raise ValueError(
            f"speculate={name}: its recurrent layers, or keys that depend on the length of the "
            "text, take no guess back; use a model with attention alone"
        )
    return ModelDrafter(guessing, options, vocab_size)


def _obstacle(runner: Runner, how: object) -> str | None:
    """Return the reason why a model's tokens can't be guessed in this way; None if they can."""
    config = runner.model.config
    if runner.by_length:
        return (
            "keys of the model depend on the length of the text, so it takes no guess back; "
            "leave speculate out"
        )
    if how == "mtp":
        if runner.model.layer_range != range(config.num_layers):
            return "modules of mtp need the features of all layers; use tp in place of pp"
        mixers = [layer.mixer for layer in config.mtp_layers]
        if mixers and all(mixer is None or mixer.token_cache for mixer in mixers):
            return None
        return "the model has no modules of mtp, or recurrent ones; train it with model.mtp"
    if not isinstance(how, GPT):
        is_known = how == "ngram"
        return None if is_known else "use ngram, mtp or a model; Engine.from_folder takes a folder"
    if how.config.vocab_size != config.vocab_size:
        return (
            f"its vocabulary has {how.config.vocab_size} tokens, and the model's "
            f"{config.vocab_size}; use one with the same tokenizer"
        )
    if config.encoder_layers or how.config.encoder_layers:
        return "a model guesses for a decoder, and not behind an encoder; use ngram"
    if how.config.images is not None and how.config.images != config.images:
        return "it takes other images than the model; use one that takes none, or the same"
    return None


def _wants(part: Part, guesses: Sequence[int], number: int) -> bool:
    """Return whether a part wants another guess after `number` guesses."""
    return len(part.drafts) > number == len(guesses)


def _cut(part: Part, answer: Answer) -> Part:
    """Return a part with the guesses that its grammar allows."""
    if answer.grammar is None or not part.drafts:
        return part
    return replace(part, drafts=tuple(answer.grammar.cut(answer.tokens, part.drafts)))


def ngram_drafts(tokens: Sequence[int], most: int) -> list[int]:
    """Return the tokens that followed the last occurrence of the text's end.

    Args:
        tokens: The prompt and the continuation.
        most: Largest number of guesses.
    """
    recent = list(tokens[-_WINDOW:])
    for size in range(min(_LONGEST, len(recent) - 1), _SHORTEST - 1, -1):
        end = recent[-size:]
        for start in range(len(recent) - size - 1, -1, -1):
            if recent[start] == end[0] and recent[start : start + size] == end:
                return recent[start + size : start + size + most]
    return []
