"""One run from a checked configuration to a trained, evaluated, saved model."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mt_ckpt import BackgroundSaver, SavedTokenizer
from mt_data import BatchSampler
from mt_files import FileError, to_plain, write_file
from mt_model import check_fields, keep_freed_memory
from mt_parallel_state import (
    CheckMode,
    DistributedEnv,
    ParallelState,
    StopSignals,
    joined,
    report_hangs,
    stop_signals,
)

from mt_train.agreement import summed
from mt_train.config.kinds.section import Sources
from mt_train.config.loading import LoadedConfig, to_yaml
from mt_train.data.corpus import building, sources_of
from mt_train.parts.registry import wanted_parts
from mt_train.reporting.board import Board
from mt_train.reporting.console import make_console
from mt_train.reporting.history import record_part
from mt_train.reporting.metrics import MetricsFile, Record, read_metrics
from mt_train.reporting.plot import draw_loss
from mt_train.reporting.reporter import Reporter
from mt_train.session import saving
from mt_train.session.adapting import adapters_of, given_adapters
from mt_train.session.basis import Basis, prepare_on_all_ranks
from mt_train.session.drawing import Drawing
from mt_train.session.exporting import export, exports_of
from mt_train.session.saved import SavedRun, plain_sections
from mt_train.training.chosen_kernels import kernel_lines
from mt_train.training.evaluation import HeldOut, evaluate
from mt_train.training.trainer import NonFiniteLossError, Step, Trainer

_HANG_HINT = (
    "if it does not go on, parallel.check_timeout=60 compares the calls of all ranks and names the "
    "first that differs"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run, or of a part of it.

    Attributes:
        step: Number of completed steps.
        stopped: Whether it was asked to stop and has saved, so that the same command continues it.
        evaluation: The record of the last evaluation; None if the run was stopped or there is no
            held-out data.
    """

    step: int
    stopped: bool
    evaluation: Record | None


def run(
    loaded: LoadedConfig,
    env: DistributedEnv,
    out: Path,
    *,
    on_event: Callable[[str], None] | None = None,
) -> Outcome:
    """Train on this rank until the run is done or asked to stop.

    Args:
        loaded: The checked configuration.
        env: This process's place in the job.
        out: The run folder; an earlier part of the same run in it is continued.
        on_event: Function to call with the name of each point reached.

    Raises:
        ConfigError: The configuration does not fit the processes, the data or the run in `out`.
        ResumeError: The checkpoint to start from belongs to another run.
        LockedError: Another process trains in `out`.
        NonFiniteLossError: Training diverged.
    """
    layout = loaded.layout(env.world_size)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        stop.exit_code = os.EX_TEMPFAIL  # the same command starts or continues it
        if env.rank == 0:
            stop.note = "no step was trained; what was saved before is as it was"
            stop.answer = "stopping after this step, and saving; once more ends it at once"
        device = stack.enter_context(joined(env))
        if device.type == "cpu":
            keep_freed_memory()  # this is a program: its activations are as large every step
        timeout, wait = loaded.config.parallel.check_timeout, loaded.config.parallel.hang_report
        check = None if timeout is None else CheckMode(timeout=timeout)
        state = stack.enter_context(
            ParallelState(layout, rank=env.rank, device=device, check=check)
        )
        with ExitStack() as held:
            basis = prepare_on_all_ranks(loaded, out, state, env, stack, held)
            if env.local_rank == 0:
                stack.enter_context(building(loaded, basis.corpus))
            session = _Session(loaded, out, state, basis, stop, on_event)
        if check is None and wait is not None:
            stack.enter_context(report_hangs(seconds=wait, hint=_HANG_HINT))
        summed(state, 0)  # while they wait for each other, a signal still ends all ranks at once
        with stop.deferred():
            summed(state, 0)  # and none says that it trains before all of them answer one by saving
            return session.go(stack)


