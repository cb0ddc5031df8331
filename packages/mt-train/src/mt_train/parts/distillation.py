"""Distillation from a teacher on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from mt_ckpt import (
    CheckpointError,
    RunFolder,
    SavedModel,
    inspect_checkpoint,
    latest_checkpoint,
    open_arrays,
    param_shards,
)
from mt_files import FileError, shorten
from mt_hf import ExchangeError, Pretrained, open_pretrained, read_description
from mt_model import GPT, ModelConfig, MoEConfig, StackConfig, load_recorded_plugins, saved_buffers
from mt_parallel_state import ParallelLayout, ParallelState, WgradStore
from mt_tokenizer import Tokenizer, TokenizerError, load_tokenizer
from torch import Tensor

from mt_train.config.loading import LoadedConfig
from mt_train.config.misfits import layout_misfits
from mt_train.config.pipeline_plan import plan_pipeline
from mt_train.config.run_config import RunConfig
from mt_train.parts.objective import Objective
from mt_train.parts.part import Run, Setup, TrainerPart

LOSS = "distillation"


class Distillation(TrainerPart):
    """A teacher whose stages run beside the model's, and the loss of its scores."""

    uncounted = ("distillation.teacher", "a teacher is not counted; leave it out to count")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._section, state = setup.config.distillation, setup.state
        folder, model = self._section.teacher or "", setup.model
        config = _for_teacher(setup.config, model)
        self._teacher = replace(read_teacher(folder), vocab_multiple=model.vocab_multiple, mtp=None)
        plan = plan_pipeline(
            config.pipeline,
            ranks=state.size("pp"),
            microbatches=setup.microbatches,
            num_layers=self._teacher.num_layers,
        )
        options = {**setup.stage_options, "recompute": "none", "seed": None, "lora": None}
        self._stages = [
            cast("GPT", self._teacher.build(state, layers=layers, device=state.device, **options))
            for layers in plan.layers_of(state.index("pp"))
        ]
        for stage in self._stages:
            stage.requires_grad_(requires_grad=False).eval()
        _fill(self._stages, Path(folder), state, model.vocab_multiple)

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether the run has a teacher."""
        return config.distillation.teacher is not None

    @staticmethod
    def check(loaded: LoadedConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Check that the teacher knows the student's tokens and sequences.

        Raises:
            ConfigError: The teacher doesn't, or there is no such teacher.
        """
        folder = loaded.config.distillation.teacher or ""
        field, shown = "distillation.teacher", shorten(folder, 200)
        if model.encoder_layers:
            raise loaded.error(field, "is for decoders, and the model has an encoder; leave it out")
        try:
            teacher, theirs = read_teacher(folder), _tokenizer_digest(folder)
        except (CheckpointError, TokenizerError, ExchangeError, FileError) as error:
            raise loaded.error(field, str(error)) from error
        if teacher.vocab_size != model.vocab_size:
            text = (
                f"{shown} has {teacher.vocab_size} tokens, and the model {model.vocab_size}; use "
            )
            text += f"a teacher with the same tokenizer, and model.vocab_size={teacher.vocab_size}"
            raise loaded.error(field, text)
        if tokenizer is not None and theirs not in (None, tokenizer.sha256):
            text = f"{shown} has another tokenizer, whose ids mean other text: sha256 {theirs}, "
            text += f"and the run's is {tokenizer.sha256}; use the tokenizer of the teacher"
            raise loaded.error(field, text)
        length = loaded.config.training.sequence_length
        if length > teacher.max_sequence_length:
            text = f"{shown} reads {teacher.max_sequence_length} tokens, and "
            text += f"training.sequence_length is {length}; make it shorter, or use another teacher"
            raise loaded.error(field, text)
        if _checkpoint(Path(folder)) is not None and teacher.vocab_rows != model.vocab_rows:
            text = f"{shown} has a head of {teacher.vocab_rows} rows, and the model one of "
            text += f"{model.vocab_rows}; set model.vocab_multiple={teacher.vocab_multiple}"
            raise loaded.error(field, text)

    @staticmethod
    def check_layout(loaded: LoadedConfig, model: ModelConfig, layout: ParallelLayout) -> None:
        """Check that the teacher fits the student's layout.

        Raises:
            ConfigError: The teacher doesn't fit.
        """
        folder = loaded.config.distillation.teacher or ""
        teacher = replace(read_teacher(folder), mtp=None)
        if not any(isinstance(layer.feed_forward, MoEConfig) for layer in teacher.layers):
            layout = replace(layout, ep=1, etp=1)  # which the student's experts have for themselves
        for field, text in layout_misfits(_for_teacher(loaded.config, model), teacher, layout):
            what = f"{shorten(folder, 200)} does not fit the layout ({field}): {text}"
            raise loaded.error("distillation.teacher", what)

    @property
    def extra_hidden_size(self) -> int:
        """The teacher's hidden size: a token carries both hidden states between stages."""
        return self._teacher.hidden_size

    def objective(self, objective: Objective) -> Objective:
        """Weigh the model's own loss, and add the loss of the teacher's scores."""
        section = self._section
        return Objective(
            weights={**objective.weights, "lm": section.lm_weight, LOSS: section.weight},
            count_of={**objective.count_of, LOSS: objective.count_of["lm"]},
        )

    def wrap(self, runs: list[Run]) -> list[Run]:
        """Return each stage together with the teacher's stage."""
        beside = zip(runs, self.setup.stages, self._stages, strict=True)
        heat = self._section.temperature
        return [TaughtStage(*each, temperature=heat) for each in beside]

    def lines(self) -> Iterator[str]:
        """Yield the name of the teacher."""
        folder = self._section.teacher or ""
        yield f"distillation from {folder}"
        if _tokenizer_digest(folder) is None:
            yield "distillation: the teacher has no tokenizer to compare with the run's"


