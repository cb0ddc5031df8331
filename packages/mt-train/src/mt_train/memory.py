"""Memory of each rank, for several plans of recomputation, counted without a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from mt_model import (
    GPT,
    KeptBytes,
    ModelConfig,
    Recompute,
    RecomputePlan,
    RecomputeRule,
    kept_by_module,
    without_data,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_schedule import Costs, simulate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mt_train.config.loading import LoadedConfig, planned_vocab_size
from mt_train.config.pipeline_plan import PipelinePlan, plan_pipeline
from mt_train.config.run_config import RunConfig
from mt_train.parts.activations import batch_of
from mt_train.parts.registry import wanted_parts
from mt_train.training.freezing import freeze
from mt_train.training.stages import stage_options

Plan = Recompute | RecomputePlan
_MIB, _GIB = 2**20, 2**30
_DEVICES = (24, 40, 80, 141, 192)  # GB of commercial devices
_USABLE = 0.92
# Plans to advise, the one that recomputes least first, as `training.recompute` takes them.
_PLANS = {
    "selective": "selective",
    "attention": "{rules: [{modules: [norm, activation, attention]}]}",
    "full": "full",
}


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """Activation memory of one plan on one rank, in bytes.

    Attributes:
        modules: Bytes that each module keeps for backward of one micro-batch, by name.
        peak: Bytes of all micro-batches in flight, at their peak.
        host: Bytes of one micro-batch that wait in host memory.
        flops: Operations that backward recomputes for one micro-batch.
    """

    modules: Mapping[str, int]
    peak: int
    host: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run to count, on a layout; `items` as in `RankMemory`."""

    config: RunConfig
    model: ModelConfig
    layout: ParallelLayout
    items: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of the ranks at one place of the pipeline, in bytes.

    Attributes:
        layers: Layer indices of each stage.
        plans: Activation memory of each plan, by name.
        weights: Bytes of unsharded parameters.
        gradients: Bytes of the gradient buffers.
        optimizer: Bytes of master weights and moments.
        items: Largest number of items, such as images, in a micro-batch's rows, by their name.
    """

    layers: tuple[range, ...]
    plans: Mapping[str, PlanMemory]
    weights: int
    gradients: int
    optimizer: int
    items: Mapping[str, int] = field(default_factory=dict)

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer, which no plan changes."""
        return self.weights + self.gradients + self.optimizer

    def total(self, plan: str) -> int:
        """Return the bytes of everything under a plan."""
        return self.states + self.plans[plan].peak


def plans_of(config: RunConfig) -> Mapping[str, Plan]:
    """Return the run's own plan, and others to compare it with."""
    attention = RecomputePlan(rules=(RecomputeRule(modules=("norm", "activation", "attention")),))
    words: dict[str, Plan] = {"none": "none", "selective": "selective"}
    others = words | {"attention": attention, "full": "full"}
    own: Plan = RecomputePlan.of(config.training.recompute)
    return {"run": own, **{k: v for k, v in others.items() if RecomputePlan.of(v) != own}}


def count(loaded: LoadedConfig) -> list[RankMemory]:
    """Count the memory of each pipeline rank; ranks with the same layers need the same.

    Nothing is computed: layers run on tensors without data, with the kernels of a CPU. Rows that
    may have any number of items, such as images, are made to find their largest number.

    Raises:
        ConfigError: The layout does not fit, or the run has a part that can't be counted.
        DataError: The rows can't be made.
    """
    config, p = loaded.config, loaded.config.parallel
    layout = loaded.layout(p.tp * config.pp * p.cp * (p.dp or 1))
    model = loaded.model(planned_vocab_size(loaded))
    for name, text in _obstacles(config):
        raise loaded.error(name, text)
    loaded.check_layout(model, layout)
    plan = plan_pipeline(
        config.pipeline,
        ranks=layout.pp,
        microbatches=config.training.global_batch_size
        // (config.training.micro_batch_size * layout.dp),
        num_layers=model.num_layers,
        modules=len(model.mtp_layers),
    )
    run = _Run(config=config, model=model, layout=layout, items=_items(config, model))
    try:
        return [_rank(run, plan, index) for index in range(layout.pp)]
    except ValueError as error:
        raise loaded.error("model", str(error)) from error


