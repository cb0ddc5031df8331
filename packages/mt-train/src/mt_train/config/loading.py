"""From a YAML file and overrides to a checked `RunConfig`, a model and a layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from mt_files import (
    MAX_PROBLEMS,
    Bound,
    Document,
    FieldError,
    FieldProblem,
    FileError,
    bind,
    object_url,
    shorten,
    to_plain,
)
from mt_hf import ExchangeError, find_folder, is_hub_id, read_description
from mt_model import (
    PRESETS,
    ModelConfig,
    MoEConfig,
    PluginError,
    load_installed_plugins,
    load_plugin,
    model_of,
    preset,
)

from mt_train.config.document import COMMAND_LINE, apply_overrides, read_document
from mt_train.config.kinds.registry import key_of_another_kind, load_installed_kinds, with_kind
from mt_train.config.kinds.section import DataSection
from mt_train.config.limits import MODEL, PATH, STORED
from mt_train.config.misfits import clipped_heads, layout_misfits
from mt_train.config.model_section import ModelSection
from mt_train.config.optimizer_section import OptimizerSection
from mt_train.config.other_names import hinted
from mt_train.config.run_config import RunConfig
from mt_train.problem import ConfigError

if TYPE_CHECKING:  # checking a file takes no torch
    from mt_parallel_state import ParallelLayout

_VOCAB_MULTIPLE = 128
STANDARD_LIBRARY = "standard-library"
# Arguments of the model's builder that are not named like their field.
_ELSEWHERE = {"max_sequence_length": "training.sequence_length"}


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A checked configuration that knows where each field was written.

    Attributes:
        config: The run; its paths are absolute.
        path: The YAML file.
        plugins: SHA-256 of each file of `plugins`, by its path.
    """

    config: RunConfig
    path: Path
    plugins: Mapping[str, str]
    _document: Document

    def error(self, field: str, text: str) -> ConfigError:
        """Make the error for a field that is found wrong later (world size, a missing file)."""
        return ConfigError([_problem(self._document, field, text)])

    def model(self, vocab_size: int) -> ModelConfig:
        """Build the model configuration; `vocab_size` is the tokenizer's.

        Raises:
            ConfigError: Sizes that do not fit each other.
        """
        given, extra = self.config.model.vocab_size, self.config.data.extra_tokens
        vocab_size += sum(extra.values())
        if given is not None and given < vocab_size:
            of = "the tokenizer's" + (f" and {' and '.join(extra)} together," if extra else "")
            text = f"{given} is below {of} {vocab_size}; leave it out or raise it"
            raise self.error("model.vocab_size", text)
        rounded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        if self.config.model.from_ is not None or self.config.model.vocab_multiple is not None:
            rounded = vocab_size
        length = self.config.training.sequence_length
        if self.config.model.preset in PRESETS:
            self._check_images(preset(self.config.model.preset), "model.preset")
        try:
            model = build_model(self.config.model, given or rounded, length)
        except (ExchangeError, FileError) as error:
            raise self.error("model.from", str(error)) from error
        except FieldError as error:
            found = [(_ELSEWHERE.get(k, f"model.{k}"), v) for k, v in error.errors.items()]
            raise ConfigError([_problem(self._document, *pair) for pair in found]) from error
        self._check_images(model, "model.from")
        self._check_routers(model)
        for field, text in self.config.data.misfits(self.config, model):
            raise self.error(field, text)
        if self.config.optimizer.qk_clip is not None and not any(clipped_heads(model)):
            text = "does not go with model.qk_norm, whose norms undo what it does to the weights "
            text += "and bound the scores by themselves; leave one of them out"
            raise self.error("optimizer.qk_clip", text)
        return model

    def _check_images(self, model: ModelConfig, field: str) -> None:
        if model.images is None:
            return
        if not any(each.name == "pixel_values" for each in self.config.data.fields()):
            text = "the model takes images, and the data has none; use data.kind: image-text, or a "
            raise self.error(field, text + "model of text alone")

    def _check_routers(self, model: ModelConfig) -> None:
        field = "model.moe.top_k" if self.config.model.from_ is None else "model.from"
        for entry in (layer.feed_forward for layer in model.layers):
            if isinstance(entry, MoEConfig) and entry.training_obstacle is not None:
                raise self.error(field, entry.training_obstacle)

    def resolved(self) -> RunConfig:
        """Return the configuration with all defaults of the model and its preset.

        The vocabulary size stays null until the tokenizer is trained.
        """
        model, section = self.model(planned_vocab_size(self)), self.config.model
        if section.from_ is not None:
            both = {"vocab_multiple": model.vocab_multiple, "dropout": model.dropout}
            return dataclasses.replace(self.config, model=dataclasses.replace(section, **both))
        is_known = section.vocab_size is not None or self.config.data.tokenizer is not None
        fields = {n: v for n, v in model.to_dict().items() if n not in _ELSEWHERE}
        layers, size = tuple(fields.pop("layers")), fields.pop("vocab_size")
        filled = ModelSection(
            vocab_size=size if is_known else None,
            vocab_multiple=section.vocab_multiple,  # without it the size is rounded
            dropout=fields.pop("dropout"),
            layers=layers,
            kernels=section.kernels,
            fields={n: v for n, v in fields.items() if n != "vocab_multiple"},
        )
        return replace(self.config, model=filled)

    def layout(self, world_size: int) -> ParallelLayout:
        """Fit the parallel section to a number of processes."""
        p, pp = self.config.parallel, self.config.pp
        needed = p.tp * pp * p.cp * (p.dp or 1)
        if world_size % needed or (p.dp is not None and needed != world_size):
            sizes, way_out = f"tp {p.tp} x pp {pp} x cp {p.cp}", ""
            axes = [f"parallel.{axis}" for axis in ("tp", "cp", "pp") if getattr(p, axis) > 1]
            blamed = [*axes, "pipeline.stages"][0]
            if p.dp is not None:
                blamed, sizes = "parallel.dp", f"{sizes} x dp {p.dp}"
                way_out = ", or leave parallel.dp out"
            text = f"{sizes} needs {needed} processes{'' if p.dp else ' or a multiple'}, but there "
            text += f"{'is' if world_size == 1 else 'are'} {world_size}; run with --nproc {needed}"
            raise self.error(blamed, text + way_out)
        from mt_parallel_state import ParallelLayout

        try:  # the sizes fit, so only the order can be wrong
            return ParallelLayout.fit(
                world_size, tp=p.tp, pp=pp, cp=p.cp, ep=p.ep, etp=p.etp, order=p.order
            )
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
        """Check that model, batch and layout fit together.

        Raises:
            ConfigError: Everything that does not fit.
        """
        found = [
            _problem(self._document, *pair) for pair in layout_misfits(self.config, model, layout)
        ]
        if found:
            raise ConfigError(found)


