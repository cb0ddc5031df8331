"""From a YAML file and overrides to a checked `RunConfig`, a model and a layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from mt_files import (
    MAX_PROBLEMS,
    Bound,
    FieldError,
    FieldProblem,
    FileError,
    bind,
    divisors,
    shorten,
    to_plain,
)
from mt_model import (
    ExchangeError,
    ModelConfig,
    RecomputePlan,
    describe_pretrained,
    gpt,
    gpt_arguments,
    preset,
    validate_context,
    validate_split,
)

from mt_train.config import UNIFORM_FIELDS, ModelSection, RunConfig
from mt_train.document import COMMAND_LINE, Document, apply_overrides, read_document
from mt_train.limits import listed
from mt_train.parallel_section import ParallelSection
from mt_train.problem import ConfigError

if TYPE_CHECKING:  # checking a file takes no torch
    from mt_parallel_state import ParallelLayout

_VOCAB_MULTIPLE = 128
_MAX_SCHEDULE = 1 << 20  # forward passes of one step over all stages
_SHARED_ATTENTION = ("auto", "tiles", "reference")  # of ranks that share sequences
STANDARD_LIBRARY = "standard-library"
# Arguments of the model's builder that are not named like their field.
_ELSEWHERE = {"max_sequence_length": "training.sequence_length"}


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A checked configuration that can still say where each field was written.

    Attributes:
        config: The run; its paths are absolute.
        path: The YAML file.
    """

    config: RunConfig
    path: Path
    _document: Document

    def error(self, field: str, text: str) -> ConfigError:
        """Make the error for one field found wrong later (world size, a missing file)."""
        return ConfigError([_problem(self._document, field, text)])

    def model(self, vocab_size: int) -> ModelConfig:
        """Build the model configuration; `vocab_size` is the tokenizer's.

        Raises:
            ConfigError: Sizes that do not fit each other.
        """
        given = self.config.model.vocab_size
        if given is not None and given < vocab_size:
            text = f"{given} is below the tokenizer's {vocab_size}; leave it out or raise it"
            raise self.error("model.vocab_size", text)
        rounded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if self.config.model.from_ is not None or self.config.model.vocab_multiple is not None:
            rounded = vocab_size
        length = self.config.training.sequence_length
        try:
            model = build_model(self.config.model, given or rounded, length)
        except (ExchangeError, FileError) as error:
            raise self.error("model.from", str(error)) from error
        except FieldError as error:
            found = [(_ELSEWHERE.get(k, f"model.{k}"), v) for k, v in error.errors.items()]
            raise ConfigError([_problem(self._document, *pair) for pair in found]) from error
        if any(not getattr(layer.mixer, "causal", True) for layer in model.layers):
            text = "false lets tokens see those that they are to predict; leave it out"
            raise self.error("model.layers" if self.config.model.layers else "model.causal", text)
        if self.config.optimizer.qk_clip is not None and not any(clipped_heads(model)):
            text = "does not go with model.qk_norm, whose norms undo what it does to the weights "
            text += "and bound the scores by themselves; leave one of them out"
            raise self.error("optimizer.qk_clip", text)
        return model

    def resolved(self) -> RunConfig:
        """Return the configuration with the model's defaults filled in, those of a preset too.

        The vocabulary of a tokenizer that is yet to be trained stays open.
        """
        model, section = self.model(planned_vocab_size(self)), self.config.model
        if section.from_ is not None:
            both = {"vocab_multiple": model.vocab_multiple, "dropout": model.dropout}
            return dataclasses.replace(self.config, model=dataclasses.replace(section, **both))
        is_known = section.vocab_size is not None or self.config.data.tokenizer is not None
        arguments = gpt_arguments(model)
        del arguments["max_sequence_length"]  # training.sequence_length
        for name in ("rope", "score_bias"):
            if arguments.get(name) is not None:
                arguments[name] = getattr(model.layers[0].mixer, name)
        if section.layers or "layers" in arguments:  # a preset may have layers that differ, too
            arguments |= dict.fromkeys(UNIFORM_FIELDS)
            arguments["layers"] = tuple(replace(layer, repeat=n) for layer, n in model.runs)
        arguments["vocab_size"] = model.vocab_size if is_known else None
        arguments["vocab_multiple"] = section.vocab_multiple  # without it the size is rounded
        filled = replace(section, **arguments)
        return replace(self.config, model=filled)

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
        from mt_parallel_state import ParallelLayout

        try:  # the sizes fit, so only the order can be wrong
            return ParallelLayout.fit(world_size, tp=p.tp, pp=pp, cp=p.cp, ep=p.ep, order=p.order)
        except ValueError as error:
            raise self.error("parallel.order", str(error)[:500]) from error

    def check_world(self, world_size: int) -> None:
        """Check before starting processes that the layout fits them and the model.

        Raises:
            ConfigError: Everything that does not fit.
        """
        layout = self.layout(world_size)
        self.check_layout(self.model(planned_vocab_size(self)), layout)

    def check_layout(self, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check what joins model, batch and layout.

        Raises:
            ConfigError: Everything that does not fit.
        """
        found = [_problem(self._document, *pair) for pair in _misfits(self.config, model, layout)]
        if found:
            raise ConfigError(found)


def _problem(document: Document, path: str, text: str) -> FieldProblem:
    return FieldProblem(path, text, document.place(path))


def load_config(path: Path, overrides: list[str] | None = None) -> LoadedConfig:
    """Read, override and check a run configuration.

    Paths in the file are relative to its folder, paths in overrides to the working directory.

    Args:
        path: The YAML file.
        overrides: `section.key=value` strings, applied over the file.

    Raises:
        ConfigError: All problems in one pass.
    """
    document = read_document(path)
    apply_overrides(document, overrides or [])
    bound: Bound[RunConfig] = bind(RunConfig, document.root)
    problems = [_problem(document, found.path, found.text) for found in bound.problems]
    paths = _Paths(document, path.parent, problems)
    sections: dict[str, Any] = {}
    if "data" in bound.parts:
        sections["data"] = paths.data(bound.parts["data"])
    if "model" in bound.parts and bound.parts["model"].from_ is not None:
        sections |= paths.pretrained(bound.parts["model"], sections.get("data"))
    if "export" in bound.parts:
        sections["export"] = paths.export(bound.parts["export"])
    if "optimizer" in bound.parts:
        sections["optimizer"] = paths.optimizer(bound.parts["optimizer"])
    if "checkpoint" in bound.parts:
        sections["checkpoint"] = paths.checkpoint(bound.parts["checkpoint"])
    logging = bound.parts.get("logging")
    if logging is not None and logging.tensorboard and find_spec("tensorboard") is None:
        text = "needs: pip install 'mt-train[tensorboard]'"
        problems.append(_problem(document, "logging.tensorboard", text))
    if bound.value is None:
        raise ConfigError(problems, bound.hidden)
    config = dataclasses.replace(bound.value, **sections)
    loaded = LoadedConfig(config=config, path=path, _document=document)
    if not any(problem.path in ("data.tokenizer", "model.from") for problem in problems):
        try:
            loaded.model(planned_vocab_size(loaded))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return loaded


class _Paths:
    """Makes the paths of sections absolute, and notes those that do not exist."""

    def __init__(self, document: Document, folder: Path, problems: list[FieldProblem]) -> None:
        self._document, self._folder, self._problems = document, folder.absolute(), problems

    def data(self, data: Any) -> Any:
        files = (".bin", ".idx")
        changes: dict[str, Any] = {
            "train": tuple(
                self._resolve(f"data.train[{i}]", prefix, files)
                for i, prefix in enumerate(data.train)
            )
        }
        if data.corpus is not None and data.corpus != STANDARD_LIBRARY:
            changes["corpus"] = self._resolve("data.corpus", data.corpus)
            self._check_glob(Path(changes["corpus"]), data.glob)
        if data.validation is not None:
            changes["validation"] = self._resolve("data.validation", data.validation, files)
        if data.tokenizer is not None:
            changes["tokenizer"] = self._resolve("data.tokenizer", data.tokenizer)
        return dataclasses.replace(data, **changes)

    def pretrained(self, model: Any, data: Any) -> dict[str, Any]:
        """Resolve the folder that the model is of, and take its tokenizer where none is named."""
        folder = self._resolve("model.from", model.from_)
        sections: dict[str, Any] = {"model": dataclasses.replace(model, from_=folder)}
        if any(problem.path == "model.from" for problem in self._problems):
            return sections
        try:
            found = describe_pretrained(folder)
            tokenizer, eod = found.tokenizer, found.eos_token
        except (ExchangeError, FileError) as error:
            self._add("model.from", str(error))
            return sections
        if data is not None and data.tokenizer is None and tokenizer is None:
            self._add("data.tokenizer", f"missing, and {shorten(folder, 200)} has none")
        elif data is not None and data.tokenizer is None:
            sections["data"] = dataclasses.replace(
                data, tokenizer=str(tokenizer), eod=data.eod or eod
            )
        return sections

    def export(self, export: Any) -> Any:
        if export.hugging_face is None:
            return export
        folder = self._resolve("export.hugging_face", export.hugging_face, ())
        return dataclasses.replace(export, hugging_face=folder)

    def optimizer(self, optimizer: Any) -> Any:
        if optimizer.offload_dir is None:
            return optimizer
        found = self._resolve("optimizer.offload_dir", optimizer.offload_dir)
        if Path(found).is_file():
            self._add("optimizer.offload_dir", f"{shorten(found, 200)} is no folder; write one")
        return dataclasses.replace(optimizer, offload_dir=found)

    def checkpoint(self, checkpoint: Any) -> Any:
        if checkpoint.load is None:
            return checkpoint
        load = self._resolve("checkpoint.load", checkpoint.load)
        return dataclasses.replace(checkpoint, load=load)

    def _check_glob(self, folder: Path, glob: str) -> None:
        """Note a glob that no file of a corpus folder matches, and what would match some."""
        try:
            if not folder.is_dir():
                return
        except OSError:  # said of the folder itself
            return
        try:
            if any(path.is_file() for path in folder.glob(glob)):
                return
        except (OSError, ValueError, NotImplementedError, IndexError, RecursionError) as error:
            why = shorten(str(error))
            self._add("data.glob", f"{shorten(glob)} is no glob: {why}; use e.g. **/*.txt")
            return
        found = itertools.islice((path for path in folder.rglob("*") if path.is_file()), 1000)
        endings = Counter(path.suffix for path in found if path.suffix)
        hint = f"data.glob=**/*{endings.most_common(1)[0][0]}" if endings else "data.glob=**/*"
        text = f"no file of {folder} matches {shorten(glob)}; try {hint}"
        self._add("data.glob", text)

    def _resolve(self, field: str, text: str, suffixes: tuple[str, ...] = ("",)) -> str:
        by_hand = self._document.place(field).startswith(COMMAND_LINE)
        origin = "the working directory" if by_hand else "the YAML file"
        try:
            path = (Path.cwd() if by_hand else self._folder) / Path(text).expanduser()
            missing = [suffix for suffix in suffixes if not Path(f"{path}{suffix}").exists()]
        except (RuntimeError, OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._add(field, f"{shorten(text)}: {reason}; write another path")
            return text
        for suffix in missing:
            shown = shorten(f"{path}{suffix}", 200).strip("'\"")
            self._add(field, f"{shown} does not exist; paths are relative to {origin}")
        return str(path)

    def _add(self, field: str, text: str) -> None:
        if len(self._problems) <= MAX_PROBLEMS:
            self._problems.append(_problem(self._document, field, text))


def build_model(section: ModelSection, vocab_size: int, sequence_length: int) -> ModelConfig:
    """Turn the model section into a typed layer list.

    Raises:
        FieldError: Sizes that do not fit each other.
    """
    if section.from_ is not None:
        return _model_of_folder(section, section.from_, vocab_size, sequence_length)
    out = ("layers", "from_")
    names = [item.name for item in dataclasses.fields(section) if item.name not in out]
    fields = {name: getattr(section, name) for name in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields |= {"vocab_size": vocab_size, "max_sequence_length": sequence_length}
    if section.layers:
        return gpt(layers=section.layers, **fields)
    chosen = fields.pop("preset", None)
    return gpt(**fields) if chosen is None else preset(chosen, **fields)


def _model_of_folder(
    section: ModelSection, folder: str, vocab_size: int, sequence_length: int
) -> ModelConfig:
    """Return the model of a Hugging Face folder, if the tokens and the sequences fit it."""
    model = describe_pretrained(folder).config
    if vocab_size > model.vocab_size:
        text = f"{shorten(folder, 200)} knows {model.vocab_size} tokens, and the tokenizer has "
        raise FieldError({"from": f"{text}{vocab_size}; use the tokenizer of that folder"})
    if sequence_length > model.max_sequence_length:
        text = f"{sequence_length} is longer than the model's {model.max_sequence_length}"
        raise FieldError({"max_sequence_length": text})
    multiple = section.vocab_multiple or model.usual_vocab_multiple
    return dataclasses.replace(model, vocab_multiple=multiple, dropout=section.dropout or 0.0)


def planned_vocab_size(loaded: LoadedConfig) -> int:
    """Return the size of the tokenizer: the given one's, or the one to be trained.

    Raises:
        ConfigError: The file is no tokenizer.
    """
    data = loaded.config.data
    if data.tokenizer is None:
        return data.vocab_size
    from mt_data import DataError, load_tokenizer

    try:
        return load_tokenizer(Path(data.tokenizer), eod=data.eod).vocab_size
    except (DataError, FileError) as error:
        raise loaded.error("data.tokenizer", str(error)) from error


def to_yaml(config: RunConfig) -> str:
    """Write a configuration with every default filled in; it loads back to the same value."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)


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
    else:
        microbatches = training.global_batch_size // per_step
        yield from _pipeline_misfits(config, model.num_layers, layout.pp, microbatches)
    try:
        RecomputePlan.of(training.recompute).check(model.num_layers)
    except FieldError as error:
        yield "training.recompute", "; ".join(f"{n}: {text}" for n, text in error.errors.items())
    ranks, replicas = layout.dp * layout.cp, config.data_parallel.replicas
    if ranks % replicas:
        yield (
            "data_parallel.replicas",
            f"{replicas} does not divide parallel.dp {layout.dp} x parallel.cp {layout.cp} = "
            f"{ranks}; use one of {listed(divisors(ranks))}",
        )
    try:
        validate_split(model, layout.tp)
    except ValueError as error:
        yield "parallel.tp", str(error)
        return
    yield from _context_misfits(config.parallel, model, layout)
    if layout.cp > 1 and training.attention not in _SHARED_ATTENTION:
        text = f"{training.attention} needs whole sequences, and {layout.cp} ranks share them; use "
        yield "training.attention", text + f"{' or '.join(_SHARED_ATTENTION)}, or parallel.cp 1"


def clipped_heads(model: ModelConfig) -> list[int]:
    """Return the key heads of each layer; 0 where scores do not grow with the weights."""
    mixers = (layer.mixer for layer in model.layers)
    scored = [m if getattr(m, "qk_norm", "") == "none" else None for m in mixers]
    return [getattr(m, "num_kv_heads", 0) for m in scored]


def _pipeline_misfits(
    config: RunConfig, num_layers: int, ranks: int, microbatches: int
) -> Iterator[tuple[str, str]]:
    """Yield why the schedule can't be made, before it is."""
    training = config.training
    stages = ranks * (config.pipeline.chunks or 1)
    if stages <= num_layers and microbatches * stages > _MAX_SCHEDULE:
        least = -(-microbatches * stages * training.micro_batch_size // _MAX_SCHEDULE)
        yield (
            "training.micro_batch_size",
            f"{training.micro_batch_size} cuts the global batch into {microbatches} micro-batches "
            f"for {stages} stages, more than {_MAX_SCHEDULE} pieces; use {least} or more",
        )
        return
    from mt_train.pipeline import plan_pipeline

    try:
        plan_pipeline(
            config.pipeline, ranks=ranks, microbatches=microbatches, num_layers=num_layers
        )
    except FieldError as error:
        yield from error.errors.items()


def _context_misfits(
    parallel: ParallelSection, model: ModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, str]]:
    """Yield what does not fit the ranks that share a sequence."""
    algorithms = parallel.cp_algorithms(model.num_layers)
    if len(algorithms) != model.num_layers:
        text = f"{len(algorithms)} algorithms for {model.num_layers} layers; give one for each"
        yield "parallel.cp_algorithm", text
        return
    inner = parallel.cp_inner or 1
    try:
        validate_context(model, algorithms, cp=layout.cp, inner=inner, tp=layout.tp)
    except ValueError as error:
        yield "parallel.cp_algorithm", str(error)
