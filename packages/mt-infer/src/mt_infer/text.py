"""Text to tokens and back: prompts, texts that end a continuation, and streams of text."""

from __future__ import annotations

from collections.abc import Sequence

from mt_model import ModelConfig
from mt_tokenizer import Tokenizer, TokenizerError

_DROPPED = 16  # tokens without text that a stop text may have inside
_CUT = "\ufffd"  # stands for a character with missing bytes


class PromptError(ValueError):
    """A prompt that the model can't continue."""


def encode_prompt(prompt: str, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Return the tokens of a prompt, in which names of special tokens stand for these tokens.

    An empty prompt becomes the end-of-document token, which also ends the text of an encoder.

    Raises:
        PromptError: The prompt is not valid text, or fills the model's context.
    """
    try:
        tokens = tokenizer.encode_prompt(prompt) or [tokenizer.eod_id]
    except TokenizerError as error:
        raise PromptError(f"the prompt is not valid text: {error}") from error
    if config.encoder_layers and tokens[-1] != tokenizer.eod_id:
        tokens.append(tokenizer.eod_id)
    check_prompt(tokens, config)
    return tokens


def check_prompt(tokens: Sequence[int], config: ModelConfig, *, fills: bool = False) -> None:
    """Refuse tokens that the model can't continue.

    Args:
        tokens: The tokens.
        config: Config of the model.
        fills: Whether they may fill the context, as for a single token after them.

    Raises:
        PromptError: There are no tokens or too many, or the model doesn't know one.
    """
    limit = config.max_sequence_length
    most = limit if config.encoder_layers or fills else limit - 1
    if not tokens:
        raise PromptError("the prompt has no tokens; give one or more")
    if len(tokens) > most:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, the model's context {limit}; "
            f"shorten it to at most {most} tokens"
        )
    check_tokens(tokens, config)


def check_tokens(tokens: Sequence[int], config: ModelConfig) -> None:
    """Refuse tokens that the model doesn't know."""
    wrong = next((each for each in tokens if not 0 <= each < config.vocab_size), None)
    if wrong is not None:
        raise PromptError(
            f"the prompt has the token {wrong}, and the model's are 0 to {config.vocab_size - 1}; "
            "use the tokenizer with which it was trained"
        )


class StopTexts:
    """Texts that end a continuation.

    Args:
        texts: The texts; without texts nothing is ended.
        tokenizer: The tokenizer of the continuation.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.texts, self._tokenizer = tuple(texts), tokenizer
        # A token has at least one byte, except for tokens that a decoder drops.
        self._window = max((len(text.encode()) for text in texts), default=0) + _DROPPED

    def cut(self, tokens: list[int]) -> str | None:
        """Return the text of tokens before the first of the stop texts; None if it has none.

        It is called after each token, so it looks only at the last tokens.
        """
        if not self.texts or not self._found(self._tokenizer.decode(tokens[-self._window :])):
            return None
        text = self._tokenizer.decode(tokens)
        found = self._found(text)
        return text[: min(found)] if found else None

    def held_back(self, text: str) -> int:
        """Return the length of the text's end that may begin a stop text."""
        sizes = range(min(len(text), max(map(len, self.texts), default=0)), 0, -1)
        return next((n for n in sizes if any(each.startswith(text[-n:]) for each in self.texts)), 0)

    def _found(self, text: str) -> list[int]:
        places = (text.find(each) for each in self.texts)
        return [place for place in places if place >= 0]


class TextStream:
    """The text of a continuation, token by token.

    Only whole characters are returned, and no beginning of a stop text.

    Args:
        tokenizer: The tokenizer of the continuation.
        stops: Texts that end it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopTexts) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._first = self._read = 0  # tokens of the window, and tokens whose text is known
        self._given = self._waiting = ""

    def next(self, tokens: list[int]) -> str:
        """Return the new text, given all tokens so far."""
        known = self._tokenizer.decode(tokens[self._first : self._read])
        text = self._tokenizer.decode(tokens[self._first :])
        if text.endswith(_CUT):
            return ""
        self._first, self._read = self._read, len(tokens)
        self._waiting += text[len(known) :]
        end = len(self._waiting) - self._stops.held_back(self._waiting)
        new, self._waiting = self._waiting[:end], self._waiting[end:]
        self._given += new
        return new

    def rest(self, text: str) -> str:
        """Return the end of the whole text that has not been returned yet."""
        return text[len(self._given) :]
