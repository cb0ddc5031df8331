"""Fields of a body for the choice of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from mt_files import Checks

from mt_infer.forms.bodies import Form
from mt_infer.sampling import Sampling

_MOST_N = 128
MOST_TOP = 20
_MOST_WORDS = 1024
_HOTTEST = 100.0
_COLDEST = 1e-3


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of a stream.

    Attributes:
        include_usage: Whether the last chunk has the numbers of tokens.
        include_obfuscation: Ignored; nothing is padded.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """The form of an answer of `/v1/chat/completions`."""


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """The form of an answer of `/v1/responses`."""


@dataclass(frozen=True, kw_only=True)
class TextFormat(ResponseFormat, OutputFormat):
    """Any text."""

    type_name: ClassVar[str] = "text"


@dataclass(frozen=True, kw_only=True)
class JsonFormat(ResponseFormat, OutputFormat):
    """Any JSON object."""

    type_name: ClassVar[str] = "json_object"


@dataclass(frozen=True, kw_only=True)
class SchemaFields:
    """A JSON schema.

    Attributes:
        name: Name of the schema.
        schema: The schema; the answer always follows it, as if `strict` were true.
        description: Purpose of the answer.
        strict: Whether the answer must follow the schema.
    """

    name: str
    schema: Mapping[str, Any]
    description: str = ""
    strict: bool = True


@dataclass(frozen=True, kw_only=True)
class NamedSchema(SchemaFields):
    """The schema of an answer."""


@dataclass(frozen=True, kw_only=True)
class SchemaFormat(ResponseFormat):
    """JSON by a schema.

    Attributes:
        json_schema: The schema.
    """

    type_name: ClassVar[str] = "json_schema"

    json_schema: NamedSchema


@dataclass(frozen=True, kw_only=True)
class Choosing(Form):
    """Fields of a body for the choice of tokens; see `Sampling`.

    Attributes:
        model: Name of the served model or of an adapter; empty for the model.
        stop: Texts that end the answer.
        response_format: Form of the answer.
        stream: Whether the answer comes in events.
        stream_options: Options of the stream.
        cache_salt: Only requests with the same salt share cached prompts.
        deadline_s: Seconds after which the answer ends, complete or not.
        receipt: Whether the answer has a receipt, with which `mt-infer replay` makes it again.
    """

    model: str = ""
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    n: int = 1
    regex: str | None = None
    grammar: str | None = None
    response_format: ResponseFormat = field(default_factory=TextFormat)
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    cache_salt: str = ""
    deadline_s: float | None = None
    receipt: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        self._check(checks)
        checks.done()
        self.sampling()

    def _check(self, checks: Checks) -> None:
        checks.at_most(_MOST_N, "n")
        checks.at_most(_HOTTEST, "temperature")
        if 0 < self.temperature < _COLDEST:
            checks.add("temperature", f"{self.temperature} is too small; use 0, or {_COLDEST} on")
        checks.above(0, "deadline_s")
        for name in ("presence_penalty", "frequency_penalty"):
            checks.at_least(-_HOTTEST, name)
            checks.at_most(_HOTTEST, name)
        checks.at_least(_COLDEST, "repetition_penalty")
        checks.at_most(_HOTTEST, "repetition_penalty")
        for token, bias in self.logit_bias.items():
            if not token.isascii() or not token.isdigit():
                checks.add("logit_bias", f"the key {token[:40]!r} is no number of a token")
            elif abs(bias) > _HOTTEST:
                checks.add("logit_bias", f"{bias} is out of range; use -100 to 100")
        for name in ("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            found = getattr(self, name)
            if not isinstance(found, str) and len(found) > _MOST_WORDS:
                checks.add(name, f"{len(found)} entries are too many; use at most {_MOST_WORDS}")

    def sampling(self, **more: Any) -> Sampling:
        """Return the parameters of the choice, with those that a route adds.

        Raises:
            FieldError: A value is out of its range.
        """
        own = {name: getattr(self, name) for name in _SAME}
        if isinstance(self.response_format, JsonFormat):
            own["json_schema"] = {"type": "object"}
        if isinstance(self.response_format, SchemaFormat):
            own["json_schema"] = self.response_format.json_schema.schema
        return Sampling(**{**own, **more})


_SAME = {each.name for each in fields(Choosing)} & {each.name for each in fields(Sampling)}
