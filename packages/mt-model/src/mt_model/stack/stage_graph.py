"""Layers, or whole stages, that run as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mt_fusions import AutogradGraph, GraphPool
from torch import Tensor, nn

from mt_model.attend.context import Attend, ForwardContext
from mt_model.block.losses import Losses
from mt_model.stack.batch import Batch
from mt_model.stack.layer import Step, TransformerLayer
from mt_model.stack.stack import Stack

GraphUnit: TypeAlias = Literal["layer", "stage"]

# What a pass says to a layer in tensors; they change from batch to batch, so they are inputs.
_GIVEN = (
    *("tables", "score_tables", "temperatures", "documents", "sample_ids", "hidden_index"),
    *("memory", "memory_mask"),
)


def _no_sinks(_: Iterable[nn.Parameter]) -> Callable[[bool], object]:
    return lambda _: None


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of the graphs that `graph_stage` makes; see `mt_fusions.AutogradGraph`.

    Attributes:
        warmup: Number of passes with gradients that run eagerly before one is watched.
        slots: Largest number of passes that wait for their backward at a time.
        around: Function from the parameters of a layer or stage to a function to call around its
            backward, for gradients that its linear layers add to a buffer themselves.
        on_eager: Function to call once with each reason for running eagerly; None raises an error
            with the reason.
        pool: Memory pool of all graphs; made from the slots by default.
    """

    warmup: int = 2
    slots: int = 16
    around: Callable[[Iterable[nn.Parameter]], Callable[[bool], object]] = _no_sinks
    on_eager: Callable[[str], object] | None = None
    pool: GraphPool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pool", GraphPool(slots=self.slots))


def graph_stage(
    stage: Stack[Any], unit: GraphUnit, options: GraphOptions | None = None
) -> Callable[[Tensor | None, Batch], Any]:
    """Run a stage's passes with gradients as CUDA graphs; on a CPU eagerly, with the same checks.

    Batches have one shape. Passes without gradients run eagerly. Dropout's counters are inputs
    (`sample_ids`), so each replay drops the same elements as eager mode. Recomputation inside of a
    layer (`recompute`) saves no memory.

    Args:
        stage: A stage that a pipeline calls whole, not in parts, with weight gradients in
            backward.
        unit: `layer` for a forward and a backward graph of every layer, or `stage` for one of each.
        options: Warm-up, slots and reports.

    Returns:
        The module to call in place of the stage.

    Raises:
        ValueError: The unit is neither.

    Example:
        >>> from mt_model import GPT, preset
        >>> model = GPT(preset("tiny", vocab_size=64, num_layers=1))
        >>> batch = {"tokens": torch.ones(1, 8, dtype=torch.int64)}
        >>> captured = graph_stage(model, "layer", GraphOptions(on_eager=print))
        >>> for _ in range(4):
        ...     captured(None, batch | {"labels": batch["tokens"]})["lm"].backward()
    """
    options = options or GraphOptions()
    if unit not in ("layer", "stage"):
        raise ValueError(f"unit must be 'layer' or 'stage', got {unit!r}")
    if unit == "stage":
        return _GraphedStage(stage, options)
    for layer in stage.built_layers():
        layer.wrap(lambda step, layer=layer: _GraphedLayer(step, layer, options))
    return stage


class _GraphedStage:
    """A stage captured as a whole."""

    def __init__(self, stage: Stack[Any], options: GraphOptions) -> None:
        first, last = stage.layer_range.start, stage.layer_range.stop - 1
        name = f"the stage of layers {first} to {last}"
        self._graph = _graph(stage, stage, name, options)

    def __call__(self, x: Tensor | None, batch: Batch) -> Any:
        return _own_losses(self._graph(x, dict(batch)))


class _GraphedLayer:
    """A captured layer, or a captured part of one."""

    def __init__(self, step: Step, layer: TransformerLayer, options: GraphOptions) -> None:
        self._plain = step
        self._attend: Attend | None = None
        self._graph = _graph(self._run, layer, f"layer {layer.index}", options)

    def __call__(self, x: Tensor, shared: ForwardContext) -> tuple[Tensor, Losses]:
        if shared.saved is not None:
            return self._plain(x, shared)
        self._attend = shared.attend
        return _own_losses(self._graph(x, {name: getattr(shared, name) for name in _GIVEN}))

    def _run(self, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Losses]:
        assert self._attend is not None, "a layer is captured in a pass"  # noqa: S101
        return self._plain(x, ForwardContext(attend=self._attend, **given))


def _own_losses(output: Any) -> Any:
    """Copy losses out of memory that later passes overwrite, as they are read at the step's end."""
    if isinstance(output, tuple):
        return output[0], _own_losses(output[1])
    if isinstance(output, Mapping):
        return {name: loss.clone() for name, loss in output.items()}
    return output


def _graph(
    function: Callable[..., Any], module: nn.Module, name: str, options: GraphOptions
) -> AutogradGraph[..., Any]:
    graph = AutogradGraph(
        function,
        state=module,
        name=name,
        pool=options.pool,
        warmup=options.warmup,
        on_eager=options.on_eager,
    )
    graph.around = options.around(list(module.parameters()))
    return graph