class TaughtStage:
    """A stage with the teacher's stage; between stages, a token has the hidden states of both.

    Args:
        run: Callable of the student's stage.
        stage: Stage of the student.
        teacher: Stage of the teacher.
        temperature: Divisor of both models' scores.
    """

    def __init__(
        self, run: Callable[..., Any], stage: GPT, teacher: GPT, *, temperature: float
    ) -> None:
        self._run, self._stage, self._teacher = run, stage, teacher
        self._temperature = temperature

    @property
    def wgrad_store(self) -> WgradStore:
        """The student's; see `mt_pipeline.DefersWeightGradients`."""
        return self._stage.wgrad_store

    def __call__(self, x: Tensor | None, batch: Mapping[str, Any]) -> Any:
        """Run both stages; the last stage returns losses, others the hidden states of both."""
        own, theirs, teacher = None, None, self._teacher
        if x is not None:
            sizes = self._stage.config.hidden_size, teacher.config.hidden_size
            own, theirs = (part.contiguous() for part in x.split(sizes, -1))
        with torch.no_grad():
            begun, shared = teacher.begin(theirs, batch)
            theirs, _ = teacher.run_layers(begun, shared)
            if teacher.has_head:
                batch = {**batch, "teaching": teacher.teach(theirs, self._temperature)}
        out = self._run(own, batch)
        if teacher.has_head:
            return out
        y, losses = out if isinstance(out, tuple) else (out, None)
        both = torch.cat([y, theirs], -1)
        return both if losses is None else (both, losses)


def read_teacher(folder: str | Path) -> ModelConfig:
    """Return the model in a run folder, a step folder, or a folder of Hugging Face.

    Raises:
        ExchangeError: The folder is none of these, or has no language model.
        CheckpointError: The checkpoint is damaged.
        FileError: A file can't be read.
    """
    path = _checkpoint(Path(folder))
    if path is None:
        config: StackConfig = read_description(folder).config
    else:
        saved = inspect_checkpoint(path).metadata_as(SavedModel)
        load_recorded_plugins(saved.plugins)
        config = StackConfig.from_dict(saved.model)
    if not isinstance(config, ModelConfig) or config.encoder_layers or config.images:
        raise ExchangeError(f"{folder} is no model of text alone; name one that predicts tokens")
    return config


def _tokenizer_digest(folder: str) -> str | None:
    """Return the digest of a teacher's tokenizer; None without a tokenizer."""
    path = _checkpoint(Path(folder))
    if path is not None:
        saved = inspect_checkpoint(path).metadata_as(SavedModel).tokenizer
        return None if saved is None else saved.sha256
    file = read_description(folder).tokenizer
    return None if file is None else load_tokenizer(file).sha256


def _fill(stages: Sequence[GPT], folder: Path, state: ParallelState, vocab_multiple: int) -> None:
    """Give stages the weights in a folder; each rank reads its own part."""
    path = _checkpoint(folder)
    if path is None:
        found = open_pretrained(folder).padded(vocab_multiple)
        for stage in stages:
            _fill_pretrained(stage, found, state)
        return
    with open_arrays(path) as arrays:
        for stage in stages:
            own, buffers = dict(stage.named_parameters()), saved_buffers([stage])
            for named, layout, rank in (
                (own, state.layout, state.rank),
                (buffers, ParallelLayout(), 0),  # whole on every rank
            ):
                how = {"prefix": RunFolder.WEIGHTS, "params": named}
                for shard in param_shards(named.items(), layout, rank, **how):
                    arrays.fill(shard)


def _fill_pretrained(stage: GPT, found: Pretrained, state: ParallelState) -> None:
    give = found.initializer(state)
    for name, param in stage.named_parameters():
        give(name, param)
    for name, buffer in saved_buffers([stage]).items():
        found.fill(name, buffer)


def _checkpoint(folder: Path) -> Path | None:
    """Return the step directory to read; None for a folder of Hugging Face."""
    if (folder / "zarr.json").is_file():
        return folder
    root = RunFolder(folder).checkpoints
    return latest_checkpoint(root) if root.is_dir() else None


def _for_teacher(config: RunConfig, model: ModelConfig) -> RunConfig:
    """Return the run with the teacher's distribution of layers: even if its layers differ."""
    teacher = read_teacher(config.distillation.teacher or "")
    if teacher.num_layers == model.num_layers:
        return config
    return replace(config, pipeline=replace(config.pipeline, layout=None))