class _Session:
    """The parts of one run on one rank."""

    def __init__(
        self,
        loaded: LoadedConfig,
        out: Path,
        state: ParallelState,
        basis: Basis,
        stop: StopSignals,
        on_event: Callable[[str], None] | None,
    ) -> None:
        config = loaded.config
        self.config, self.out, self.state, self.stop = config, out, state, stop
        self.start, tokenizer, model = basis.start, basis.tokenizer, basis.model
        self.shards = basis.corpus.shards
        loaded.check_layout(model, state.layout)
        for part in wanted_parts(config):
            part.check_layout(loaded, model, state.layout)
        training, start = config.training, self.start.progress
        sources = sources_of(config, basis.corpus, tokenizer, model, out)
        self.drawing = Drawing(config, sources, self.start)
        sampler = BatchSampler(
            self.drawing.samples,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            dp_rank=state.index("dp"),
            dp_size=state.size("dp"),
            vocab_size=model.vocab_size
            if tokenizer is None
            else tokenizer.vocab_size + sum(config.data.extra_tokens.values()),
            offset=start.samples - start.step * training.global_batch_size,
        ).with_rows(config.data.rows())
        try:
            check_fields(sampler.fields)
        except ValueError as error:
            raise loaded.error("data.kind", f"{config.data.kind}: {error}") from error
        self.trainer = Trainer(
            config, model, state, sampler=sampler, stop=stop, on_event=on_event, folder=out
        )
        self.held_out = self._open_held_out(sources, basis.corpus.validation or {"": ()})
        self.saved = SavedRun(
            step=start.step,
            elapsed=start.elapsed,
            consumed_samples=start.samples,
            skipped_steps=start.skipped,
            loss_scale=None,  # the trainer's, once there is one to save
            data=self.drawing.mixture(start.samples),
            tokenizer=None
            if tokenizer is None
            else SavedTokenizer(sha256=tokenizer.sha256, eod=tokenizer.eod_token),
            model=model.to_dict(),
            config=plain_sections(config),
            plugins=loaded.plugins,
            adapters=adapters_of(config, self.start, state),
        )
        if self.saved.adapters is not None:
            saving.fill_base(self.trainer, Path(self.saved.adapters.base))
            if self.start.continued is not None and self.start.path is not None:
                saving.fill(self.trainer, self.start.path, self.start.saved, weights_only=False)
            elif (given := given_adapters(config, model)) is not None:
                saving.fill_adapters(self.trainer, given)
        elif self.start.path is not None:
            only = self.start.weights_only
            saving.fill(self.trainer, self.start.path, self.start.saved, weights_only=only)
        elif self.start.pretrained is not None:
            multiple = model.vocab_multiple
            saving.fill_pretrained(self.trainer, self.start.pretrained, vocab_multiple=multiple)
        self._last_save = 0.0
        self._background: BackgroundSaver | None = None
        self._copies = saving.memory_copies(state, config, out, on_event)
        self._saved_step = self.trainer.progress.step if self.start.own else None
        self._said: Path | None = None  # the last save in the background that was reported

    def _open_held_out(
        self, sources: Sources, sets: Mapping[str, tuple[Path, ...]]
    ) -> dict[str, HeldOut]:
        evaluation, opened = self.config.evaluation, {}
        size = evaluation.micro_batch_size or self.config.training.micro_batch_size
        for name, paths in sets.items():
            found = self.config.data.held_out(replace(sources, validation=paths))
            if found is not None:
                opened[name] = HeldOut(
                    data=found, micro_batch_size=size, max_windows=evaluation.max_windows
                )
        return opened

    def go(self, stack: ExitStack) -> Outcome:
        """Train to the end; rank 0 also reports."""
        trainer = self.trainer
        if trainer.finished and not self._evaluation_is_missing():
            return self._already_finished()
        self._close_later(stack)
        reporter = self._open_reporter(stack)
        self._announce(reporter)
        self._note_saved(self.start.path if self.start.own else None)
        self._open_saver(stack)
        evaluation: Record | None = None
        stopped = False
        while not trainer.finished and not stopped:
            before = trainer.progress.samples
            step = self._train_step()
            stopped = step.stop
            reporter.step(step.record | self._drawn(before))
            self._say_notes(reporter, step.record)
            for line in self.drawing.changes(before, trainer.progress.samples):
                reporter.say(line)
            self._say_saved(reporter)
            number = trainer.progress.step
            between = _is_due(self.config.evaluation.every, number) and not trainer.finished
            if between and not stopped and self.held_out:
                stopped = self._evaluate(reporter) is None
            if step.save or _is_due(self.config.checkpoint.every_steps, number):
                self._save(reporter)
            else:
                self._copy(reporter)
        self._save_last(reporter)
        if not stopped and self.held_out:
            evaluation = self._evaluate(reporter)
            stopped = evaluation is None
        if self.state.rank == 0:
            self._draw(reporter)
        for line in self.drawing.summary(trainer.progress.samples):
            reporter.say(line)
        if not stopped:
            self._export(reporter)
        if stopped:
            who = self.stop.reason or "a signal to another rank"
            reporter.say(
                f"stopped by {who} after step {trainer.progress.step}, saved; "
                "the same command continues"
            )
        return Outcome(step=trainer.progress.step, stopped=stopped, evaluation=evaluation)

    def _close_later(self, stack: ExitStack) -> None:
        stack.callback(self.trainer.close)
        if self.shards is not None:
            stack.callback(self.shards.close)  # first, as the thread that reads ahead may wait

    def _drawn(self, before: int) -> Record:
        """Return the samples of each source and rank, for the steps that the console shows."""
        step, every = self.trainer.progress.step, self.config.logging.every
        if self.state.rank or (step % every and not self.trainer.finished):
            return {}
        by_rank = self.drawing.by_rank(before, self.state.size("dp"))
        return self.drawing.record(self.trainer.progress.samples) | by_rank

    def _say_notes(self, reporter: Reporter, record: Record) -> None:
        """Print the notes of the model's parts after a step, on the rank of each part."""
        for part in self.trainer.parts:
            for text in part.notes(record):
                reporter.say_of_rank(self.state.rank, text)
        if "skipped" in record:
            reporter.say(f"skipped {record['skipped']}")

    def _export(self, reporter: Reporter) -> None:
        """Write the last checkpoint for other programs, on the first rank; the others wait."""
        folders = exports_of(self.config)
        if not folders:
            return
        if self.state.rank == 0:
            export(self.config, self.out)
            lora = self.config.lora
            format = None if lora is None else lora.base_format
            for kind, folder in folders.items():
                is_rounded = kind == "hugging_face" and format is not None
                added = f", with the base dequantised from {format}" if is_rounded else ""
                reporter.say(f"exported {folder}{added}")
        summed(self.state, 0)

    def _draw(self, reporter: Reporter) -> None:
        try:
            draw_loss(self.out / "metrics.jsonl", self.out / "loss.png")
        except FileError as error:  # a full disk, say; the training is saved all the same
            reporter.say(f"the losses are not drawn: {error}")

    def _train_step(self) -> Step:
        trainer, path = self.trainer, self.start.path
        try:
            return trainer.train_step(save=self._is_save_due())
        except NonFiniteLossError as error:
            if path is None or trainer.progress != self.start.progress:
                raise
            way_back = saving.way_back(trainer, path)  # the learning rate is not at fault yet
            raise NonFiniteLossError(
                f"{error}. It was the first step from {path}; if other settings do not help, "
                f"go back further: {way_back}"
            ) from error

    def _is_save_due(self) -> bool:
        """Return whether the time between saves has passed, by the clock of rank 0.

        True also after a failure in the background: the following save raises it on all ranks.
        """
        seconds = self.config.checkpoint.every_seconds
        if self.state.rank != 0:
            return False
        if self._background is not None and self._background.failed:
            return True
        if seconds is None:
            return False
        return time.monotonic() - self._last_save >= seconds

    def _recorded_evaluation(self) -> Record | None:
        """Return the recorded evaluation of the current step, if its settings are unchanged."""
        saved = self.start.saved
        if saved is None or not self.start.own:
            return None
        now, before = to_plain(self.config), saved.config["data"]
        same = saved.config.get("evaluation") == now["evaluation"]
        deciding = ("kind", "validation", *self.config.data.own_keys())
        of_data = [before.get(name) == now["data"][name] for name in deciding]
        if not same or not all(of_data):
            return None
        found = None
        for record in read_metrics(self.out / "metrics.jsonl"):
            if record["step"] == saved.step and "val_loss" in record:
                found = record
        return found

    def _evaluation_is_missing(self) -> bool:
        """Return whether a finished run still lacks its evaluation; every rank calls it."""
        missing = False
        if self.state.rank == 0:
            missing = bool(self.held_out) and self._recorded_evaluation() is None
        return summed(self.state, missing)[0] > 0

    def _already_finished(self) -> Outcome:
        step, steps = self.trainer.progress.step, self.config.training.steps
        evaluation = None
        if self.state.rank == 0:
            evaluation = self._recorded_evaluation()
            with make_console(total_steps=steps, every=1) as console:
                Reporter(self.stop, console).say(
                    f"finished: {self.out} is at step {step} and training.steps is {steps}; "
                    "nothing was changed. More steps continue it"
                )
        return Outcome(step=step, stopped=False, evaluation=evaluation)

    def _open_reporter(self, stack: ExitStack) -> Reporter:
        if self.state.rank != 0:
            return Reporter(self.stop)
        config, step = self.config, self.trainer.progress.step
        if not self.trainer.finished:  # else this configuration trains nothing
            origin = None if self.start.own else self.start.path
            named = None if origin is None else str(origin)
            record_part(self.out / "history.jsonl", step, to_plain(config), named)
            write_file(self.out / "config.yaml", to_yaml(config))
        metrics = MetricsFile(
            self.out / "metrics.jsonl", resume_step=step, evaluates_again=self.trainer.finished
        )
        stack.callback(_close_quietly, metrics)
        logs: dict[str, MetricsFile | Board] = {"metrics.jsonl": metrics}
        if config.logging.tensorboard:
            board = Board(self.out / "tensorboard", resume_step=step)
            stack.callback(_close_quietly, board)
            logs["tensorboard"] = board
        console = make_console(total_steps=config.training.steps, every=config.logging.every)
        reporter = Reporter(self.stop, stack.enter_context(console), logs)
        if metrics.damaged:
            lines = ", ".join(str(number) for number in metrics.damaged[:10])
            reporter.say(
                f"metrics.jsonl was damaged in {len(metrics.damaged)} lines (first {lines}); they "
                "are kept in metrics.damaged"
            )
        return reporter

    def _announce(self, reporter: Reporter) -> None:
        layout = self.state.layout
        parameters, trained = self.trainer.count_parameters()
        of_them = "" if trained == parameters else f" ({trained / 1e6:.2f}M trained)"
        reporter.say(
            f"model {parameters / 1e6:.2f}M parameters{of_them}, {self.config.training.dtype} on "
            f"{self.state.device.type}; tp {layout.tp} cp {layout.cp} pp {layout.pp} dp {layout.dp}"
        )
        compiled = self.config.training.compile
        for line in kernel_lines(self.trainer.stages, self.state, compiled=compiled):
            reporter.say(line)
        for part in self.trainer.parts:
            for line in part.lines():
                reporter.say(line)
        for line in self.start.describe(self.config, self.saved.tokenizer_sha256):
            reporter.say(line)
        for line in self.drawing.lines(self.trainer.progress.samples):
            reporter.say(line)
        if self.shards is not None and (built := self.shards.num_built) < self.shards.plan.count:
            text = f"data: {built} of {self.shards.plan.count} shards are built"
            reporter.say(f"{text}, the others beside training")
        if self.trainer.finished:
            reporter.say(f"finished at step {self.trainer.progress.step}; evaluating")

    def _evaluate(self, reporter: Reporter) -> Record | None:
        record = evaluate(self.trainer, self.held_out)
        if record is not None:
            reporter.evaluation(record)
        return record

    def _save(self, reporter: Reporter) -> None:
        reporter.sync()  # the records of a step are on the disk before its checkpoint
        root = self.config.checkpoint.folder(self.out)
        now = self._now()
        self._saved_step = self.trainer.progress.step
        if self._background is None:
            path = saving.save(self.trainer, root, now)
            self._note_saved(path)
            reporter.say(f"saved {path}")
            return
        self._finish_save(reporter)
        saving.save(self.trainer, root, now, self._background)
        self._last_save = time.monotonic()

    def _copy(self, reporter: Reporter) -> None:
        """Copy the state into the memory of nodes, if this step is one of `copy_every`."""
        every = self.config.checkpoint.copy_every
        if self._copies is not None and _is_due(every, self.trainer.progress.step):
            reporter.sync()  # as for a save
            saving.copy(self.trainer, self._copies, self._now())

    def _save_last(self, reporter: Reporter) -> None:
        if self._saved_step != self.trainer.progress.step:
            self._save(reporter)
        self._finish_save(reporter)
        if self._copies is not None:
            self._copies.clear()

    def _now(self) -> SavedRun:
        samples = self.trainer.progress.samples
        mixture = self.drawing.mixture(samples)
        return replace(self.saved, data=mixture, consumed_samples=samples)

    def _open_saver(self, stack: ExitStack) -> None:
        if self.config.checkpoint.async_:
            root = self.config.checkpoint.folder(self.out)
            saver = saving.background_saver(self.trainer, root)
            self._background = stack.enter_context(saver)

    def _finish_save(self, reporter: Reporter) -> None:
        """Wait for the save in the background, if there is one, and raise its failure."""
        if self._background is not None:
            self._background.wait()
            self._say_saved(reporter)

    def _say_saved(self, reporter: Reporter) -> None:
        """Say that a save in the background is complete, once."""
        if self._background is None or self._background.saved == self._said:
            return
        self._said = self._background.saved
        if self.state.rank == 0:
            self.stop.note = f"ended at once; {self._said} is the last that is saved"
        reporter.say(f"saved {self._said}")

    def _note_saved(self, path: Path | None) -> None:
        """Remember the newest checkpoint, for the clock and for a second signal."""
        self._last_save = time.monotonic()
        if self.state.rank == 0:
            self.stop.note = "ended at once; " + (
                "nothing is saved" if path is None else f"{path} is the last that is saved"
            )


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _close_quietly(log: MetricsFile | Board) -> None:
    """Close a log; if it can't be written, the run has said so already."""
    with contextlib.suppress(OSError):
        log.close()
