"""Quantisation of a model, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from mt_files import check_type
from torch import Tensor, nn

from mt_quant.calibration.statistics import Collector, Statistics, observed
from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.activation import step_of
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.weight import QuantizedMatrix
from mt_quant.layers.linear import QuantizedLinear, tensors_of
from mt_quant.layers.shape import LinearShape, shape_of
from mt_quant.methods.registry import METHODS
from mt_quant.models.layer_folder import LayerFolder, origin_of
from mt_quant.models.places import places_of, replaced
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.rule import Decision

if TYPE_CHECKING:
    from mt_quant.calibration.walk import Walk


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of `quantize`.

    Attributes:
        name: Name of the last finished layer.
        done: Number of finished layers.
        total: Number of layers to quantise.
    """

    name: str
    done: int
    total: int


def quantize(
    model: nn.Module,
    config: QuantizationConfig,
    calibration: Iterable[Any] | None = None,
    *,
    folder: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> nn.Module:
    """Replace a model's linear layers in place by quantised layers, one at a time.

    Besides the model, memory holds one layer's whole weight in fp32, its quantised form, and the
    activations of all calibration batches at one place of the model. Statistics come from inputs
    that the earlier, already quantised layers produce. A layer that ranks split is gathered,
    rounded as one rank would, and split again, so the result does not depend on the layout; every
    rank calls this function with the same batches.

    Args:
        model: The model, changed in place. If the model itself is a linear layer, the returned
            module replaces it.
        config: The rules.
        calibration: Batches, each the arguments of the model's forward as a tensor, tuple, list or
            mapping. Needed by methods that read statistics and by static scales. The model is in
            eval mode while they run.
        folder: Folder that keeps finished layers, from which an interrupted call continues.
        progress: Called after each layer.

    Returns:
        The model.

    Raises:
        QuantizationError: The rules do not fit the model, and nothing was changed; or the folder
            holds layers made from other rules or weights.
        CalibrationError: Data is needed and missing, empty or not finite, or never reaches a layer.
        FileError: The folder can't be read or written.
    """
    check_type("config", config, QuantizationConfig)
    decisions = {n: d for n, d in config.decide(model).items() if d.weight is not None}
    work = _Work(model, decisions, None if folder is None else LayerFolder(folder), progress)
    needs = {name: _needs(decision) for name, decision in decisions.items()}
    # With calibration, even layers without needs are replaced in order: later layers see them.
    if any(needs.values()):
        batches = _batches(calibration, [name for name in needs if needs[name]])
        work.calibrated(batches, needs)
    for name in decisions:
        if name not in work.finished:
            work.finish(name, _absent(name, needs[name]))
    return work.model


class _Work:
    """The layers of one model, finished and unfinished."""

    def __init__(
        self,
        model: nn.Module,
        decisions: Mapping[str, Decision],
        folder: LayerFolder | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.decisions, self.finished = model, decisions, set[str]()
        self._folder, self._progress = folder, progress
        self._places = places_of(model, decisions)
        self._shapes = {name: shape_of(self._module(name), name) for name in decisions}
        self._training = {name: self._module(name).training for name in decisions}

    def calibrated(self, batches: list[Any], needs: Mapping[str, frozenset[str]]) -> None:
        """Finish the layers that the batches reach, stage by stage."""
        from mt_quant.calibration.walk import Walk  # only calibration needs it

        stages = _stages(self.model, list(self.decisions))
        walk = Walk(self.model, {name: self._module(name) for name in stages}, batches)
        with walk.running() as steps:
            for stage in steps:
                self._stage(walk, stage, stages[stage], needs)

    def _stage(
        self, walk: Walk, stage: str, names: list[str], needs: Mapping[str, frozenset[str]]
    ) -> None:
        # Layers that the folder has need no statistics, so their stage may not run at all.
        saved = {name: self._saved(name) for name in names}
        wanted = {
            n: Collector(n, self._shapes[n], needs[n]) for n in names if needs[n] and not saved[n]
        }
        if wanted:
            with ExitStack() as hooks:
                # The stage itself is called without its hooks, so `look` observes it.
                for name, collector in wanted.items():
                    if name != stage:
                        hooks.enter_context(observed(self._module(name), collector))
                own = wanted.get(stage)
                walk.look(None if own is None else own.add)
        for name in names:
            collector = wanted.pop(name, None)  # frees its sums
            self.finish(name, None if collector is None else collector.result(), saved[name])
            if name == stage:
                walk.put(stage, self._module(name))

    def finish(
        self,
        name: str,
        statistics: Statistics | None,
        saved: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace a layer, with tensors from the folder or from its method."""
        layer, decision, shape = self._module(name), self.decisions[name], self._shapes[name]
        tensors = saved or self._saved(name)
        try:
            if tensors is None:
                tensors = make_tensors(layer, shape, decision, statistics)
                if self._folder is not None:
                    self._folder.save(name, tensors, self._origin(name), shape)
            format = cast("WeightFormat", decision.weight)
            made = QuantizedLinear.from_layer(
                layer, shape, tensors, format=format, input=decision.input
            )
        except QuantizationError as error:
            raise type(error)(f"{name}: {error}") from error
        made.train(self._training[name])  # a walk sets eval mode
        self.model = replaced(self.model, self._places[name], made)
        self.finished.add(name)
        if self._progress is not None:
            done, total = len(self.finished), len(self.decisions)
            self._progress(Progress(name=name, done=done, total=total))

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def _origin(self, name: str) -> dict[str, str]:
        weight = cast(Tensor, self._module(name).weight)
        return origin_of(weight, self.decisions[name], self._shapes[name])

    def _saved(self, name: str) -> dict[str, Tensor] | None:
        if self._folder is None:
            return None
        return self._folder.load(name, self._origin(name), self._shapes[name])


@torch.no_grad()
def make_tensors(
    layer: nn.Module, shape: LinearShape, decision: Decision, statistics: Statistics | None
) -> dict[str, Tensor]:
    """Return this rank's codes and scales of a layer, by name.

    Raises:
        QuantizationError: The format does not fit, or the weight is not finite.
        CalibrationError: Statistics are needed and missing.
    """
    weight = cast("nn.Parameter", layer.weight)
    method = METHODS[decision.method].function
    matrix = method(shape.gathered(weight), decision.weight, statistics, **decision.options)
    tensors = tensors_of(matrix, shape, weight.dtype)
    if decision.input is not None and not decision.input.dynamic:
        tensors["input_step"] = step_of(_input_max(matrix, statistics), decision.input).view(1, 1)
    return tensors


def _input_max(matrix: QuantizedMatrix, statistics: Statistics | None) -> Tensor:
    """Return the largest magnitude of the product's operand: the input times its scale."""
    if statistics is None or statistics.abs_max is None:
        raise CalibrationError("a static scale of the input needs calibration data")
    scale = matrix.input_scale
    return (statistics.abs_max if scale is None else statistics.abs_max * scale.abs()).amax()


def _needs(decision: Decision) -> frozenset[str]:
    """Return the statistics that a layer's quantisation reads."""
    is_static = decision.input is not None and not decision.input.dynamic
    return METHODS[decision.method].needs | ({"abs_max"} if is_static else set())


def _batches(calibration: Iterable[Any] | None, names: list[str]) -> list[Any]:
    batches = [] if calibration is None else list(calibration)
    if not batches:
        raise CalibrationError(
            f"{len(names)} layers, the first {names[0]}, need calibration data (a method that "
            "reads statistics, or a static scale), and there is none; pass batches of inputs"
        )
    return batches


def _absent(name: str, needs: frozenset[str]) -> None:
    """Refuse to finish a layer without the statistics that it needs."""
    if needs:
        raise CalibrationError(
            f"{name} was not called with the calibration data; leave it out with a rule, or give "
            "it method rtn and dynamic scales"
        )


def _stages(model: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """Return the modules before which batches stop, with the layers inside them.

    A stage is an outermost entry of a module list, or a layer outside of all lists.
    """
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    stages: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        above = (".".join(parts[:i]) for i in range(len(parts)))
        depth = next((i for i, prefix in enumerate(above) if prefix in lists), None)
        stage = name if depth is None else ".".join(parts[: depth + 1])
        stages.setdefault(stage, []).append(name)
    return stages