def _problem(document: Document, path: str, text: str) -> FieldProblem:
    return FieldProblem(path, hinted(path, text), document.place(path))


def _bound_problem(document: Document, found: FieldProblem) -> FieldProblem:
    """Return a problem of the binder; an unknown key of `data` may belong to another kind."""
    section, _, key = found.path.partition(".")
    text, data = found.text, document.root.get("data")
    if section == "data" and text.startswith("unknown key") and isinstance(data, dict):
        kind = str(data.get("kind", DataSection.default_kind))
        text = key_of_another_kind(key, kind) or text
    return _problem(document, found.path, text)


def load_config(
    path: Path, overrides: list[str] | None = None, *, download: bool = False
) -> LoadedConfig:
    """Read, override and check a run configuration.

    Paths in the file are relative to its folder, paths in overrides to the working directory.

    Args:
        path: The YAML file.
        overrides: `section.key=value` strings, applied over the file.
        download: Whether to download models of the Hugging Face hub that are not in the cache.

    Raises:
        ConfigError: All problems in one pass.
    """
    document = read_document(path)
    apply_overrides(document, overrides or [])
    problems: list[FieldProblem] = []
    paths = _Paths(document, path.parent, problems, download=download)
    # First, as the kinds of layers and rows that the file names have to be known.
    plugins = paths.plugins(document.root.get("plugins"))
    if "data" in document.root:
        document.root["data"] = with_kind(document.root["data"])
    bound: Bound[RunConfig] = bind(RunConfig, document.root)
    problems += [_bound_problem(document, found) for found in bound.problems]
    sections: dict[str, Any] = {"plugins": tuple(plugins)}
    names = [item.name for item in dataclasses.fields(RunConfig) if item.name in bound.parts]
    for name in names:
        part = bound.parts[name]
        sections[name] = paths.resolved(name, paths.data(part) if name == "data" else part)
    if "model" in sections and sections["model"].from_ is not None:
        sections |= paths.pretrained(sections["model"], sections.get("data"))
    if "optimizer" in sections:
        paths.check_offload(sections["optimizer"])
    logging = bound.parts.get("logging")
    if logging is not None and logging.tensorboard and find_spec("tensorboard") is None:
        text = "needs: pip install tensorboard"
        problems.append(_problem(document, "logging.tensorboard", text))
    if bound.value is None:
        raise ConfigError(problems, bound.hidden)
    config = dataclasses.replace(bound.value, **sections)
    loaded = LoadedConfig(config=config, path=path, plugins=plugins, _document=document)
    if not any(problem.path in ("data.tokenizer", "model.from") for problem in problems):
        try:
            loaded.model(planned_vocab_size(loaded))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return loaded


