"""One run from a checked configuration to a trained, evaluated, saved model."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from mt_ckpt import clean
from mt_data import (
    BatchSampler,
    IndexedDataset,
    SequentialWindows,
    load_tokenizer,
)
from mt_model import keep_freed_memory
from mt_parallel_state import DistributedEnv, ParallelState, init_process_group

from mt_train import saving
from mt_train.board import Board
from mt_train.config import RunConfig
from mt_train.console import Console, SilentConsole, make_console
from mt_train.corpus import Corpus, CorpusError, count_bytes, open_training_data, prepare_corpus
from mt_train.evaluation import HeldOut, evaluate
from mt_train.loading import LoadedConfig, to_yaml
from mt_train.metrics import MetricsFile, Record
from mt_train.plot import draw_loss
from mt_train.trainer import Trainer


def run(
    loaded: LoadedConfig,
    env: DistributedEnv,
    out: Path,
    *,
    on_event: Callable[[str], None] | None = None,
) -> Record | None:
    """Train on this rank until the run is done or asked to stop.

    Args:
        loaded: The checked configuration.
        env: This process's place in the job.
        out: The run folder; an earlier part of the same run in it is continued.
        on_event: Called with the name of each point reached.

    Returns:
        The final evaluation, or None when the run was stopped early or has no held-out data.
    """
    layout = loaded.layout(env.world_size)
    with ExitStack() as stack:
        if dist.is_initialized():  # the caller's process group, or a test's
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            device = init_process_group(env)
            if dist.is_initialized():
                stack.callback(dist.destroy_process_group)
        if device.type == "cpu":
            keep_freed_memory()  # this is a program: its activations are as large every step
        state = stack.enter_context(ParallelState(layout, rank=env.rank, device=device))
        corpus = _corpus_on_all_ranks(loaded, out, state)
        # Whatever still holds a group when Python exits can make gloo abort the process; hooks
        # on parameters are cycles, so they are collected before the groups are destroyed.
        stack.callback(gc.collect)
        return _Session(loaded, out, state, corpus, on_event).go(stack)


class _Session:
    """The parts of one run on one rank."""

    def __init__(
        self,
        loaded: LoadedConfig,
        out: Path,
        state: ParallelState,
        corpus: Corpus,
        on_event: Callable[[str], None] | None,
    ) -> None:
        config = loaded.config
        self.config, self.out, self.state = config, out, state
        tokenizer = load_tokenizer(corpus.tokenizer)
        self.model_config = loaded.model(tokenizer.vocab_size)
        loaded.check_layout(self.model_config, state.layout)
        training = config.training
        dataset = open_training_data(
            corpus,
            sequence_length=training.sequence_length,
            num_samples=training.steps * training.global_batch_size,
            seed=training.seed,
        )
        sampler = BatchSampler(
            dataset,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            dp_rank=state.index("dp"),
            dp_size=state.size("dp"),
            vocab_size=tokenizer.vocab_size,
        )
        self.trainer = Trainer(config, self.model_config, state, sampler=sampler, on_event=on_event)
        self.held_out = None
        if corpus.validation is not None:
            evaluation = config.evaluation
            indexed = IndexedDataset(corpus.validation)
            self.held_out = HeldOut(
                windows=SequentialWindows(
                    indexed,
                    training.sequence_length,
                    evaluation.stride,
                    start_id=tokenizer.eod_id,
                ),
                num_bytes=count_bytes(indexed, tokenizer),
                micro_batch_size=evaluation.micro_batch_size or training.micro_batch_size,
                max_windows=evaluation.max_windows,
            )
        self.identity = saving.Identity(model=self.model_config, data=dataset.fingerprint)
        self.resumed_from = self._resume(loaded)

    def _resume(self, loaded: LoadedConfig) -> Path | None:
        path = saving.find_checkpoint(self.out)
        if path is None and loaded.config.checkpoint.load is not None:
            path = saving.find_checkpoint(loaded.resolve(loaded.config.checkpoint.load))
            if path is None:
                raise loaded.error("checkpoint.load", "there is no committed checkpoint in it")
        if path is not None:
            saving.resume(self.trainer, path, self.identity)
        return path

    def go(self, stack: ExitStack) -> Record | None:
        """Train to the end; rank 0 also reports."""
        config, trainer = self.config, self.trainer
        stack.enter_context(trainer.stopping_on_signals())
        metrics, board, console = self._reporting(stack)
        self._announce(console)
        own = self.resumed_from is not None and self.out in self.resumed_from.parents
        saved_step = trainer.progress.step if own else -1
        evaluation: Record | None = None
        stopped = False
        while not trainer.finished and not stopped:
            record, stopped = trainer.train_step()
            step = record["step"]
            self._report(record, metrics, board, console)
            if self._due(config.evaluation.every, step) and not (stopped or trainer.finished):
                self._evaluate(metrics, board, console)
            if self._due(config.checkpoint.every, step):
                self._save(console)
                saved_step = step
        if saved_step != trainer.progress.step:
            self._save(console)
        if not stopped and self.held_out is not None:
            evaluation = self._evaluate(metrics, board, console)
        if self.state.rank == 0:
            draw_loss(self.out / "metrics.jsonl", self.out / "loss.png")
        if stopped:
            console.say(
                f"stopped by a signal after step {trainer.progress.step}, saved; "
                "the same command continues"
            )
        return evaluation

    def _reporting(self, stack: ExitStack) -> tuple[MetricsFile | None, Board | None, Console]:
        if self.state.rank != 0:
            return None, None, SilentConsole()
        config = self.config
        _write_config(config, self.out / "config.yaml")
        metrics = MetricsFile(
            self.out / "metrics.jsonl",
            resume_step=self.trainer.progress.step,
            evaluates_again=self.trainer.finished,
        )
        stack.callback(metrics.close)
        board = None
        if config.logging.tensorboard:
            board = Board(self.out / "tensorboard")
            stack.callback(board.close)
        console = make_console(total_steps=config.training.steps, every=config.logging.every)
        return metrics, board, stack.enter_context(console)

    def _announce(self, console: Console) -> None:
        layout = self.state.layout
        parameters = self.trainer.count_parameters()
        console.say(
            f"model {parameters / 1e6:.2f}M parameters, {self.config.training.dtype} on "
            f"{self.state.device.type}; tp {layout.tp} pp {layout.pp} dp {layout.dp}"
        )
        if self.resumed_from is not None:
            console.say(f"continuing from {self.resumed_from}")

    @staticmethod
    def _due(every: int | None, step: int) -> bool:
        return every is not None and step % every == 0

    def _report(
        self, record: Record, metrics: MetricsFile | None, board: Board | None, console: Console
    ) -> None:
        if metrics is not None:
            metrics.write(record)
        if board is not None:
            board.write(record)
        console.step(record)

    def _evaluate(
        self, metrics: MetricsFile | None, board: Board | None, console: Console
    ) -> Record | None:
        if self.held_out is None:
            return None
        record = evaluate(self.trainer, self.held_out)
        if metrics is not None:
            metrics.write(record)
        if board is not None:
            board.write(record)
        console.say(
            f"held out at step {record['step']}: loss {record['val_loss']:.4f}, "
            f"{record['bits_per_byte']:.4f} bits per byte"
        )
        return record

    def _save(self, console: Console) -> None:
        path = saving.save(self.trainer, self.out / "checkpoints", self.identity)
        console.say(f"saved {path}")


def _corpus_on_all_ranks(loaded: LoadedConfig, out: Path, state: ParallelState) -> Corpus:
    """Build the corpus on rank 0 while the others wait, then open it everywhere."""
    group = state.group("tp-cp-dp-pp")
    failed = torch.zeros(1, device=state.device)
    error: Exception | None = None
    if state.rank == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            clean(out / "checkpoints")
            corpus = prepare_corpus(loaded, out)
            tokenizer = out / "tokenizer.json"
            if not tokenizer.exists() or tokenizer.read_bytes() != corpus.tokenizer.read_bytes():
                _replace(tokenizer, corpus.tokenizer.read_bytes())
        except Exception as caught:  # noqa: BLE001 - raised below, after the others were told
            error = caught
            failed += 1
    if group is not None:
        dist.all_reduce(failed, group=group)
    if error is not None:
        raise error
    if failed.item():
        raise CorpusError("rank 0 could not prepare the data; its message says why")
    return prepare_corpus(loaded, out)


def _write_config(config: RunConfig, path: Path) -> None:
    _replace(path, to_yaml(config).encode())


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def write_summary(path: Path, summary: Record) -> None:
    """Write a small JSON file next to a run's metrics."""
    _replace(path, (json.dumps(summary, indent=2) + "\n").encode())