def _obstacles(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield from (part.uncounted for part in wanted_parts(config) if part.uncounted is not None)
    if config.parallel.ep > 1 or config.parallel.etp not in (None, config.parallel.tp):
        yield "parallel.ep", "what ranks send each other's experts depends on values; count with 1"
    if config.data.feeds_encoder:
        yield "data.kind", "models with an encoder are not counted"
    if config.training.compile:
        yield "training.compile", "the compiler chooses what is kept; set it to false to count"


def _items(config: RunConfig, model: ModelConfig) -> Mapping[str, int]:
    """Return the largest number of items in a micro-batch's rows, after a read of their files."""
    from mt_tokenizer import load_tokenizer

    from mt_train.data.corpus import Corpus, sources_of

    data = config.data
    if data.corpus is not None or not any(each.joined for each in data.fields()):
        return {}
    file = None if data.tokenizer is None else Path(data.tokenizer)
    tokenizer = None if file is None else load_tokenizer(file, eod=data.eod)
    train = tuple(map(Path, data.train))
    corpus = Corpus(tokenizer=file, train=train, weights=data.weights, validation={})
    sources = sources_of(config, corpus, tokenizer, model, Path())
    return data.most_items(sources, config.training.micro_batch_size)


def _rank(run: _Run, plan: PipelinePlan, index: int) -> RankMemory:
    layout, layers = run.layout, plan.layers_of(index)
    ranks = range(layout.world_size)
    rank = next(r for r in ranks if layout.coordinates(r)["pp"] == index)
    held = [stage % plan.schedule.depth for stage in plan.schedule.stages_of(index)]
    found: dict[str, PlanMemory] = {}
    with _world_of(layout, rank):
        base = _flops(run, layers, "none")
        for name, recompute in plans_of(run.config).items():
            kept = [_kept(run, own, recompute) for own in layers]
            sizes = [0.0] * plan.schedule.depth
            for stage, modules in zip(held, kept, strict=True):
                sizes[stage] = float(sum(k.device for k in modules.values()))
            simulated = simulate(plan.schedule, Costs(activation_bytes=sizes))
            found[name] = PlanMemory(
                modules={n: k.device for modules in kept for n, k in modules.items()},
                peak=int(simulated.peak_bytes[index]),
                host=sum(k.host for modules in kept for k in modules.values()),
                flops=_flops(run, layers, recompute) - base,
            )
        held_always = _state_bytes(run)
    return RankMemory(layers=tuple(layers), plans=found, items=run.items, **held_always)


@contextmanager
def _world_of(layout: ParallelLayout, rank: int) -> Iterator[None]:
    """Act as a rank of a world without communication."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend known

    if layout.world_size == 1:
        yield
        return
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stage(run: _Run, state: ParallelState, layers: range, plan: Plan) -> GPT:
    options = {**stage_options(run.config), "recompute": plan, "seed": None}
    stage = cast("GPT", run.model.build(state, layers=layers, **options))
    freeze([stage], run.config.training.freeze)
    return stage


def _inputs(run: _Run, stage: GPT) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return a micro-batch, and the output of the stage before for this stage."""
    batch = batch_of(run.config, stage.state, items=run.items)
    if stage.has_embedding:
        return batch, None
    rows, length = len(batch["tokens"]), stage.config.handed_tokens(batch)
    place = stage.shard
    sizes = rows, length // (place.tp if place.sequence_parallel else 1), stage.config.hidden_size
    return batch, torch.zeros(sizes, dtype=place.dtype, requires_grad=True)


def _kept(run: _Run, layers: range, plan: Plan) -> dict[str, KeptBytes]:
    with without_data(), ParallelState(run.layout, device="cpu") as state:
        stage = _stage(run, state, layers, plan)
        return kept_by_module(stage, *_inputs(run, stage))


def _flops(run: _Run, layers: Sequence[range], plan: Plan) -> int:
    """Return the operations of both passes through layers; equal layers are counted once."""
    from torch.utils.flop_counter import FlopCounterMode

    chosen = replace(RecomputePlan.of(plan), offload=None)  # offloading recomputes nothing
    known, total, model = dict[object, int](), 0, run.model
    attending = () if model.retro is None else model.retro.places(model.num_layers)
    for index in chain(*layers):
        edge = index in (0, model.num_layers - 1, *attending)
        kind = model.layers[index], chosen.modules(index), index if edge else None
        if kind not in known:
            with without_data(), ParallelState(run.layout, device="cpu") as state:
                stage = _stage(run, state, range(index, index + 1), chosen)
                batch, x = _inputs(run, stage)
                with FlopCounterMode(display=False) as counter:
                    output = stage(x, batch)
                    tensors = [y for y in tree_leaves(output) if isinstance(y, Tensor)]
                    roots = [y for y in tensors if y.requires_grad]
                    torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])
                known[kind] = counter.get_total_flops()
        total += known[kind]
    return total


