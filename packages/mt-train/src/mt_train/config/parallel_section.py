"""The sections about ranks: `parallel`, `data_parallel` and `pipeline`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mt_files import Checks, did_you_mean, divisors, shorten
from mt_schedule import SCHEDULES

from mt_train.config.limits import MAX_RANKS, Dtype, listed

ContextAlgorithm: TypeAlias = Literal["ring", "all_gather", "ulysses", "hierarchical"]

_MAX_PREFETCH = 4096  # the largest number of layers


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Numbers of ranks along the axes of parallelism; their product is the number of processes.

    Attributes:
        tp: Tensor parallel: ranks that share each layer's weights.
        pp: Pipeline parallel: ranks that hold different layers.
        dp: Data parallel: ranks with different batches; by default the number of processes divided
            by the other axes.
        cp: Context parallel: ranks that share each sequence.
        cp_algorithm: Way of attention to the keys of the other cp ranks: `ring`, `all_gather`,
            `ulysses` (swaps heads) or `hierarchical` (swaps heads among `cp_inner` neighbours, ring
            between them). One for all layers, or a list with one for each.
        cp_inner: Neighbours of the hierarchical algorithm; divides `cp`.
        ep: Expert parallel: ranks that share the experts of a layer. They are ranks of `tp`, `cp`
            and `dp` together, which it divides with `etp`.
        etp: Ranks that share each expert's weights; by default `tp`, or 1 if `ep` is above 1.
        order: Order of the axes; ranks along the first axis are the nearest neighbours.
        sequence_parallel: Split the activations between the tensor-parallel regions over the
            sequence; saves memory for the same traffic.
        bucket_size: Elements of a gradient bucket; each is reduced as soon as it is full.
        check_timeout: Seconds. Compares every collective between its ranks before it starts, which
            names the call and the rank behind a wrong number or a hang; slow.
        hang_report: Seconds without progress after which a rank that waits in a collective reports
            it: which ranks wait where, and where the others are. Null for no report.
    """

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    cp_algorithm: ContextAlgorithm | tuple[ContextAlgorithm, ...] = "ring"
    cp_inner: int | None = None
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = False
    bucket_size: int = 25 * 2**20 // 4
    check_timeout: float | None = None
    hang_report: float | None = 60.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        axes = ("tp", "pp", "dp", "cp", "cp_inner", "ep", "etp")
        checks.at_least(1, *axes, "bucket_size")
        checks.at_most(MAX_RANKS, *axes)
        checks.at_most(1 << 40, "bucket_size")
        checks.above(0, "check_timeout", "hang_report")
        checks.at_most(10**6, "check_timeout", "hang_report")
        hierarchical = not checks.errors and "hierarchical" in self.cp_algorithms(1)
        if hierarchical and (not self.cp_inner or self.cp % self.cp_inner):
            text = f"{self.cp_inner} does not divide parallel.cp {self.cp}, which the hierarchical "
            text += f"algorithm needs; use one of {listed(divisors(self.cp))}"
            checks.add("cp_inner", text)
        checks.done()

    def cp_algorithms(self, num_layers: int) -> tuple[ContextAlgorithm, ...]:
        """Return the algorithm of each layer."""
        chosen = self.cp_algorithm
        return (chosen,) * num_layers if isinstance(chosen, str) else chosen


@dataclass(frozen=True, kw_only=True)
class DataParallelSection:
    """Sharding of optimizer state, gradients and parameters over data- and context-parallel ranks.

    Attributes:
        strategy: `none` (everything is on every rank), `optimizer` (ZeRO-1: each rank has its
            part of the optimizer's state and masters, and steps it), `optimizer_gradients` (ZeRO-2:
            each rank has its part of the gradients too, with a reduction per micro-batch) or `full`
            (ZeRO-3: also its part of the parameters, which are fetched layer by layer). The numbers
            stay the same.
        replicas: Number of replica groups (HSDP): state is sharded within a group, and the groups
            hold copies of each other, which needs less traffic between distant ranks and more
            memory. Divides `parallel.dp` x `parallel.cp`.
        overlap: Sum gradients while backward still runs. The numbers stay the same.
        prefetch: With strategy `full`, number of layers whose parameters are fetched while the
            layer before them runs. With `optimizer` and `optimizer_gradients`, 0 waits for the
            parameters after a step; above 0 each layer's forward waits for its own. By default 1,
            or 0 with `training.compile` and a schedule of dualpipe, or `training.cuda_graphs`.
        grad_dtype: Dtype of gradient accumulation on each rank; by default fp32 (fp64 for fp64).
        reduce_dtype: Dtype of gradients on their way between ranks; by default `grad_dtype`.
        local_sum: Send each rank the addends of its part, which it adds in fp32, instead of adding
            them on the way: one rounding to `reduce_dtype` for any number of ranks.
        pad_for_bandwidth: Pad every collective to a multiple of 65536 elements, which is faster on
            some networks.
        shard_dtype: Dtype of a rank's part of the parameters, which it steps: `fp32` with
            `training.dtype` bf16 makes the part its master weights, without another copy. By
            default `training.dtype`. Not with strategy `none`.
        offload: Keep that part, and its gradients, in the host's memory, where they are stepped.
            Not with strategy `none`.
        unused: Treatment of parameters without a gradient from any micro-batch of a rank: `error`
            names them, `zero` takes the gradient as zero.
    """

    strategy: Literal["none", "optimizer", "optimizer_gradients", "full"] = "none"
    replicas: int = 1
    overlap: bool = True
    prefetch: int | None = None
    grad_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    local_sum: bool = False
    pad_for_bandwidth: bool = False
    shard_dtype: Dtype | None = None
    offload: bool = False
    unused: Literal["error", "zero"] = "error"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "replicas")
        checks.at_most(MAX_RANKS, "replicas")
        if self.replicas > 1 and self.strategy == "none":
            text = f"{self.replicas} groups have nothing to share out with data_parallel.strategy "
            text += "none; leave it out, or use strategy optimizer, optimizer_gradients or full"
            checks.add("replicas", text)
        checks.at_least(0, "prefetch")
        checks.at_most(_MAX_PREFETCH, "prefetch")
        for name in ("prefetch", "shard_dtype", "offload"):
            value = getattr(self, name)
            if value and self.strategy == "none":
                text = f"{str(value).lower()} is about what is shared out, and data_parallel."
                text += "strategy is none; leave it out, or use strategy optimizer, "
                checks.add(name, text + "optimizer_gradients or full")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """Schedule of micro-batches on the pipeline ranks.

    Attributes:
        schedule: A schedule of mt-schedule: gpipe, 1f1b, interleaved, bfs, zb-h1, zb-h2, zb-v,
            v-half, v-min, dualpipe or dualpipe-v.
        stages: Pipeline ranks; `parallel.pp` says the same.
        microbatches: Micro-batches per step and rank; only checked against the batch sizes.
        layout: Places the layers by hand, as in `Et|tt|tt|tL`: `E` the embedding, `t` a layer, `L`
            the head and the loss.
        chunks: Stages on each rank, for `interleaved` and `bfs`.
        group: Micro-batches that pass one stage before the rank turns to its next stage, for
            `interleaved`.
    """

    schedule: str = "1f1b"
    stages: int | None = None
    microbatches: int | None = None
    layout: str | None = None
    chunks: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "stages", "microbatches", "chunks", "group")
        checks.at_most(MAX_RANKS, "stages", "chunks", "group")
        if self.schedule not in SCHEDULES:
            hint = did_you_mean(self.schedule, SCHEDULES)
            checks.add("schedule", f"{shorten(self.schedule)} is no schedule. {hint}")
        checks.done()
