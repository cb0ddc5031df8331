"""From a YAML file and overrides to a checked `RunConfig`, a model and a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from mt_data import load_tokenizer
from mt_model import AttentionConfig, ModelConfig, gpt, preset
from mt_parallel_state import ParallelLayout

from mt_train.binding import Binder
from mt_train.config import RunConfig, divisors
from mt_train.document import apply_overrides, read_document
from mt_train.problem import ConfigError

T = TypeVar("T")
_VOCAB_MULTIPLE = 128
STANDARD_LIBRARY = "standard-library"


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A checked configuration that can still say where each field was written."""

    config: RunConfig
    path: Path
    _binder: Binder

    def error(self, field: str, text: str) -> ConfigError:
        """Make the error for one field found wrong later (world size, a missing file)."""
        binder = Binder(self._binder.root)
        binder.places = self._binder.places
        binder.add(field, text)
        return ConfigError(binder.problems)

    def resolve(self, path: str) -> Path:
        """Read a path of the configuration relative to the YAML file's folder."""
        return self.path.parent / Path(path).expanduser()

    def check_files(self) -> None:
        """Check that every path the configuration names exists."""
        data, checkpoint = self.config.data, self.config.checkpoint
        wanted: list[tuple[str, Path]] = []
        if data.corpus is not None and data.corpus != STANDARD_LIBRARY:
            wanted.append(("data.corpus", self.resolve(data.corpus)))
        for i, prefix in enumerate(data.train):
            wanted += [(f"data.train[{i}]", self.resolve(prefix + end)) for end in (".bin", ".idx")]
        if data.validation is not None:
            wanted += [
                ("data.validation", self.resolve(data.validation + end)) for end in (".bin", ".idx")
            ]
        if data.tokenizer is not None:
            wanted.append(("data.tokenizer", self.resolve(data.tokenizer)))
        if checkpoint.load is not None:
            wanted.append(("checkpoint.load", self.resolve(checkpoint.load)))
        problems = [
            self.error(
                field, f"{path} does not exist; paths are relative to the YAML file"
            ).problems[0]
            for field, path in wanted
            if not path.exists()
        ]
        if problems:
            raise ConfigError(problems)

    def model(self, vocab_size: int) -> ModelConfig:
        """Build the model configuration; `vocab_size` is the tokenizer's."""
        padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        given = self.config.model.vocab_size
        if given is not None and given < vocab_size:
            text = f"{given} is below the tokenizer's {vocab_size}; leave it out or raise it"
            raise self.error("model.vocab_size", text)
        return self._try("model", lambda: build_model(self.config, given or padded))

    def layout(self, world_size: int) -> ParallelLayout:
        """Fit the parallel section to a number of processes."""
        p = self.config.parallel
        if p.dp is not None and p.tp * p.pp * p.cp * p.dp != world_size:
            needed = p.tp * p.pp * p.cp * p.dp
            raise self.error(
                "parallel.dp",
                f"tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp} needs {needed} processes, but "
                f"there are {world_size}; run with --nproc {needed}, or leave parallel.dp out",
            )
        return self._try(
            "parallel",
            lambda: ParallelLayout.fit(
                world_size, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, order=p.order
            ),
        )

    def check_world(self, world_size: int) -> None:
        """Check before starting processes that the layout fits them."""
        self.check_layout(self.model(self._planned_vocab_size()), self.layout(world_size))

    def _planned_vocab_size(self) -> int:
        data = self.config.data
        if data.tokenizer is None:
            return data.vocab_size
        return load_tokenizer(self.resolve(data.tokenizer)).vocab_size

    def check_layout(self, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check what joins model, batch and layout."""
        training = self.config.training
        per_step = training.micro_batch_size * layout.dp
        if training.global_batch_size % per_step:
            raise self.error(
                "training.global_batch_size",
                f"{training.global_batch_size} is not divisible by micro_batch_size "
                f"{training.micro_batch_size} x dp {layout.dp} = {per_step}; "
                f"use a multiple of {per_step}",
            )
        if layout.pp > len(model.layers):
            text = f"{layout.pp} stages for {len(model.layers)} layers; use at most one per layer"
            raise self.error("parallel.pp", text)
        for name, value in _tensor_parallel_sizes(model):
            if value % layout.tp:
                text = f"{layout.tp} does not divide model.{name} {value}; use {divisors(value)}"
                raise self.error("parallel.tp", text)

    def _try(self, field: str, build: Callable[[], T]) -> T:
        try:
            return build()
        except (ValueError, TypeError) as error:
            raise self.error(_blame(self.config, field, str(error)), str(error)) from error


def load_config(path: Path, overrides: list[str] | None = None) -> LoadedConfig:
    """Read, override and check a run configuration.

    Args:
        path: The YAML file.
        overrides: `section.key=value` strings, applied over the file.

    Raises:
        ConfigError: All problems of the file in one pass.
    """
    root = read_document(path)
    apply_overrides(root, overrides or [])
    binder = Binder(root)
    config = binder.section(RunConfig, root)
    if config is None:
        raise ConfigError(binder.problems)
    loaded = LoadedConfig(config=config, path=path, _binder=binder)
    loaded.check_files()
    loaded.model(loaded._planned_vocab_size())
    return loaded


def build_model(config: RunConfig, vocab_size: int) -> ModelConfig:
    """Turn the model section into a typed layer list."""
    fields = {
        name: value
        for name, value in dataclasses.asdict(config.model).items()
        if value is not None and name != "preset"
    }
    fields["vocab_size"] = vocab_size
    fields["max_sequence_length"] = config.training.sequence_length
    name = config.model.preset
    return preset(name, **fields) if name is not None else gpt(**fields)


def to_yaml(config: RunConfig) -> str:
    """Write a configuration with every default filled in; it loads back to the same value."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _blame(config: RunConfig, section: str, message: str) -> str:
    """Point a deeper package's message at the field whose name it mentions."""
    names = [item.name for item in dataclasses.fields(getattr(config, section))]
    mentioned = [name for name in names if name in message]
    return f"{section}.{min(mentioned, key=message.index)}" if mentioned else section


def _tensor_parallel_sizes(model: ModelConfig) -> list[tuple[str, int]]:
    sizes = [("vocab_size", model.vocab_size)]
    for layer in model.layers:
        if isinstance(layer.mixer, AttentionConfig):
            sizes.append(("num_heads", layer.mixer.num_heads))
            sizes.append(("num_kv_heads", layer.mixer.num_kv_heads))
        if layer.feed_forward is not None:
            sizes.append(("ffn_size", layer.feed_forward.ffn_size))
    return list(dict.fromkeys(sizes))
