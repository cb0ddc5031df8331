"""From a YAML file and overrides to a checked `RunConfig`, a model and a layout."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml
from mt_data import DataError, load_tokenizer
from mt_files import FieldError
from mt_model import ModelConfig, gpt, preset, validate_split
from mt_parallel_state import ParallelLayout

from mt_train.binding import Binder
from mt_train.config import ModelSection, ParallelSection, RunConfig
from mt_train.document import COMMAND_LINE, apply_overrides, read_document
from mt_train.pipeline import PipelineError, plan_pipeline
from mt_train.problem import ConfigError

T = TypeVar("T")
_VOCAB_MULTIPLE = 128
STANDARD_LIBRARY = "standard-library"


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A checked configuration that can still say where each field was written.

    Attributes:
        config: The run; its paths are absolute.
        path: The YAML file.
    """

    config: RunConfig
    path: Path
    _binder: Binder

    def error(self, field: str, text: str) -> ConfigError:
        """Make the error for one field found wrong later (world size, a missing file)."""
        return ConfigError([self._binder.problem(field, text)])

    def model(self, vocab_size: int) -> ModelConfig:
        """Build the model configuration; `vocab_size` is the tokenizer's."""
        given = self.config.model.vocab_size
        if given is not None and given < vocab_size:
            text = f"{given} is below the tokenizer's {vocab_size}; leave it out or raise it"
            raise self.error("model.vocab_size", text)
        rounded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        length = self.config.training.sequence_length
        return self._try("model", lambda: build_model(self.config.model, given or rounded, length))

    def layout(self, world_size: int) -> ParallelLayout:
        """Fit the parallel section to a number of processes."""
        p, pp = self.config.parallel, self.config.pp
        model_ranks = p.tp * pp * p.cp
        if p.dp is None and world_size % model_ranks:
            axes = (f"parallel.{name}" for name in ("tp", "cp", "pp") if getattr(p, name) > 1)
            raise self.error(
                next(axes, "pipeline.stages"),
                f"tp {p.tp} x pp {pp} x cp {p.cp} needs {model_ranks} processes or a multiple, but "
                f"there {'is' if world_size == 1 else 'are'} {world_size}; run with --nproc "
                f"{model_ranks}",
            )
        if p.dp is not None and p.tp * pp * p.cp * p.dp != world_size:
            needed = p.tp * pp * p.cp * p.dp
            raise self.error(
                "parallel.dp",
                f"tp {p.tp} x pp {pp} x cp {p.cp} x dp {p.dp} needs {needed} processes, but "
                f"there are {world_size}; run with --nproc {needed}, or leave parallel.dp out",
            )
        return self._try(
            "parallel",
            lambda: ParallelLayout.fit(world_size, tp=p.tp, pp=pp, cp=p.cp, ep=p.ep, order=p.order),
        )

    def check_world(self, world_size: int) -> None:
        """Check before starting processes that the layout fits them and the model.

        Raises:
            ConfigError: Everything that does not fit.
        """
        layout = self.layout(world_size)
        self.check_layout(self.model(_planned_vocab_size(self.config)), layout)

    def check_layout(self, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check what joins model, batch and layout.

        Raises:
            ConfigError: Everything that does not fit.
        """
        found = [self._binder.problem(*pair) for pair in _misfits(self.config, model, layout)]
        if found:
            raise ConfigError(found)

    def _try(self, field: str, build: Callable[[], T]) -> T:
        try:
            return build()
        except FieldError as error:
            problems = [(f"{field}.{name}", text) for name, text in error.errors.items()]
            raise ConfigError([self._binder.problem(*pair) for pair in problems]) from error
        except (ValueError, TypeError) as error:
            raise self.error(_blame(self.config, field, str(error)), str(error)) from error


def load_config(path: Path, overrides: list[str] | None = None) -> LoadedConfig:
    """Read, override and check a run configuration.

    Paths in the file are relative to its folder, paths in overrides to the working directory.

    Args:
        path: The YAML file.
        overrides: `section.key=value` strings, applied over the file.

    Raises:
        ConfigError: All problems in one pass.
    """
    root = read_document(path)
    apply_overrides(root, overrides or [])
    binder = Binder(root)
    config = binder.section(RunConfig, root)
    sections = dict(binder.sections)
    paths = _Paths(binder, path.parent)
    for name, resolve in (("data", paths.data), ("checkpoint", paths.checkpoint)):
        if name in sections:
            sections[name] = resolve(sections[name])
    if getattr(sections.get("logging"), "tensorboard", False) and find_spec("tensorboard") is None:
        binder.add("logging.tensorboard", "needs: pip install 'mt-train[tensorboard]'")
    loaded = None
    if config is not None:
        config = dataclasses.replace(config, **sections)
        loaded = LoadedConfig(config=config, path=path, _binder=binder)
        if not any(problem.path == "data.tokenizer" for problem in binder.problems):
            try:
                loaded.model(_planned_vocab_size(config))
            except ConfigError as error:
                binder.problems += error.problems
            except DataError as error:
                binder.add("data.tokenizer", str(error))
    if loaded is None or binder.problems:
        raise ConfigError(binder.problems)
    return loaded


class _Paths:
    """Makes the paths of sections absolute, and notes those that do not exist."""

    def __init__(self, binder: Binder, folder: Path) -> None:
        self._binder, self._folder = binder, folder.absolute()

    def data(self, data: Any) -> Any:
        changes: dict[str, Any] = {
            "train": tuple(
                self._resolve(f"data.train[{i}]", prefix, (".bin", ".idx"))
                for i, prefix in enumerate(data.train)
            )
        }
        if data.corpus is not None and data.corpus != STANDARD_LIBRARY:
            changes["corpus"] = self._resolve("data.corpus", data.corpus)
        if data.validation is not None:
            changes["validation"] = self._resolve(
                "data.validation", data.validation, (".bin", ".idx")
            )
        if data.tokenizer is not None:
            changes["tokenizer"] = self._resolve("data.tokenizer", data.tokenizer)
        return dataclasses.replace(data, **changes)

    def checkpoint(self, checkpoint: Any) -> Any:
        if checkpoint.load is None:
            return checkpoint
        load = self._resolve("checkpoint.load", checkpoint.load)
        return dataclasses.replace(checkpoint, load=load)

    def _resolve(self, field: str, text: str, suffixes: tuple[str, ...] = ("",)) -> str:
        by_hand = self._binder.place(field).startswith(COMMAND_LINE)
        origin = "the working directory" if by_hand else "the YAML file"
        try:
            path = (Path.cwd() if by_hand else self._folder) / Path(text).expanduser()
        except RuntimeError as error:
            self._binder.add(field, f"{text!r}: {error}; write the path out")
            return text
        for suffix in suffixes:
            if not Path(f"{path}{suffix}").exists():
                self._binder.add(
                    field, f"{path}{suffix} does not exist; paths are relative to {origin}"
                )
        return str(path)


def build_model(section: ModelSection, vocab_size: int, sequence_length: int) -> ModelConfig:
    """Turn the model section into a typed layer list."""
    fields = {
        name: value
        for name, value in dataclasses.asdict(section).items()
        if value is not None and name != "preset"
    }
    fields |= {"vocab_size": vocab_size, "max_sequence_length": sequence_length}
    return preset(section.preset, **fields) if section.preset is not None else gpt(**fields)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Turn a configuration into plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def to_yaml(config: RunConfig) -> str:
    """Write a configuration with every default filled in; it loads back to the same value."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def _planned_vocab_size(config: RunConfig) -> int:
    if config.data.tokenizer is None:
        return config.data.vocab_size
    return load_tokenizer(Path(config.data.tokenizer)).vocab_size


def _misfits(
    config: RunConfig, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of what does not fit the layout."""
    training = config.training
    per_step = training.micro_batch_size * layout.dp
    if training.global_batch_size % per_step:
        yield (
            "training.global_batch_size",
            f"{training.global_batch_size} is not divisible by micro_batch_size "
            f"{training.micro_batch_size} x dp {layout.dp} = {per_step}; "
            f"use a multiple of {per_step}",
        )
    elif layout.pp > len(model.layers):
        text = f"{layout.pp} stages for {len(model.layers)} layers; use at most one per layer"
        yield "parallel.pp" if config.pipeline.stages is None else "pipeline.stages", text
    else:
        try:
            plan_pipeline(
                config.pipeline,
                ranks=layout.pp,
                microbatches=training.global_batch_size // per_step,
                num_layers=len(model.layers),
            )
        except PipelineError as error:
            yield error.field, str(error)
    try:
        validate_split(model, layout.tp)
    except ValueError as error:
        yield "parallel.tp", str(error)
        return
    yield from _context_misfits(config.parallel, model, layout)


def _context_misfits(
    parallel: ParallelSection, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield what does not fit the ranks that share a sequence."""
    algorithms = parallel.cp_algorithms(model.num_layers)
    if len(algorithms) != model.num_layers:
        text = f"{len(algorithms)} algorithms for {model.num_layers} layers; give one for each"
        yield "parallel.cp_algorithm", text
        return
    swapping = {"ulysses": layout.cp, "hierarchical": parallel.cp_inner or 1}
    for layer, algorithm in zip(model.layers, algorithms, strict=True):
        ranks = swapping.get(algorithm, 1)
        heads = layer.mixer.num_heads // layout.tp
        groups = max(1, layer.mixer.num_kv_heads // layout.tp)
        if heads % ranks or (groups % ranks and ranks % groups):
            yield (
                "parallel.cp_algorithm",
                f"{algorithm} shares {heads} heads and {groups} key/value heads per tp rank out "
                f"to {ranks} ranks, and they do not divide; use ring or all_gather",
            )
            return


def _blame(config: RunConfig, section: str, message: str) -> str:
    """Point a deeper package's message at the field whose name it mentions."""
    names = [item.name for item in dataclasses.fields(getattr(config, section))]
    mentioned = [name for name in names if name in message]
    return f"{section}.{min(mentioned, key=message.index)}" if mentioned else section