class _Paths:
    """A resolver that makes the paths of sections absolute, and notes missing ones."""

    def __init__(
        self, document: Document, folder: Path, problems: list[FieldProblem], *, download: bool
    ) -> None:
        self._document, self._folder, self._problems = document, folder.absolute(), problems
        self._download = download

    def plugins(self, names: Any) -> dict[str, str]:
        """Execute the files with the user's own kinds; return their digests by path."""
        load_installed_plugins()
        load_installed_kinds()
        found: dict[str, str] = {}
        for index, name in enumerate(names if isinstance(names, list) else ()):
            field, before = f"plugins[{index}]", len(self._problems)
            path = self._resolve(field, name) if isinstance(name, str) else ""
            if path and len(self._problems) == before:
                try:
                    found[path] = load_plugin(path)
                except PluginError as error:
                    self._add(field, str(error))
        return found

    def data(self, data: DataSection) -> DataSection:
        changes: dict[str, Any] = {
            "train": tuple(
                self._prefix(f"data.train[{i}]", prefix, data.endings)
                for i, prefix in enumerate(data.train)
            )
        }
        if isinstance(data.validation, str):
            changes["validation"] = self._prefix("data.validation", data.validation, data.endings)
        elif data.validation is not None:
            changes["validation"] = {
                name: tuple(
                    self._prefix(f"data.validation.{name}", path, data.endings) for path in paths
                )
                for name, paths in data.validation_sets.items()
            }
        if data.corpus is not None and data.corpus != STANDARD_LIBRARY:
            changes["corpus"] = self._prefix("data.corpus", data.corpus, ("",))
            self._check_glob(Path(changes["corpus"]), data.glob)
        return dataclasses.replace(data, **changes)

    def pretrained(self, model: Any, data: Any) -> dict[str, Any]:
        """Resolve the folder of the model, and take its tokenizer if no other is named."""
        folder = self._model_folder("model.from", model.from_)
        sections: dict[str, Any] = {"model": dataclasses.replace(model, from_=folder)}
        if any(problem.path == "model.from" for problem in self._problems):
            return sections
        try:
            found = read_description(folder)
            tokenizer, eod = found.tokenizer, found.eos_token
        except (ExchangeError, FileError) as error:
            self._add("model.from", str(error))
            return sections
        if not isinstance(found.config, ModelConfig):
            text = f"{shorten(folder, 200)} is of the family {found.family.name!r}, which has no"
            self._add("model.from", f"{text} tokens; name the folder of a language model")
            return sections
        if data is not None and data.tokenizer is None and tokenizer is None:
            self._add("data.tokenizer", f"missing, and {shorten(folder, 200)} has none")
        elif data is not None and data.tokenizer is None:
            sections["data"] = dataclasses.replace(
                data, tokenizer=str(tokenizer), eod=data.eod or eod
            )
        return sections

    def _model_folder(self, field: str, named: str) -> str:
        """Resolve a path, or the id of a model in the local cache of the Hugging Face hub."""
        before = len(self._problems)
        folder = self._resolve(field, named)
        if len(self._problems) == before or not is_hub_id(named):
            return folder
        missing = self._problems.pop().text
        try:
            return str(find_folder(named, download=self._download))
        except (ExchangeError, FileError) as error:
            self._add(field, f"{missing}; {error}")
            return folder

    def check_offload(self, optimizer: OptimizerSection) -> None:
        """Report an `offload_dir` that is not a folder."""
        folder = Path(optimizer.offload_dir or ".")
        if folder.exists() and not folder.is_dir():
            text = f"{shorten(optimizer.offload_dir, 200)} is no folder; write one"
            self._add("optimizer.offload_dir", text)

    def resolved(self, name: str, section: Any) -> Any:
        """Return a section with the paths of its `path_field`s absolute."""
        if section is None:
            return None
        paths = {}
        for item in dataclasses.fields(section):
            value, field = getattr(section, item.name), f"{name}.{item.name}"
            if PATH not in item.metadata or value is None:
                continue
            if item.metadata.get(STORED) and object_url(value):
                paths[item.name] = object_url(value)
            elif item.metadata[MODEL]:
                paths[item.name] = self._model_folder(field, value)
            elif isinstance(value, tuple):
                paths[item.name] = tuple(
                    self._resolve(f"{field}[{number}]", each, item.metadata[PATH])
                    for number, each in enumerate(value)
                )
            else:
                paths[item.name] = self._resolve(field, value, item.metadata[PATH])
        return dataclasses.replace(section, **paths) if paths else section

    def _check_glob(self, folder: Path, glob: str) -> None:
        """Note a glob that matches no file of a corpus folder, and suggest a glob that does."""
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

    def _prefix(self, field: str, text: str, endings: tuple[str, ...]) -> str:
        """Resolve a path of data, which may be a URL of an object store; a run opens it."""
        return object_url(text) or self._resolve(field, text, endings)

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
    fields = {**section.given, "vocab_size": vocab_size, "max_sequence_length": sequence_length}
    return model_of(fields) if section.preset is None else preset(section.preset, **fields)


