"""A family of models: everything needed to read and write its folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mt_files import FieldProblem, bind, build, shorten, to_plain
from mt_model import ModelConfig, StackConfig

from mt_hf.family.error import ExchangeError
from mt_hf.family.known_fields import SortedFields, sort_fields
from mt_hf.family.link import Link

_SHOWN = 5  # differences in a message


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models of Hugging Face transformers.

    Attributes:
        name: Name of the family, in lower case.
        architectures: Names in `architectures` of config.json.
        model_types: Values of `model_type`; the name by default.
        fields: A frozen dataclass of the fields of config.json that change numbers, with the
            defaults of transformers. Other fields that transformers knows are refused, except
            those known to change nothing. Its `__post_init__` refuses unsupported values. No class
            may derive from it, as the binder would take the subclass for a kind of it.
        read: Function from the fields to the model.
        write: The inverse function; raises ValueError with the reason if a model is not of the
            family. An omission is noticed, because the result is read again and compared.
        links: Function from a model to its links between tensors and parameters.
        ignored: Suffixes, or prefixes such as `mtp.`, of tensors in a folder that are not read.
        copies: Tied tensors that a folder may store, each with the tensor that it equals.
        settle: Function from the model of config.json and the names of the folder's tensors to the
            model, if config.json leaves parts of it open.
        builds: Class of the config that `read` returns.
        wrapper: Optional prefix of all tensors' names.
        renames: Prefixes in folders of other versions, each with our prefix, applied in order.
        repeats: Function from a model to the `copies` to write, as transformers does not tie them.
        endings: Suffixes in folders of other versions, each with our suffix.
        refused: Unsupported architectures, each with the reason and a way out.
        like: Name of another family with the same models, which is the default for writing them.
        parts: Function from the content of config.json to the families of its parts, by field.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    fields: type[Any]
    read: Callable[[Any], StackConfig]
    write: Callable[[Any], Any]
    links: Callable[[Any], Iterable[Link]]
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)
    settle: Callable[[StackConfig, Collection[str]], StackConfig] | None = None
    builds: type[StackConfig] = ModelConfig
    wrapper: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    repeats: Callable[[Any], Mapping[str, str]] = lambda _: {}
    endings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    parts: Callable[[Mapping[str, Any]], Mapping[str, Family]] = lambda _: {}

    def __post_init__(self) -> None:
        if not self.model_types:
            object.__setattr__(self, "model_types", (self.name,))

    def ignores(self, name: str) -> bool:
        """Return whether a folder may contain a tensor that is not read."""
        beginnings = tuple(part for part in self.ignored if part.endswith("."))
        return name.endswith(self.ignored) or name.startswith(beginnings)

    def config_of(
        self, given: Mapping[str, Any], path: Path, names: Collection[str] | None = None
    ) -> StackConfig:
        """Return the model that a config.json describes.

        Args:
            given: Content of the config.json.
            path: The file, for messages.
            names: Names of the folder's tensors; None if they are unknown.

        Raises:
            ExchangeError: A field is unknown, or has a wrong type or an unsupported value; the
                message lists all problems.
        """
        try:
            rest = self._sorted(given).given
        except ValueError as error:
            raise ExchangeError(f"{path}: {error}") from error
        bound = bind(self.fields, rest)
        problems = [_refusal(found, rest) for found in bound.problems]
        if bound.value is not None:
            try:
                config = self.read(bound.value)
                if self.settle is None or names is None:
                    return config
                return self.settle(config, names)
            except ValueError as error:
                problems = [str(error)]
        lines = "\n  ".join(problems)
        raise ExchangeError(f"{path}: is no {self.name} model that mt builds:\n  {lines}")

    def unread(self, given: Mapping[str, Any]) -> list[str]:
        """Return the names in a config.json that neither transformers nor mt reads.

        Fields whose values switch nothing on are left out; fields of parts have the part's name
        before them, as `text_config.surprise`.
        """
        names = list(self._sorted(given).unread)
        for part, family in self.parts(given).items():
            names += [f"{part}.{name}" for name in family.unread(given[part])]
        return names

    def _sorted(self, given: Mapping[str, Any]) -> SortedFields:
        own = {item.name for item in dataclasses.fields(self.fields)}
        return sort_fields(given, own, self.model_types)

    def fields_of(self, config: StackConfig) -> dict[str, Any]:
        """Return the fields of config.json for a model.

        Raises:
            ValueError: The model is not of the family; the message lists the differences.
        """
        if not isinstance(config, self.builds):
            found, wanted = type(config).__name__, self.builds.__name__
            raise ValueError(f"it has a {wanted}, and not a {found}")  # noqa: TRY004
        plain = to_plain(self.write(config))
        again = self.read(build(self.fields, plain))
        lines = list(_differences(to_plain(comparable(config)), to_plain(comparable(again))))
        if lines:
            more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ValueError("; ".join(lines[:_SHOWN]) + more)
        return plain


def comparable(config: StackConfig) -> StackConfig:
    """Return a model without parts that change no logit, for a comparison.

    These are dropout, initial values, padding, the rounding of norms in bf16, weights of losses,
    routers' options for training, and modules that predict further tokens in training.
    """
    layers = tuple(
        replace(
            layer,
            mixer=layer.mixer and layer.mixer.evaluated,
            feed_forward=layer.feed_forward and layer.feed_forward.evaluated,
        )
        for layer in config.layers
    )
    same: dict[str, Any] = {"dropout": 0.0, "init_std": StackConfig.init_std, "embedding_std": None}
    if isinstance(config, ModelConfig):
        same |= {"vocab_multiple": 1, "z_loss": 0.0, "mtp": None}
        if config.images is not None:
            tower = comparable(config.images.tower)
            same["images"] = replace(config.images, tower=tower)
        if config.pooled_head is not None:
            same["pooled_head"] = replace(config.pooled_head, loss_weight=1.0)
    norm = replace(config.norm, rounds_first=False)
    return replace(config, layers=layers, norm=norm, **same)


def _refusal(problem: FieldProblem, given: Mapping[str, Any]) -> str:
    name = problem.path
    if problem.text.startswith("unknown key") and name in given:
        return (
            f"{name}: {shorten(given[name])}: transformers reads this field, and it is not known "
            "here; remove it if it changes nothing"
        )
    return str(problem)


def _differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two plain values."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in {**first, **second}:
            inner = f"{path}.{name}" if path else name
            yield from _differences(first.get(name), second.get(name), inner)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif first != second:
        yield f"{path} is {shorten(first)} and would be read as {shorten(second)}"
