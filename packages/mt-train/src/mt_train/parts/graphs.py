"""CUDA graphs of layers or stages, and of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator

from mt_data_parallel import GradBuffer, GraphSinks
from mt_fusions import GraphPool
from mt_model import GraphOptions, graph_stage
from mt_optim import device_step_obstacle

from mt_train.config.run_config import RunConfig
from mt_train.parts.captured_update import CapturedUpdate
from mt_train.parts.part import Run, Setup, TrainerPart
from mt_train.parts.update import Update
from mt_train.reporting.metrics import Record


class CudaGraphs(TrainerPart):
    """CUDA graphs of the units that `training.cuda_graphs` names."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._unit = setup.config.training.cuda_graphs
        self._pool: GraphPool | None = None
        self._sinks: GraphSinks | None = None
        self._reasons: list[str] = []  # why something runs eagerly, until it is printed
        self._captures_update = False

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether the run captures graphs."""
        return config.training.cuda_graphs != "none"

    def parameters_ready(self, buffer: GradBuffer) -> None:
        """Have replayed backwards add weight gradients to the buffer themselves."""
        self._sinks = GraphSinks(buffer.sink)
        for stage in self.setup.stages:
            stage.sum_weight_gradients(self._sinks.sink)

    def wrap(self, runs: list[Run]) -> list[Run]:
        """Return a graph for each stage, or the stage with a graph for each of its layers."""
        del runs
        assert self._sinks is not None, "parameters_ready made them"  # noqa: S101
        number = self.setup.microbatches
        options = GraphOptions(
            warmup=number, slots=number, around=self._sinks.around, on_eager=self._reasons.append
        )
        self._pool = options.pool
        unit = "layer" if self._unit == "layer" else "stage"
        return [graph_stage(stage, unit, options) for stage in self.setup.stages]

    def wrap_update(self, update: Update) -> Update:
        """Return the optimizer's step as a graph, if the run asks for it and it can be captured."""
        if self._unit != "step" or self._pool is None:
            return update
        why = device_step_obstacle(update.optimizer)
        if why is not None:
            self._reasons.append(f"the optimizer's step runs eagerly: {why}")
            return update
        self._captures_update = True
        return CapturedUpdate(
            update.optimizer, update.state, pool=self._pool, on_eager=self._reasons.append
        )

    def lines(self) -> Iterator[str]:
        """Yield the captured units."""
        device = self.setup.state.device
        what = "each layer" if self._unit == "layer" else "each stage"
        what += ", and the optimizer's step" if self._captures_update else ""
        first = f"cuda_graphs: forward and backward of {what}, from the second step on"
        if device.type != "cuda":
            first += f"; on a {device.type.upper()} they run eagerly, held to the rules of a graph"
        yield first
        if self._unit == "layer":
            yield "cuda_graphs: the optimizer's step runs eagerly; step captures it"

    def notes(self, record: Record) -> Iterator[str]:
        """Yield each reason why something runs eagerly, once."""
        del record
        reasons, self._reasons[:] = list(self._reasons), []
        return (f"cuda_graphs: {reason}" for reason in reasons)
