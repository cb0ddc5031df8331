"""The weights of an engine: loaded from a run, and swapped while requests go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mt_model import GPT, Kernels, invariance_obstacle, saved_buffers
from mt_parallel_state import ParallelState
from mt_quant import QuantizedLinear
from torch import Tensor

from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.ranks import Ranks
from mt_infer.loading import Run, RunError, built_model, fill_weights, open_run, same_run


class Weights:
    """The weights of a loop's model; whoever calls holds the engine's lock.

    Args:
        model: The model.
        loop: The loop that serves it.
        run: The opened folder that it was loaded from.
        state: This rank's place in the layout.

    Attributes:
        ema: Whether steps are read as averages of the weights.
    """

    def __init__(
        self, model: GPT, loop: Loop, run: Run | None, state: ParallelState | None
    ) -> None:
        self._model, self._loop, self._run, self._state = model, loop, run, state
        self.ema, self._are_away = False, False

    def load_step(self, step: int | None, *, finish: bool) -> int | None:
        """Read a checkpoint of the run; see `Engine.load_step`."""
        if self._run is None or self._run.step is None or self._state is None:
            raise ValueError("load_step needs an engine made by from_folder of an mt-train run")
        with open_run(self._run.folder, step) as own, same_run(own, self._state) as run:
            if run.config != self._run.config:
                raise RunError(f"{run.source}: its model is not the engine's; make a new engine")
            with self._swapped(run.step, finish=finish):
                fill_weights(self._model, run, self._state, ema=self.ema)
            return run.step

    def update(self, weights: Mapping[str, Tensor], step: int | None, *, finish: bool) -> None:
        """Copy parameters and buffers; see `Engine.update_weights`."""
        buffers, rounded = saved_buffers([self._model]), self._rounded()
        own = dict(self._model.named_parameters()) | buffers
        for name, x in weights.items():
            if name in rounded:
                rounded[name].check_weight(x, name)
            elif name not in own or own[name].shape != x.shape:
                has = "none of that name" if name not in own else list(own[name].shape)
                raise ValueError(f"weights has {name} {list(x.shape)}, and the model {has}")
        with self._swapped(step, finish=finish), torch.no_grad():
            for name, x in weights.items():
                if name in rounded:
                    rounded[name].round_weight(x)
                else:
                    own[name].copy_(x)

    def _rounded(self) -> dict[str, QuantizedLinear]:
        """Return the quantised layers by the name that their weight had."""
        named = self._model.named_modules()
        layers = {name: each for name, each in named if isinstance(each, QuantizedLinear)}
        return {f"{name}.weight": layer for name, layer in layers.items()}

    def sleep(self, level: int) -> None:
        """Free the pages, and at level 2 the weights; see `Engine.sleep`."""
        if level not in (1, 2):
            raise ValueError(f"level={level}: use 1 to free keys and values, or 2 for weights too")
        self._loop.sleep()
        if level == 2:
            for runner in self._loop.runners:
                runner.model.to("cpu")
            self._are_away = True
        torch.cuda.empty_cache()  # for other processes of the device

    def wake(self) -> None:
        """Make the pages anew, and bring weights back; see `Engine.wake`."""
        for runner in self._loop.runners:
            if self._are_away:
                runner.model.to(runner.device)
            runner.wake()
        self._are_away = False

    @contextmanager
    def _swapped(self, step: int | None, *, finish: bool) -> Iterator[None]:
        while finish and self._loop.scheduler and self._loop.runner.is_awake:
            self._loop.advance()
        try:
            yield
        except BaseException as error:
            self._loop.forget(None)
            self._loop.sleep()
            error.add_note(
                "the engine sleeps, as its weights may be of two steps; load one, and wake"
            )
            raise
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
        if options.batch_invariant or not obstacle_of(model, Ranks(state)):
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


def obstacle_of(model: GPT, ranks: Ranks) -> str | None:
    """Say why a token's bits depend on its pass, on this rank or another; None if they don't."""
    return ranks.any(invariance_obstacle(model))