class _NoSamples:
    """Data of a run without steps."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def _state_bytes(run: _Run) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer, from a trainer on `meta`."""
    from mt_data import BatchSampler

    from mt_train.training.trainer import Trainer

    training = replace(run.config.training, recompute="none", cuda_graphs="none")
    config = replace(run.config, training=training)
    with ParallelState(run.layout, device="meta") as state:
        sampler = BatchSampler(
            cast("Any", _NoSamples()),
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=state.index("dp"),
            dp_size=state.size("dp"),
        )
        trainer = Trainer(config, run.model, state, sampler=sampler)
        with _Numbers():
            trainer.optimizer.step(lr=0.0)
        buckets = trainer.buffer.buckets
        params = [p for stage in trainer.stages for p in stage.parameters()]
        params += [b.own_params for b in buckets if b.own_params is not None]
        gradients = [x for b in buckets for x in (b.grads, b.own_grads)]
        states = [x for own in trainer.optimizer.inner.state.values() for x in tree_leaves(own)]
        trainer.close()
        return {
            "weights": _bytes_of(params),
            "gradients": _bytes_of(gradients),
            "optimizer": _bytes_of(x for x in states if isinstance(x, Tensor)),
        }


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


class _Numbers(TorchDispatchMode):
    """A mode that answers 1 if Python asks a tensor on `meta` for its value."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or answer for it."""
        given = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            target = torch.device(given.get("device") or "meta")
            if target.type != "meta":
                return torch.ones(args[0].shape, dtype=given.get("dtype") or args[0].dtype)
        return func(*args, **given)


def table(loaded: LoadedConfig, ranks: Sequence[RankMemory]) -> str:
    """Return the counts as a table of text."""
    training, p = loaded.config.training, loaded.config.parallel
    names = list(ranks[0].plans)
    items = "".join(f" with up to {count} {name}" for name, count in ranks[0].items.items())
    lines = [
        f"One rank of tp {p.tp}, cp {p.cp}, pp {loaded.config.pp}, dp {p.dp or 1}, ep {p.ep}: "
        f"micro-batches of {training.micro_batch_size} x {training.sequence_length} tokens{items} "
        f"in {training.dtype}, with the kernels of a CPU",
        "",
        _line("kept of a micro-batch, MiB", names),
    ]
    for group, rows in _groups(ranks[0], names):
        lines.append(group)
        lines += [_line(f"  {n}", [f"{x / _MIB:.2f}" for x in row]) for n, row in rows]
    lines += ["", _line("each rank of the pipeline, MiB", names)]
    for index, rank in enumerate(ranks):
        plans = [rank.plans[name] for name in names]
        where = ", ".join(f"{own.start}-{own.stop - 1}" for own in rank.layers)
        lines.append(
            f"pp {index}: layers {where}; weights {rank.weights / _MIB:.2f}, gradients "
            f"{rank.gradients / _MIB:.2f}, masters and moments {rank.optimizer / _MIB:.2f}"
        )
        lines.append(_line("  activations in flight", [f"{q.peak / _MIB:.2f}" for q in plans]))
        lines.append(_line("  in all", [f"{rank.total(name) / _MIB:.2f}" for name in names]))
        if any(q.host for q in plans):
            row = [f"{q.host / _MIB:.2f}" for q in plans]
            lines.append(_line("  in the host, of a micro-batch", row))
        row = [f"{q.flops / 1e12:.3g}" for q in plans]
        lines.append(_line("  made again, TFLOP a micro-batch", row))
    return "\n".join([*lines, "", *verdict(loaded.config, ranks)]) + "\n"


