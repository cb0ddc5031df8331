"""One pipeline stage of a list of layers, with what is in front of it and behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import torch
from mt_context_parallel import Algorithm
from mt_files import check_type, did_you_mean
from mt_fusions import RESIDUAL
from mt_kernels import Choice
from mt_moe import ExpertGroups
from mt_parallel_state import (
    GradSink,
    ParallelLayout,
    ParallelState,
    WgradStore,
    shard_param,
    sharding_of,
)
from mt_tensor_parallel import Gemm, defer_weight_gradients, sum_weight_gradients
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.attend.sequence import SequenceAttend
from mt_model.attention.max_logit import ClippedMixer
from mt_model.attention.score_table import ScoreTable
from mt_model.block.dropout import hidden_index
from mt_model.block.entry import MixerConfig
from mt_model.block.losses import Losses, add_losses, sum_losses
from mt_model.block.norm import stream_norm
from mt_model.block.shard_context import ShardContext
from mt_model.block.shared_input import SharedInput
from mt_model.kernels.choice import ChoosesKernels
from mt_model.kernels.config import Kernels
from mt_model.kernels.dtype import DTYPES
from mt_model.kernels.gemm import default_gemm
from mt_model.kernels.words import KernelSet, Recompute
from mt_model.recompute.plan import WORDS, RecomputePlan
from mt_model.recompute.saved_activations import KeptBytes, SavedActivations
from mt_model.rope.config import Rotary
from mt_model.rope.rotary import AngleStore, RotaryTable, rotary_table
from mt_model.rope.temperature import TemperatureConfig
from mt_model.stack.batch import Batch
from mt_model.stack.config import StackConfig
from mt_model.stack.initialization import materialize
from mt_model.stack.layer import Step, TransformerLayer, Wrap
from mt_model.stack.validation import validate_context, validate_split

if TYPE_CHECKING:
    from mt_quant import KVScheme

# What a pass in parts hands on: activation, losses, tables of biases, and what has no gradient.
_Parted: TypeAlias = tuple[Tensor, Losses, dict[str, Tensor], ForwardContext]

Config = TypeVar("Config", bound=StackConfig)


class Stack(nn.Module, ABC, Generic[Config]):
    """One pipeline stage of a list of layers; with `layers=None` the whole model.

    A class below it says what is in front of the first layer and behind the last one.

    Parameters have global names and every rank's shard records how it is cut (`sharding_of`), so
    nothing else needs to know the class: `layers.17.mixer_norm.weight`,
    `layers.17.mixer.qkv.weight`, ..., `final_norm.weight`. Initial values depend on name, seed and
    global index only. The stage that ends at the last layer has the final norm. A table of biases
    that layers share, `score_tables.NAME.weight`, is on every stage, copies but for the first, with
    partial gradients over "pp".

    Args:
        config: the model.
        state: this rank's place; None is a single process.
        layers: global indices of this stage's layers.
        sequence_parallel: split activations between the parallel regions over the sequence.
        context_algorithm: how attention reaches the keys of the other ranks of a context group;
            a list has one for each layer of the whole model.
        context_inner_size: ranks that swap tokens for heads, for the hierarchical algorithm.
        kernels: what computes each operation: a word for all of them, or `Kernels`. `auto` is what
            was measured to be fastest. What is named serves wherever the operation is, or is
            refused with the reason: that of attention when it is asked to, others at once.
        recompute: what backward computes again instead of keeping it: with "full" each layer
            keeps its input only (each tensor-parallel rank a share of it), with "selective" the
            outputs of norms and activations are freed, which costs far less; a plan says it for
            each layer, and what is offloaded. torch.compile chooses within a layer, so use "none"
            or "full" there.
        seed: of initial values and dropout; None leaves the values undefined, for weights that are
            loaded.
        gemm: computes the linear layers.
        dtype: of parameters and activations.
        device: of parameters; the state's by default. On "meta" they have no memory yet, and the
            model runs on the state's once they have (`initializer`).

    Attributes:
        state: this rank's place.
        origin: the `Pretrained` that the values were read from, or None.
        kv_schemes: how layers keep keys and values in generation, by index; the model's dtype for
            the others. `calibrate_kv_cache` makes such, and a folder may have them.

    Raises:
        ValueError: heads, FFN width or a vocabulary do not divide by tp; `layers` is no range of
            the model's; or it is None and the layout has several pipeline stages.
    """

    def __init__(  # noqa: PLR0913 - a model's own settings, all but two by keyword
        self,
        config: Config,
        state: ParallelState | None = None,
        *,
        layers: range | None = None,
        sequence_parallel: bool = False,
        context_algorithm: Algorithm | Sequence[Algorithm] = "ring",
        context_inner_size: int | None = None,
        kernels: KernelSet | Kernels = "auto",
        recompute: Recompute | RecomputePlan = "none",
        seed: int | None = 0,
        gemm: Gemm | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._check_config(config)
        if dtype not in DTYPES.values():
            raise TypeError(f"dtype must be one of {tuple(DTYPES.values())}, got {dtype!r}")
        if seed is not None and not isinstance(seed, int):
            raise TypeError(f"seed must be an int or None, got {seed!r}")
        state = ParallelState(ParallelLayout()) if state is None else state
        check_type("state", state, ParallelState)
        self.config, self.layer_range = config, _stage_range(config, state, layers)
        self.state = state
        self.origin: object | None = None
        self.kv_schemes: dict[int, KVScheme] = {}
        tp = state.size("tp")
        validate_split(config, tp)
        if config.has_experts:  # one without may stand beside one that has some, as its teacher
            config.check_experts(ep=state.size("ep"), etp=state.size("etp"))
        choice = Kernels.of(kernels)
        where = state.device if device is None else torch.device(device)
        runs_on = state.device if where.type == "meta" else where
        self.shard = ShardContext(
            group=state.group("tp"),
            tp=tp,
            tp_index=state.index("tp"),
            sequence_parallel=sequence_parallel and tp > 1,
            seed=seed or 0,
            gemm=default_gemm(runs_on) if gemm is None else gemm,
            dtype=dtype,
            device=runs_on,
            context=self._sequences(
                state,
                algorithm=context_algorithm,
                inner_size=context_inner_size,
                layers=config.num_layers,
                kernel=choice.attention,
            ),
            kernels=choice,
            experts=ExpertGroups.of(state) if config.has_experts else ExpertGroups(),
        )
        self.plan = RecomputePlan.of(recompute)
        self.plan.check(len(config.all_layers))
        self._kept: dict[int, KeptBytes] | None = None
        self._angles = AngleStore()
        context = self.shard.context
        inner = context_inner_size or 1
        validate_context(config, context.algorithms, cp=context.size, inner=inner, tp=tp)
        self._build()
        like = torch.empty(0, dtype=dtype, device=runs_on)
        residual = RESIDUAL.find(choice.residual, like)
        self._fuses = residual.name == "fused"  # the last addition of a layer with the next norm
        if choice != Kernels():
            self.chosen_kernels()  # refuses at once what does not serve
        # For schedules with split backwards (`mt_pipeline.DefersWeightGradients`). The head's and
        # the embedding's gradients are made in backward all the same.
        self.wgrad_store = WgradStore()
        defer_weight_gradients(self, self.wgrad_store)
        if where.type != "meta":
            materialize(self, config, state, seed=seed, device=where)

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first stage."""
        return self.layer_range.start == 0

    @property
    def has_head(self) -> bool:
        """Whether this is the last stage."""
        return self.layer_range.stop == self.config.num_layers

    def sum_weight_gradients(self, sink_of: Callable[[nn.Parameter], GradSink | None]) -> None:
        """Have the linear layers add their weights' gradients to `GradBuffer.sink`s themselves."""
        sum_weight_gradients(self, sink_of)

    def wrap_layers(self, wrap: Wrap | None) -> None:
        """Have training and evaluation call what each layer computes through `wrap`.

        It takes a function of `(x, shared)` that is a layer's own, or one of the parts of `parts`,
        and returns what takes its place: `wrap=torch.compile` compiles layers one by one, and like
        layers are compiled once. Hooks of the layer run outside. Generation, whose shapes change,
        and `logits` leave it out.

        Args:
            wrap: Called for each layer of this stage; None takes it off again.
        """
        for layer in self.built_layers():
            layer.wrap(wrap)

    def chosen_kernels(self) -> tuple[Choice[Any], ...]:
        """Return what computes each operation of this stage in eager mode, and why.

        Raises:
            KernelError: A kernel that was asked for does not serve on the device.
        """
        like = torch.empty(0, dtype=self.shard.dtype, device=self.shard.device)
        found = (m.kernel_choices(like) for m in self.modules() if isinstance(m, ChoosesKernels))
        return tuple(dict.fromkeys(choice for choices in found for choice in choices))

    def watch_logits(self) -> None:
        """Keep the largest attention score of each key head in training, for `max_logits`.

        In a layer with norms of queries and keys they bound the scores, so nothing is kept there.
        """
        for mixer in self._clippable():
            mixer.watch_logits()

    @torch.no_grad()
    def max_logits(self) -> dict[int, Tensor]:
        """Return the largest scores since the last call, by the layer's index in the whole model.

        They are of this rank's tokens and heads; the maximum over all ranks is the step's.

        Shape:
            [num_kv_heads] of the layer in the whole model, -inf where this rank has none.
        """
        found: dict[int, Tensor] = {}
        for mixer in self._clippable():
            if mixer.max_logits is not None:
                found[mixer.index] = mixer.max_logits.clone()
                mixer.max_logits.fill_(-torch.inf)
        return found

    def logit_factors(
        self, query: Mapping[int, Tensor], key: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        """Return what multiplies this stage's parameters to scale queries and keys (QK-clip).

        Args:
            query: By the layer's index a factor for the queries of each key head of the model.
            key: The same for the keys.

        Returns:
            By the parameter's name a tensor that broadcasts with it.

        Shape:
            query, key: [num_kv_heads].
        """
        return {
            f"{self.layer_name(mixer.index)}.mixer.{name}": factor
            for mixer in self._clippable()
            if mixer.index in query
            for name, factor in mixer.logit_factors(query[mixer.index], key[mixer.index]).items()
        }

    def _clippable(self) -> Iterator[ClippedMixer]:
        mixers = (layer.mixer for layer in self.built_layers())
        return (m for m in mixers if isinstance(m, ClippedMixer) and m.can_clip)

    @contextmanager
    def watch_activations(self) -> Iterator[dict[int, KeptBytes]]:
        """Count what each layer keeps for backward in the passes inside.

        Yields:
            By the layer's index in the whole model what it kept in the last pass with gradients.
            Passes fill it; overlapped pairs (`parts`) do so for layers that are not in parts.
        """
        self._kept = {}
        try:
            yield self._kept
        finally:
            self._kept = None

    def _mixers(self) -> dict[int, MixerConfig]:
        """Of this stage's layers, by the layer's index."""
        return {i: mixer for i, mixer in self.config.mixers.items() if i in self.layer_range}

    def stage_layers(self) -> Iterator[TransformerLayer]:
        """This stage's layers in order."""
        return (cast("TransformerLayer", layer) for layer in self.layers.values())

    def built_layers(self) -> Iterator[TransformerLayer]:
        """This stage's layers, and those of modules behind the last one."""
        return self.stage_layers()

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield which linear layers of this stage multiply the same input, and what makes it.

        Inputs are left out that something else reads, such as a router, and those that are not
        proportional to a weight, such as activated ones.
        """
        for layer in self.built_layers():
            yield from layer.shared_inputs()

    def unfuse_experts(self) -> list[str]:
        """Make experts linear layers of their own, which quantisation works on.

        Returns:
            Names of what was one layer of several experts before: the fourth expert's layer is
            `layers.0.feed_forward.experts.up.3`.

        Raises:
            ValueError: Experts with biases are cut over ranks (etp).
        """
        from mt_moe import unfuse_experts

        return unfuse_experts(self, group=self.state.group("etp"))

    def layer_name(self, index: int) -> str:
        """Return the name in the stage of a layer, by its index in the whole model."""
        return f"layers.{index}"

    def _check_config(self, config: object) -> None:
        if not isinstance(config, StackConfig):
            raise TypeError(f"config must be a StackConfig, got {type(config).__name__}")

    def _sequences(self, state: ParallelState, **arguments: Any) -> SequenceAttend:
        """The ranks that share the sequences, and attention there."""
        return SequenceAttend(state, **arguments)

    @abstractmethod
    def _build_input(self) -> None:
        """Build what is in front of the layers; on the first stage it feeds them."""

    @abstractmethod
    def _build_output(self) -> None:
        """Build what is behind the final norm; the last stage has it."""

    @abstractmethod
    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, ForwardContext]:
        """Return the activation that enters this stage's layers, and what they share."""

    @abstractmethod
    def finish(self, x: Tensor, losses: Losses, batch: Batch) -> Any:
        """Return what the stage returns, from the output and the losses of its layers."""

    def mtp_losses(self, x: Tensor, shared: ForwardContext, batch: Batch) -> Losses:
        """Run modules that read the last layer's output beside the head, and return their losses.

        They are sums over this rank's tokens, with their counts.
        """
        del x, shared, batch
        return {}

    def parts(self, batch: Batch) -> list[Callable[[Any], Any]]:
        """The same pass in parts, for overlapped pairs (`mt_pipeline.SplitStage`).

        The embedding, the mixer and the feed-forward of each layer (`TransformerLayer.parts`), and
        all behind. Modules are called below the layers, so hook and compile mixers and
        feed-forwards, and of mixtures of experts what they have in them. Tables that layers share
        are handed on too, so that one gradient comes back of all parts.
        """

        def begin(x: Tensor | None) -> _Parted:
            x, shared = self.begin(x, batch)
            return x, {}, dict(shared.score_tables), shared

        def through(step: Step) -> Callable[[Any], Any]:
            def part(state: _Parted) -> _Parted:
                x, losses, tables, shared = state
                x, more = step(x, replace(shared, score_tables=tables))
                return x, add_losses(losses, more), tables, shared

            return part

        def finish(state: _Parted) -> Any:
            x, losses, tables, shared = state
            if shared.saved is not None:
                shared.saved.finish()
            more = self.mtp_losses(x, replace(shared, score_tables=tables), batch)
            return self.finish(x, add_losses(self._whole(losses), more), batch)

        return [begin, *map(through, self._steps(TransformerLayer.parts)), finish]

    def run_layers(self, x: Tensor, shared: ForwardContext) -> tuple[Tensor, Losses]:
        """Apply this stage's layers in order, and sum their losses over them and their tokens.

        Under sequence parallelism the losses are summed over the tensor-parallel group in one
        all-reduce (backward identity), as each rank has its own tokens.
        """
        losses: Losses = {}
        for step in self._steps(self._handing_on):
            x, more = step(x, shared)
            losses = add_losses(losses, more)
        if shared.saved is not None:
            shared.saved.finish()
        return x, self._whole(losses)

    def _handing_on(self, layer: TransformerLayer) -> list[Step]:
        """The layer, which leaves its last addition to the next one's norm where that may be."""
        following = self._next_of(layer)
        if self._fuses and following is not None and layer.hands_on_to(following):
            return [partial(layer, opens=True)]
        return [layer]

    def _next_of(self, layer: TransformerLayer) -> TransformerLayer | None:
        """Return the layer of this stage that reads a layer's output, if nothing else does."""
        place = layer.index + 1
        following = self.layers[str(place)] if place in self.layer_range else None
        return cast("TransformerLayer | None", following)

    def _steps(self, steps_of: Callable[[TransformerLayer], list[Step]]) -> list[Step]:
        """What is applied one after the other between `begin` and `finish`."""
        return [step for layer in self.stage_layers() for step in steps_of(layer)]

    def _whole(self, losses: Losses) -> Losses:
        return sum_losses(losses, self.shard.group if self.shard.sequence_parallel else None)

    def _normed(self, x: Tensor) -> Tensor:
        """The last layer's output behind the final norm, if there is one."""
        return x if self.final_norm is None else self.final_norm(x)

    def _score_weights(self) -> dict[str, Tensor]:
        return {name: table() for name, table in self.score_tables.items()}

    def give_tables_gradients(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Let this stage's backward give a gradient to tables that none of its layers reads."""
        if self.training and torch.is_grad_enabled():
            used = {mixer.shared_table for mixer in self._mixers().values()}
            names = {table[0] for table in used if table is not None}
            for name, weight in shared.score_tables.items():
                if name not in names:
                    x = x + 0 * weight.sum()
        return x

    def _dropout(
        self, batch: Batch, length: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sample ids, and the global index of each element of the hidden states, for dropout."""
        if not (self.training and self.config.drops):
            return None, None
        sample_ids = batch.get("sample_ids")
        if sample_ids is None:
            raise ValueError(
                "dropout in training needs batch['sample_ids'] of shape [B], unique per "
                "training sample; or call model.eval()"
            )
        if not self.config.dropout:
            return sample_ids, None
        places = self.shard.context.positions(length, device)
        sizes = (self.config.max_sequence_length, self.config.hidden_size)
        return sample_ids, hidden_index(sample_ids, self.shard.between(places, dim=0), *sizes)

    def _build(self) -> None:
        config, shard = self.config, self.shard
        self._build_input()
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerLayer(
                    config.layers[i], config, layer=i, shard=self._placement_of(i)
                )
                for i in self.layer_range
            }
        )
        self.score_tables = nn.ModuleDict(
            {
                name: ScoreTable(buckets, heads, shard=shard)
                for name, (buckets, heads) in config.score_tables.items()
            }
        )
        for table in self.score_tables.values():
            self._mark_shared(cast("ScoreTable", table).weight)
        if self.has_head:
            final = config.final_norm
            self.final_norm = stream_norm(config, shard) if final else None
            self._build_output()
        self._check_patterns()

    def _placement_of(self, layer: int) -> ShardContext:
        again, offloads = self.plan.modules(layer), self.plan.offloads(layer)
        return replace(self.shard, recomputed=again, offloads=offloads)

    def _check_patterns(self) -> None:
        """Check that each rule names modules of some layer that it is for, if one is here."""
        for rule in self.plan.rules:
            layers = [layer for layer in self.built_layers() if rule.has(layer.index)]
            layers = [layer for layer in layers if "layer" not in layer.recomputed]
            always = set(WORDS)  # a stage may be without any attention
            for pattern in set(rule.modules) - always if layers else ():
                if not any(pattern in layer.patterns for layer in layers):
                    known = sorted({n for layer in layers for n, _ in layer.named_modules() if n})
                    raise ValueError(
                        f"recompute names the module {pattern!r}, which none of its layers has. "
                        f"{did_you_mean(pattern, (*WORDS, *known))}"
                    )

    def _mark_shared(self, weight: nn.Parameter) -> None:
        """Every stage has the parameter, the first one owns it, and all give it gradients."""
        if not (self.has_embedding and self.has_head):
            spec = sharding_of(weight).spec
            shard_param(weight, spec, partial_grad=("pp",), is_copy=not self.has_embedding)

    def _saved(self, device: torch.device) -> SavedActivations | None:
        if not torch.is_grad_enabled() or (self.plan.offload is None and self._kept is None):
            return None
        return SavedActivations(self.plan, device, self._kept)

    def _tables(self, positions: Tensor, length: int) -> dict[Rotary, RotaryTable]:
        """Rotary tables of this stage's layers; equal ones are made once."""
        mixers = (layer.config.mixer for layer in self.built_layers())
        kinds = {mixer.rotary for mixer in mixers if mixer is not None}
        how = {"dtype": self.shard.dtype, "angles": self._angles}
        make = partial(rotary_table, positions, length=length, **how)
        return {kind: make(kind) for kind in kinds if kind}

    def _temperatures(self, positions: Tensor) -> dict[TemperatureConfig, Tensor]:
        """What queries of this stage's layers are multiplied with; equal ones are made once."""
        mixers = (layer.config.mixer for layer in self.built_layers())
        kinds = {mixer.query_temperature for mixer in mixers if mixer is not None}
        time = positions[0] if positions.dim() == 3 else positions
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        return {kind: kind.factors(time).to(wide) for kind in kinds if kind}


def _stage_range(config: StackConfig, state: ParallelState, layers: range | None) -> range:
    if layers is None:
        if state.size("pp") > 1:
            raise ValueError(
                f"the layout has pp={state.size('pp')} stages, so say which layers this one "
                f"holds, for example layers=mt_schedule.split_layers({config.num_layers}, "
                f"{state.size('pp')})[state.index('pp')]"
            )
        return range(config.num_layers)
    if (
        not isinstance(layers, range)
        or layers.step != 1
        or not 0 <= layers.start < layers.stop <= config.num_layers
    ):
        raise ValueError(
            f"layers={layers} is not a range of at least one of the model's "
            f"{config.num_layers} layers"
        )
    return layers
