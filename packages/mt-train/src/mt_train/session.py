"""One run from a checked configuration to a trained, evaluated, saved model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from mt_ckpt import SavedTokenizer, clean
from mt_data import (
    BatchSampler,
    IndexedDataset,
    SequentialWindows,
    load_tokenizer,
)
from mt_model import keep_freed_memory
from mt_parallel_state import (
    CheckMode,
    DistributedEnv,
    ParallelState,
    init_process_group,
    leave_process_group,
)

from mt_train import saving
from mt_train.board import Board
from mt_train.config import RunConfig
from mt_train.console import Console, SilentConsole, make_console
from mt_train.corpus import (
    Corpus,
    OtherRankError,
    check_tokenizer,
    count_bytes,
    open_training_data,
    prepare_corpus,
)
from mt_train.evaluation import HeldOut, evaluate
from mt_train.loading import LoadedConfig, to_yaml
from mt_train.metrics import MetricsFile, Record
from mt_train.plot import draw_loss
from mt_train.problem import ConfigError
from mt_train.stopping import StopRequest
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
        stop = StopRequest()
        stack.enter_context(stop.listening())
        device = _join(env, stack)
        if device.type == "cpu":
            keep_freed_memory()  # this is a program: its activations are as large every step
        timeout = loaded.config.parallel.check_timeout
        check = None if timeout is None else CheckMode(timeout=timeout)
        state = stack.enter_context(
            ParallelState(layout, rank=env.rank, device=device, check=check)
        )
        corpus = _corpus_on_all_ranks(loaded, out, state, env)
        return _Session(loaded, out, state, corpus, stop, on_event).go(stack)


class _Session:
    """The parts of one run on one rank."""

    def __init__(
        self,
        loaded: LoadedConfig,
        out: Path,
        state: ParallelState,
        corpus: Corpus,
        stop: StopRequest,
        on_event: Callable[[str], None] | None,
    ) -> None:
        config = loaded.config
        self.config, self.out, self.state = config, out, state
        tokenizer = load_tokenizer(corpus.tokenizer, eod=config.data.eod)
        check_tokenizer(loaded, corpus, tokenizer)
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
        self.trainer = Trainer(
            config, self.model_config, state, sampler=sampler, stop=stop, on_event=on_event
        )
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
        self.identity = saving.Identity(
            model=self.model_config,
            data=dataset.fingerprint,
            tokenizer=SavedTokenizer(sha256=tokenizer.sha256, eod=tokenizer.eod_token),
        )
        self.resumed_from = self._resume(loaded)

    def _resume(self, loaded: LoadedConfig) -> Path | None:
        path = saving.find_checkpoint(self.out)
        if path is None and loaded.config.checkpoint.load is not None:
            path = saving.find_checkpoint(Path(loaded.config.checkpoint.load))
            if path is None:
                raise loaded.error("checkpoint.load", "there is no committed checkpoint in it")
        if path is not None:
            saving.resume(self.trainer, path, self.identity)
        return path

    def go(self, stack: ExitStack) -> Record | None:
        """Train to the end; rank 0 also reports."""
        config, trainer = self.config, self.trainer
        metrics, board, console = self._reporting(stack)
        self._announce(console)
        own = self.resumed_from is not None and self.out in self.resumed_from.parents
        saved_step = trainer.progress.step if own else 0
        evaluation: Record | None = None
        stopped = trainer.stop_requested()
        while not trainer.finished and not stopped:
            record, stopped = trainer.train_step()
            step = record["step"]
            self._report(record, metrics, board, console)
            between = self._due(config.evaluation.every, step) and not trainer.finished
            if between and not stopped and self.held_out is not None:
                stopped = self._evaluate(self.held_out, metrics, board, console) is None
            if self._due(config.checkpoint.every, step):
                self._save(console)
                saved_step = step
        if saved_step != trainer.progress.step:
            self._save(console)
        if not stopped and self.held_out is not None:
            evaluation = self._evaluate(self.held_out, metrics, board, console)
            stopped = evaluation is None
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
            board = Board(self.out / "tensorboard", resume_step=self.trainer.progress.step)
            stack.callback(board.close)
        console = make_console(total_steps=config.training.steps, every=config.logging.every)
        return metrics, board, stack.enter_context(console)

    def _announce(self, console: Console) -> None:
        layout = self.state.layout
        parameters = self.trainer.count_parameters()
        console.say(
            f"model {parameters / 1e6:.2f}M parameters, {self.config.training.dtype} on "
            f"{self.state.device.type}; tp {layout.tp} cp {layout.cp} pp {layout.pp} dp {layout.dp}"
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
        self, held_out: HeldOut, metrics: MetricsFile | None, board: Board | None, console: Console
    ) -> Record | None:
        record = evaluate(self.trainer, held_out)
        if record is None:
            return None
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


class LaunchError(Exception):
    """This process can't join the others; the message says why."""


def _join(env: DistributedEnv, stack: ExitStack) -> torch.device:
    """Join the process group, unless the caller has one, and choose this rank's device."""
    if dist.is_initialized():  # the caller's process group, or a test's
        if torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    try:
        device = init_process_group(env)
    except (ValueError, dist.DistError) as error:
        raise LaunchError(str(error)) from error
    stack.callback(leave_process_group)
    return device


def _corpus_on_all_ranks(
    loaded: LoadedConfig, out: Path, state: ParallelState, env: DistributedEnv
) -> Corpus:
    """Build the corpus on rank 0, then where nodes share no disk on one rank of each; open it."""
    corpus: Corpus | None = None
    for builds in (env.rank == 0, env.local_rank == 0):
        error: Exception | None = None
        if builds:
            try:
                corpus = _prepare_folder(loaded, out, first=env.rank == 0)
            except Exception as caught:  # noqa: BLE001 - raised once the others were told
                error = caught
        is_config = isinstance(error, ConfigError)
        failed = torch.tensor([float(error is not None), float(is_config)], device=state.device)
        group = state.group("tp-cp-dp-pp")
        if group is not None:
            dist.all_reduce(failed, group=group)
        if error is not None:
            raise error
        if failed[0]:
            raise OtherRankError(is_config=bool(failed[1]))
    return corpus or prepare_corpus(loaded, out)


def _prepare_folder(loaded: LoadedConfig, out: Path, *, first: bool) -> Corpus:
    out.mkdir(parents=True, exist_ok=True)
    if first:
        clean(out / "checkpoints")
    corpus = prepare_corpus(loaded, out)
    tokenizer = out / "tokenizer.json"
    if not tokenizer.exists() or tokenizer.read_bytes() != corpus.tokenizer.read_bytes():
        _replace(tokenizer, corpus.tokenizer.read_bytes())
    return corpus


def _write_config(config: RunConfig, path: Path) -> None:
    _replace(path, to_yaml(config).encode())


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def write_summary(path: Path, summary: Record) -> None:
    """Write a small JSON file next to a run's metrics."""
    _replace(path, (json.dumps(summary, indent=2) + "\n").encode())
