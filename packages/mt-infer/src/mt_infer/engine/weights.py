"""The weights of an engine: loaded from a run, and swapped while requests go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from mt_model import (
    GPT,
    Kernels,
    invariance_obstacle,
    pack_weights,
    saved_buffers,
    serving_products,
)
from mt_parallel_state import ParallelState, shardings
from mt_quant import QuantizedLinear
from torch import Tensor

from mt_infer.digests import Identity, run_digest
from mt_infer.dtypes import dtype_of
from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.ranks import Ranks
from mt_infer.loading import (
    Run,
    RunError,
    built_model,
    fill_weights,
    open_run,
    same_run,
)


class Weights:
    """The weights of a loop's model; callers hold the engine's lock.

    Args:
        model: The model.
        loop: The loop that serves it.
        run: The opened folder of the model.
        ranks: The ranks that serve the same requests.

    Attributes:
        ema: Whether the moving averages of the weights are read.
    """

    def __init__(self, model: GPT, loop: Loop, run: Run | None, ranks: Ranks) -> None:
        self._model, self._loop, self._run, self._ranks = model, loop, run, ranks
        self.ema, self._are_away = False, False
        loop.add_deeds(self.read_step, self.sleep, self.wake)
        self._pack()

    @property
    def source(self) -> str | None:
        """Digest of the files with the weights; None for weights that a caller gave."""
        identity = self._loop.identity
        return identity.digest if identity.is_of_files else None

    def load_step(self, step: int | None, *, finish: bool) -> int | None:
        """Read a checkpoint of the run; see `Engine.load_step`."""
        if self._run is None or self._run.step is None or self._ranks.state is None:
            raise ValueError("load_step needs an engine made by from_folder of an mt-train run")
        with open_run(self._run.folder, step) as run:
            if run.config != self._run.config:
                raise RunError(f"{run.source}: its model is not the engine's; make a new engine")
            if finish:
                self.finish()
            error = self._ranks.do(self.read_step, step=run.step, digest=run_digest(run))
            if error is not None:
                raise error
            return run.step

    def read_step(self, step: int | None, digest: str) -> BaseException | None:
        """Read a checkpoint, which the first rank protects; return the error of a rank.

        Args:
            step: Step of the checkpoint.
            digest: Digest of its weights.
        """
        made_of, state = self._run, self._ranks.state
        assert made_of is not None, "the first rank has seen to it"  # noqa: S101
        assert state is not None, "the first rank has seen to it"  # noqa: S101
        try:
            identity = Identity(step, lambda: digest, is_of_files=True)
            with self._swapped(identity), open_run(made_of.folder, step) as run:
                fill_weights(self._model, run, state, group=self._ranks.group, ema=self.ema)
        except BaseException as error:  # noqa: BLE001 - the first rank raises it
            return error
        return None

    def update(self, weights: Mapping[str, Tensor], step: int | None, *, finish: bool) -> None:
        """Copy parameters and buffers, as each rank does; see `Engine.update_weights`."""
        if not self._ranks.is_first:
            step = self.follow("update_weights")["step"]
        else:
            if finish:
                self.finish()
            self._ranks.tell("update_weights", step=step)
        own = dict(self._model.named_parameters()) | saved_buffers([self._model])
        rounded = self._rounded()
        problem = self._ranks.any(_misfit(weights, own, rounded))
        if problem is not None:
            raise ValueError(problem)
        with self._swapped(Identity.of_model(self._model, step)), torch.no_grad():
            for name, x in weights.items():
                if name in rounded:
                    rounded[name].round_weight(x)
                else:
                    own[name].copy_(x)

    def follow(self, end: str) -> dict[str, Any]:
        """Do the first rank's deeds until it calls a method, and return its arguments."""
        name, arguments = self._ranks.follow(self._loop.deeds)
        with self._ranks.passing_on_errors():
            if name != end:
                raise ValueError(f"rank 0 calls {name}(), and this rank waits for {end}()")
        return arguments

    def _rounded(self) -> dict[str, QuantizedLinear]:
        """Return the quantised layers by the original names of their weights."""
        named = self._model.named_modules()
        layers = {name: each for name, each in named if isinstance(each, QuantizedLinear)}
        return {f"{name}.weight": layer for name, layer in layers.items()}

    def sleep(self, level: int) -> None:
        """Free the pages, and at level 2 the weights; see `Engine.sleep`."""
        self._loop.sleep()
        if level == 2:
            for runner in self._loop.runners:
                runner.model.to("cpu")
                pack_weights(runner.model, when=False)
            self._are_away = True
        torch.cuda.empty_cache()  # for other processes of the device

    def wake(self) -> None:
        """Make new pages, and bring weights back; see `Engine.wake`."""
        for runner in self._loop.runners:
            if self._are_away:
                runner.model.to(runner.device)
            runner.wake()
        if self._are_away:
            self._pack()
        self._are_away = False

    def _pack(self) -> None:
        """Pack the weights of models that the engine loaded, since only the engine changes them."""
        if self._run is not None and self._loop.runner.packs_weights:
            for runner in self._loop.runners:
                pack_weights(runner.model)

    def finish(self) -> None:
        """Let running requests end with their current weights, unless the engine sleeps."""
        while self._loop.scheduler and self._loop.runner.is_awake:
            self._loop.advance()

    @contextmanager
    def _swapped(self, identity: Identity) -> Iterator[None]:
        """Forget all blocks of the old weights; if a rank has an error, all sleep and raise it.

        Args:
            identity: Step and digest of the weights at the block's end.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:  # noqa: BLE001
            error = raised
        problem = self._ranks.any(None if error is None else f"{type(error).__name__}: {error}")
        is_whole = problem is None
        self._loop.forget(identity if is_whole else Identity.of_model(self._model, None))
        if problem is None:
            self._pack()
            return
        self._loop.sleep()
        error = RunError(f"another rank: {problem}") if error is None else error
        error.add_note("the engine sleeps, as its weights may be of two steps; load one, and wake")
        raise error


def _misfit(
    weights: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    rounded: Mapping[str, QuantizedLinear],
) -> str | None:
    """Name a tensor that the model lacks or has in another shape; None if all fit."""
    for name, x in weights.items():
        if name in rounded:
            rounded[name].check_weight(x, name)
        elif name not in own or own[name].shape != x.shape:
            has = "none of that name" if name not in own else list(own[name].shape)
            return f"weights has {name} {list(x.shape)}, and the model {has}"
    return None


def loaded_model(run: Run, state: ParallelState, options: EngineOptions, how: Any) -> GPT:
    """Return an opened run's model, with invariant kernels if the options or the probe say so.

    Args:
        run: The run.
        state: This rank's place in the layout.
        options: Sizes and switches.
        how: `dtype`, `ema` and `kernels`; see `load_run`.
    """
    how = _serving(options, state, how) | {"mtp": options.speculate == "mtp"}
    if options.batch_invariant is False or state.size("cp") > 1:
        return built_model(run, state, **how)
    usual = Kernels.of(how.get("kernels", "auto"))
    gemm = "auto" if usual.gemm in ("packed", "wide") else usual.gemm  # it packs weights, too
    kernels = replace(usual, attention="invariant", gemm=gemm)
    model = built_model(run, state, **how | {"kernels": kernels})
    if options.batch_invariant or not obstacle_of(model, Ranks(state)):
        return model
    return with_kernels(model, usual)


def with_kernels(model: GPT, kernels: Kernels) -> GPT:
    """Return a loaded model with other kernels, and with the same parameters and buffers."""
    config, how = model.config, {"layers": model.layer_range, "dtype": model.shard.dtype}
    made = cast("GPT", config.build(model.state, **how, kernels=kernels, seed=None, device="meta"))
    own = dict(made.named_modules())
    for path, module in model.named_modules():
        if path in own and type(own[path]) is type(module):
            own[path]._parameters.update(module._parameters)
            own[path]._buffers.update(module._buffers)
        elif path in own:  # such as a quantised layer
            owner, _, leaf = path.rpartition(".")
            made.get_submodule(owner).register_module(leaf, module)
    shardings(made)
    made.origin, made.kv_schemes = model.origin, model.kv_schemes
    return made.train(model.training)


def _serving(options: EngineOptions, state: ParallelState, how: dict[str, Any]) -> dict[str, Any]:
    """Choose the fastest products for a serving model, unless the caller names some."""
    kernels = Kernels.of(how.get("kernels", "auto"))
    if kernels.gemm != "auto":
        return how
    dtype = dtype_of(state, how.get("dtype"))
    gemm = serving_products(dtype, state.device, packs=options.pack_weights)
    return how | {"kernels": replace(kernels, gemm=gemm)}


def with_draft(options: EngineOptions, state: ParallelState, how: Any) -> EngineOptions:
    """Return the options with a loaded model in place of the folder of the guessing model.

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
        model = built_model(run, state, **_serving(options, state, how))
        return replace(options, speculate=model)


def obstacle_of(model: GPT, ranks: Ranks) -> str | None:
    """Return why a token's bits depend on its pass, on this or another rank; None if they don't."""
    return ranks.any(invariance_obstacle(model))