def verdict(config: RunConfig, ranks: Sequence[RankMemory]) -> list[str]:
    """Name the devices that hold the run's largest rank, and a change to fit the next smaller one.

    The GB in devices' names are GiB; 8% of them are left for the context of the device, for
    kernels' workspaces and for fragmentation.
    """
    need = {name: max(rank.total(name) for rank in ranks) for name in ranks[0].plans}
    run = need["run"]
    fits = [size for size in _DEVICES if run <= _USABLE * size * _GIB]
    small = [size for size in _DEVICES if size not in fits]
    text = f"The largest rank needs {_size(run)}: "
    text += f"fits in {_listed(fits)} GB" if fits else "fits in no single device"
    lines = [text + (f", not in {_listed(small)} GB" if small and fits else "")]
    if not small:
        return lines
    wanted = small[-1]
    change = _change(config, max(ranks, key=lambda rank: rank.total("run")))
    for name, plan in _PLANS.items():
        if name in need and need[name] <= _USABLE * wanted * _GIB:
            change = f"training.recompute={plan} needs {_size(need[name])}"
            break
    return [*lines, f"For {wanted} GB: {change}"]


def _change(config: RunConfig, rank: RankMemory) -> str:
    """Name the change that lowers the largest part of a rank's memory."""
    activations = rank.plans["run"].peak
    sharing = config.data_parallel.strategy == "none" and (config.parallel.dp or 1) > 1
    if activations > rank.states and config.training.micro_batch_size > 1:
        return "lower training.micro_batch_size, as activations are the largest part"
    if activations > rank.states:
        return "raise parallel.cp or parallel.tp, which share out the activations"
    if sharing:
        return "data_parallel.strategy=optimizer shares out masters and moments, full also weights"
    return "raise parallel.tp, parallel.pp or parallel.dp with a data_parallel.strategy"


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count > _GIB / 10 else f"{count / _MIB:.2f} MiB"


def _listed(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last


def _groups(
    rank: RankMemory, names: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Yield the rows of a table: groups of equal layers, and the rest."""
    of_layer: dict[str, dict[str, tuple[int, ...]]] = {}
    modules = dict.fromkeys(n for name in names for n in rank.plans[name].modules)
    for module in modules:
        parts = module.split(".")
        # A layer of the model, or of an encoder in it.
        end = parts.index("layers") + 2 if "layers" in parts else 0
        layer, rest = ".".join(parts[:end]) or "the rest", parts[end:]
        row = tuple(rank.plans[name].modules.get(module, 0) for name in names)
        of_layer.setdefault(layer, {})[".".join(rest) or "itself"] = row
    like: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], list[str]] = {}
    for layer, rows in of_layer.items():
        own = {n: row for n, row in rows.items() if any(row)}
        own["together"] = tuple(map(sum, zip(*rows.values(), strict=True)))
        of, _, index = layer.rpartition("layers.")
        like.setdefault((of, tuple(own.items())), []).append(index)
    for (of, rows), found in like.items():
        whose = f" of {of.rstrip('.')}" if of else ""
        span = found[0] + (f" to {found[-1]}" if len(found) > 1 else "")
        is_rest = found == ["the rest"]
        yield span if is_rest else f"each of {len(found)} layers{whose}, {span}", list(rows)


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:<34}" + "".join(f"{cell:>12}" for cell in cells)