def _model_of_folder(
    section: ModelSection, folder: str, vocab_size: int, sequence_length: int
) -> ModelConfig:
    """Return the model of a Hugging Face folder, if the tokens and the sequences fit it."""
    model = cast("ModelConfig", read_description(folder).config)  # `_Paths` refuses others
    if vocab_size > model.vocab_size:
        text = f"{shorten(folder, 200)} knows {model.vocab_size} tokens, and the tokenizer has "
        raise FieldError({"from": f"{text}{vocab_size}; use the tokenizer of that folder"})
    if sequence_length > model.max_sequence_length:
        text = f"{sequence_length} is longer than the model's {model.max_sequence_length}"
        raise FieldError({"max_sequence_length": text})
    multiple = section.vocab_multiple or model.usual_vocab_multiple
    dropout = model.dropout if section.dropout is None else section.dropout
    retro = section.fields.get("retro")
    return dataclasses.replace(model, vocab_multiple=multiple, dropout=dropout, retro=retro)


def planned_vocab_size(loaded: LoadedConfig) -> int:
    """Return the vocabulary size of the given tokenizer, or of the one to train.

    For token files without a tokenizer it is the size in the section `model`.

    Raises:
        ConfigError: The file is no tokenizer.
    """
    data = loaded.config.data
    if data.tokenizer is None:
        return loaded.config.model.vocab_size or 1 if data.train else data.vocab_size
    from mt_tokenizer import TokenizerError, load_tokenizer

    try:
        return load_tokenizer(Path(data.tokenizer), eod=data.eod).vocab_size
    except (TokenizerError, FileError) as error:
        raise loaded.error("data.tokenizer", str(error)) from error


def to_yaml(config: RunConfig) -> str:
    """Write a configuration with every default filled in; it loads back to the same value."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)
