"""The weights of an engine: loaded from a run, and swapped while requests go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mt_model import GPT, Kernels, invariance_obstacle
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.loading import Run, built_model, fill_weights, open_run, same_run

WORLD = "tp-cp-dp-pp"


class Weights:
    """The weights of a loop's model; whoever calls holds the engine's lock.

    Args:
        model: The model.
        loop: The loop that serves it.
        run: The opened folder that it was loaded from.
        state: This rank's place in the layout.
    """

    def __init__(
        self, model: GPT, loop: Loop, run: Run | None, state: ParallelState | None
    ) -> None:
        self._model, self._loop, self._run, self._state = model, loop, run, state

    def load_step(self, step: int | None, *, finish: bool) -> int | None:
        """Read a checkpoint of the run; see `Engine.load_step`."""
        if self._run is None or self._run.step is None or self._state is None:
            raise ValueError("load_step needs an engine made by from_folder of an mt-train run")
        with open_run(self._run.folder, step) as own, same_run(own, self._state) as run:
            with self._swapped(run.step, finish=finish):
                fill_weights(self._model, run, self._state)
            return run.step

    def update(self, weights: Mapping[str, Tensor], step: int | None, *, finish: bool) -> None:
        """Copy parameters; see `Engine.update_weights`."""
        own = dict(self._model.named_parameters())
        for name, x in weights.items():
            if name not in own or own[name].shape != x.shape:
                has = "none of that name" if name not in own else list(own[name].shape)
                raise ValueError(f"weights has {name} {list(x.shape)}, and the model {has}")
        with self._swapped(step, finish=finish), torch.no_grad():
            for name, x in weights.items():
                own[name].copy_(x)

    def sleep(self) -> None:
        """Free the memory of keys and values; see `Engine.sleep`."""
        self._loop.forget(self._loop.step_of_weights)
        for each in self._loop.runners:
            each.sleep()

    def wake(self) -> None:
        """Make the memory of keys and values anew; see `Engine.wake`."""
        for each in self._loop.runners:
            each.wake()

    @contextmanager
    def _swapped(self, step: int | None, *, finish: bool) -> Iterator[None]:
        while finish and self._loop.scheduler:
            self._loop.advance()
        yield
        self._loop.forget(step)


def loaded_model(run: Run, state: ParallelState, options: EngineOptions, how: Any) -> GPT:
    """Return an opened run's model, with invariant kernels if the options or the probe say so.

    Args:
        run: The run.
        state: This rank's place in the layout.
        options: Sizes and switches.
        how: `dtype`, `ema` and `kernels`; see `load_run`.
    """
    how = how | {"mtp": options.speculate == "mtp"}
    if options.batch_invariant is not False and state.size("cp") == 1:
        kernels = replace(Kernels.of(how.get("kernels", "auto")), attention="invariant")
        model = built_model(run, state, **how | {"kernels": kernels})
        if options.batch_invariant or not obstacle_of(model, state):
            return model
    return built_model(run, state, **how)


def with_draft(options: EngineOptions, state: ParallelState, how: Any) -> EngineOptions:
    """Return the options with the model of a folder that guesses tokens in place of the folder.

    Args:
        options: Sizes and switches.
        state: This rank's place in the layout.
        how: `dtype` and `kernels`; see `load_run`.
    """
    folder = options.speculate
    if not isinstance(folder, str | Path) or folder in ("ngram", "mtp"):
        return options
    how = {name: value for name, value in how.items() if name != "ema"}
    with open_run(Path(folder)) as own, same_run(own, state) as run:
        return replace(options, speculate=built_model(run, state, **how))


def obstacle_of(model: GPT, state: ParallelState | None) -> str | None:
    """Say why a token's bits depend on its pass, on this rank or another; None if they don't."""
    problem = invariance_obstacle(model)
    group = None if state is None else state.group(WORLD)
    if group is not None:
        found = torch.tensor(problem is not None, device=model.shard.device).int()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        if found and problem is None:
            problem = "another rank has other bits for a token in another pass"
    return problem
