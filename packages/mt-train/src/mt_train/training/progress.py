"""Progress of a run, and its learning rate and end as functions of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mt_optim import LRSchedule, WeightDecaySchedule

from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, which a checkpoint records.

    Attributes:
        step: Number of completed steps.
        samples: Number of samples trained on; it does not follow from the step, since the batch
            size may have changed.
        elapsed: Seconds spent in training steps, over all parts of the run.
        skipped: Number of completed steps that changed no weight, because their gradient was not
            finite or too large. Their samples are used up, and they count towards the end of the
            run, but not for the schedule.
    """

    step: int = 0
    samples: int = 0
    elapsed: float = 0.0
    skipped: int = 0

    @property
    def updates(self) -> int:
        """Steps that changed the weights."""
        return self.step - self.skipped


class Course:
    """The rates and the end of a run, as functions of its progress, without state.

    Args:
        config: The run.
    """

    def __init__(self, config: RunConfig) -> None:
        training, optimizer = config.training, config.optimizer
        self.steps, self._time_budget = training.steps, training.time_budget
        decay = max(self.steps + 1, optimizer.warmup)  # the last step still has a rate
        self.schedule = LRSchedule(
            kind=optimizer.schedule,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup=optimizer.warmup,
            decay=decay,
            wsd_anneal=min(round(optimizer.anneal * self.steps), decay - optimizer.warmup),
            wsd_shape=optimizer.anneal_shape,
        )
        last = optimizer.weight_decay_end
        self.decay_schedule = WeightDecaySchedule(
            kind=optimizer.weight_decay_schedule,
            start=optimizer.weight_decay,
            end=optimizer.weight_decay if last is None else last,
            length=self.steps,
        )

    def position(self, progress: Progress) -> float:
        """Return the position in the schedule, in updates; the time budget may advance it."""
        return max(progress.updates, self._steps_by_time(progress))

    def finished(self, progress: Progress) -> bool:
        """Return whether the steps, or the time budget, are used up."""
        return self._done(progress) >= self.steps

    def learning_rate(self, progress: Progress) -> float:
        """Return the next step's rate; time may shorten the run but never the warm-up."""
        lr = self.schedule.at(self.position(progress) + 1)
        update = progress.updates + 1
        return min(lr, self.schedule.at(update)) if update <= self.schedule.warmup else lr

    def weight_decay(self, progress: Progress) -> float:
        """Return the next step's weight decay."""
        return self.decay_schedule.at(self.position(progress) + 1)

    def share(self, progress: Progress) -> float:
        """Return the completed share of the run, from 0 to 1."""
        return min(self._done(progress) / self.steps, 1.0)

    def seconds_left(self, progress: Progress) -> float:
        """Return the seconds to the end, at the speed so far."""
        done = self._done(progress)
        return progress.elapsed * max(self.steps - done, 0.0) / max(done, 1e-9)

    def _done(self, progress: Progress) -> float:
        """Return the progress of the run in steps, including skipped ones."""
        return max(progress.step, self._steps_by_time(progress))

    def _steps_by_time(self, progress: Progress) -> float:
        if self._time_budget is None:
            return 0.0
        return progress.elapsed / self._time_budget * self.steps


class StepMeter:
    """A clock that runs during training steps, and not during evaluations or saves.

    A lap ends where the ranks agree on the time: the wait for the agreement, which on a GPU is most
    of a step, and the update are in the next lap.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._carried = 0.0

    def start(self) -> None:
        """Let the clock run."""
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds that the clock ran since the last lap."""
        now = time.perf_counter()
        seconds = self._carried + now - self._since
        self._since, self._carried = now, 0.0
        return seconds

    def stop(self) -> None:
        """Stop the clock; the time since the last lap counts for the next one."""
        self._carried = time.perf_counter() - self._since
