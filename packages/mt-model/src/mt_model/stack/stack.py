"""One pipeline stage of a list of layers, with the input and output modules that belong to it."""

from __future__ import annotations

import fnmatch
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
from mt_model.kernels.choice import ChoosesKernels
from mt_model.kernels.config import Kernels
from mt_model.kernels.dtype import DTYPES
from mt_model.kernels.gemm import make_gemm
from mt_model.kernels.words import KernelSet, Recompute
from mt_model.recompute.plan import WORDS, RecomputePlan, RecomputeRule
from mt_model.recompute.saved_activations import KeptBytes, SavedActivations
from mt_model.rope.config import Rotary
from mt_model.rope.rotary import AngleStore, RotaryTable, rotary_table
from mt_model.rope.temperature import TemperatureConfig
from mt_model.stack.adapters import add_adapters
from mt_model.stack.batch import Batch
from mt_model.stack.config import StackConfig
from mt_model.stack.initialization import materialize
from mt_model.stack.layer import Step, TransformerLayer, Wrap
from mt_model.stack.lora_config import LoraConfig
from mt_model.stack.validation import validate_context, validate_split

if TYPE_CHECKING:
    from mt_quant import KVScheme, SharedInput

# What a pass in parts hands on: activation, losses, tables of biases, and what has no gradient.
_Parted: TypeAlias = tuple[Tensor, Losses, dict[str, Tensor], ForwardContext]

Config = TypeVar("Config", bound=StackConfig)


class Stack(nn.Module, ABC, Generic[Config]):
    """One pipeline stage of a list of layers; with `layers=None` the whole model.

    A subclass builds the modules before the first layer and after the last one.

    Parameters have global names and every rank's shard records how it is cut (`sharding_of`), so
    no other code needs to know the class: `layers.17.mixer_norm.weight`,
    `layers.17.mixer.qkv.weight`, ..., `final_norm.weight`. Initial values depend on name, seed and
    global index only. The stage that ends at the last layer has the final norm. A table of biases
    that layers share, `score_tables.NAME.weight`, is on every stage, as a copy on all but the
    first, with partial gradients over "pp".

    Args:
        config: Configuration of the whole model.
        state: This rank's place; None is a single process.
        layers: Indices of this stage's layers in the whole model.
        sequence_parallel: Split activations between the parallel regions over the sequence.
        context_algorithm: Algorithm by which attention reaches the keys of the other ranks of a
            context group, or a list with one for each layer of the whole model.
        context_inner_size: Number of ranks that swap tokens for heads, for the hierarchical
            algorithm.
        kernels: Kernels of the operations: a word for all of them, or `Kernels`. `auto` takes the
            fastest one by measurement. A named kernel serves wherever the operation is, or is
            refused with the reason: attention's when it is first called, others at once.
        recompute: Activations that backward computes again instead of keeping them: with "full"
            each layer keeps its input only (each tensor-parallel rank a share of it), with
            "selective" the outputs of norms and activations are freed, which costs far less; a
            plan decides for each layer, and offloads. torch.compile chooses within a layer, so use
            "none" or "full" there.
        seed: Seed of initial values and dropout; None leaves the values undefined, for later
            loading.
        gemm: Strategy that computes the linear layers.
        lora: Adapters on linear layers; everything else is frozen then.
        dtype: Dtype of parameters and activations.
        device: Device of the parameters; the state's by default. On "meta" they have no memory
            until `initializer` fills them on the state's device.

    Attributes:
        state: This rank's place.
        origin: The `Pretrained` that the values were read from, or None.
        kv_schemes: Schemes by which layers keep keys and values in generation, by index; other
            layers keep the model's dtype. `calibrate_kv_cache` makes them, or a folder has them.

    Raises:
        ValueError: Heads, FFN width or a vocabulary do not divide by tp; `layers` is no range of
            the model's layers; or it is None and the layout has several pipeline stages.
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
        lora: LoraConfig | None = None,
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
        like = torch.empty(0, dtype=dtype, device=runs_on)
        made, self._products = make_gemm(gemm, choice.products, like, state.layout.world_size)
        self.shard = ShardContext(
            group=state.group("tp"),
            tp=tp,
            tp_index=state.index("tp"),
            sequence_parallel=sequence_parallel and tp > 1,
            seed=seed or 0,
            gemm=made,
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
        self._build(lora)
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
        if lora is not None and lora.base_format is not None:
            self._code_weights(
                lora.base_format, has_values=where.type != "meta" and seed is not None
            )

    _drops_adapters = False

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first stage."""
        return self.layer_range.start == 0

    @property
    def has_head(self) -> bool:
        """Whether this is the last stage."""
        return self.layer_range.stop == self.config.num_layers

    def sum_weight_gradients(self, sink_of: Callable[[nn.Parameter], GradSink | None]) -> None:
        """Make the linear layers add their weight gradients to `GradBuffer.sink`s themselves."""
        sum_weight_gradients(self, sink_of)

    def wrap_layers(self, wrap: Wrap | None) -> None:
        """Call each layer's computation through `wrap` in training and evaluation.

        `wrap` takes a function of `(x, shared)`, a layer's own or one of its `parts`, and returns
        its replacement: `wrap=torch.compile` compiles layers one by one, and equal layers once.
        Hooks of the layer run outside. Generation, whose shapes change, and `logits` are not
        wrapped.

        Args:
            wrap: Function to call for each layer of this stage; None removes it again.
        """
        for layer in self.built_layers():
            layer.wrap(wrap)

    def chosen_kernels(self) -> tuple[Choice[Any], ...]:
        """Return the kernel of each operation of this stage in eager mode, and why it was chosen.

        Raises:
            KernelError: A named kernel does not serve on the device.
        """
        like = torch.empty(0, dtype=self.shard.dtype, device=self.shard.device)
        found = (m.kernel_choices(like) for m in self.modules() if isinstance(m, ChoosesKernels))
        return tuple(
            dict.fromkeys(choice for choices in (self._products, *found) for choice in choices)
        )

    def watch_logits(self) -> None:
        """Keep the largest attention score of each key head in training, for `max_logits`.

        Layers with norms of queries and keys keep nothing, since the norms bound the scores.
        """
        for mixer in self._clippable():
            mixer.watch_logits()

    @torch.no_grad()
    def max_logits(self) -> dict[int, Tensor]:
        """Return the largest scores since the last call, by the layer's index in the whole model.

        They cover this rank's tokens and heads; the step's maximum is over all ranks.

        Shape:
            [num_kv_heads] of the whole model, -inf for heads of other ranks.
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
        """Return factors of this stage's parameters that scale queries and keys (QK-clip).

        Args:
            query: Factors for the queries of each key head of the model, by the layer's index.
            key: Factors for the keys, likewise.

        Returns:
            Tensors that broadcast with the parameters, by the parameter's name.

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
        """Count the bytes that each layer keeps for backward in the passes inside.

        Yields:
            Bytes of the last pass with gradients, by the layer's index in the whole model. Passes
            fill it; overlapped pairs (`parts`) do so for layers that are not in parts.
        """
        self._kept = {}
        try:
            yield self._kept
        finally:
            self._kept = None

    def _mixers(self) -> dict[int, MixerConfig]:
        """Return the mixers of this stage, by the layer's index."""
        return {i: mixer for i, mixer in self.config.mixers.items() if i in self.layer_range}

    def stage_layers(self) -> Iterator[TransformerLayer]:
        """Return this stage's layers in order."""
        return (cast("TransformerLayer", layer) for layer in self.layers.values())

    def built_layers(self) -> Iterator[TransformerLayer]:
        """Return this stage's layers, then the layers of the modules after the last one."""
        return self.stage_layers()

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield inputs that several linear layers of this stage share, with the module before.

        Inputs that another module reads too, such as a router, are left out, and so are inputs
        that are not proportional to a weight, such as activations.
        """
        for layer in self.built_layers():
            yield from layer.shared_inputs()

    def unfuse_experts(self) -> list[str]:
        """Make experts linear layers of their own, which quantisation works on.

        Returns:
            Names of the layers that held several experts before: the fourth expert's layer is
            `layers.0.feed_forward.experts.up.3`.

        Raises:
            ValueError: Experts with biases are cut over ranks (etp).
        """
        from mt_moe import unfuse_experts

        return unfuse_experts(self, group=self.state.group("etp"))

    def layer_name(self, index: int) -> str:
        """Return the name of a layer in the stage, by its index in the whole model."""
        return f"layers.{index}"

    def _check_config(self, config: object) -> None:
        if not isinstance(config, StackConfig):
            raise TypeError(f"config must be a StackConfig, got {type(config).__name__}")

    def _sequences(self, state: ParallelState, **arguments: Any) -> SequenceAttend:
        """The ranks that share the sequences, and attention there."""
        return SequenceAttend(state, **arguments)

    @abstractmethod
    def _build_input(self) -> None:
        """Build the modules in front of the layers, which the first stage has."""

    @abstractmethod
    def _build_output(self) -> None:
        """Build the modules after the final norm, which the last stage has."""

    @abstractmethod
    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, ForwardContext]:
        """Return the activation that enters this stage's layers, and the layers' context."""

    @abstractmethod
    def finish(self, x: Tensor, losses: Losses, batch: Batch) -> Any:
        """Return the stage's result, from the output and the losses of its layers."""

    def mtp_losses(self, x: Tensor, shared: ForwardContext, batch: Batch) -> Losses:
        """Run modules that read the last layer's output beside the head, and return their losses.

        Losses are sums over this rank's tokens, with their counts.
        """
        del x, shared, batch
        return {}

    def parts(self, batch: Batch) -> list[Callable[[Any], Any]]:
        """Return the pass in parts, for overlapped pairs (`mt_pipeline.SplitStage`).

        The parts are the embedding, the mixer and the feed-forward of each layer
        (`TransformerLayer.parts`), and the output. Layers themselves are not called, so hook and
        compile mixers and feed-forwards, and the modules inside of mixtures of experts. Tables
        that layers share are handed on too, so that all parts give them one gradient.
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
        """Return the layer, which leaves its last addition to the next layer's norm if it can."""
        following = self._next_of(layer)
        if self._fuses and following is not None and layer.hands_on_to(following):
            return [partial(layer, opens=True)]
        return [layer]

    def _next_of(self, layer: TransformerLayer) -> TransformerLayer | None:
        """Return the layer that alone reads a layer's output, or None."""
        place = layer.index + 1
        following = self.layers[str(place)] if place in self.layer_range else None
        return cast("TransformerLayer | None", following)

    def _steps(self, steps_of: Callable[[TransformerLayer], list[Step]]) -> list[Step]:
        """Return the steps between `begin` and `finish`, in order."""
        return [step for layer in self.stage_layers() for step in steps_of(layer)]

    def _whole(self, losses: Losses) -> Losses:
        return sum_losses(losses, self.shard.group if self.shard.sequence_parallel else None)

    def _normed(self, x: Tensor) -> Tensor:
        """Return the last layer's output after the final norm, if there is one."""
        return x if self.final_norm is None else self.final_norm(x)

    def _score_weights(self) -> dict[str, Tensor]:
        return {name: table() for name, table in self.score_tables.items()}

    def give_tables_gradients(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Give the stage's input a gradient, and tables that none of its layers reads."""
        if self.training and torch.is_grad_enabled():
            # Frozen embeddings: recomputation and schedules ask for a gradient, graphs do not.
            if not (x.requires_grad or torch.compiler.is_compiling()):
                x = x.detach().requires_grad_()
            used = {mixer.shared_table for mixer in self._mixers().values()}
            names = {table[0] for table in used if table is not None}
            for name, weight in shared.score_tables.items():
                if name not in names:
                    x = x + 0 * weight.sum()
        return x

    def _dropout(
        self, batch: Batch, length: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return sample ids and the global index of each hidden element, for dropout."""
        if not (self.training and (self.config.drops or self._drops_adapters)):
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

    def _token_index(
        self, sample_ids: Tensor | None, length: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of this rank's tokens, and of its part of them, for adapters."""
        if sample_ids is None or not self._drops_adapters:
            return None
        places = self.shard.context.positions(length, device)
        first = sample_ids[:, None] * self.config.max_sequence_length
        return first + places, first + self.shard.between(places, dim=0)

    def _build(self, lora: LoraConfig | None) -> None:
        config, shard = self.config, self.shard
        self._build_input()
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerLayer(
                    config.layers[i],
                    config,
                    layer=i,
                    shard=self._placement_of(i),
                    cross=self._cross_of(i),
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
        if lora is not None:
            self._add_adapters(lora)

    def _cross_of(self, layer: int) -> nn.Module | None:
        """Build the attention to neighbours of a layer, if it has one."""
        del layer
        return None

    def _add_adapters(self, lora: LoraConfig) -> None:
        add_adapters(self, lora, seed=self.shard.seed)
        self._drops_adapters = lora.dropout > 0
        for layer in self.stage_layers() if self._drops_adapters else ():
            layer.drop_in_adapters()

    def _code_weights(self, format: str, *, has_values: bool) -> None:
        from mt_model.stack.weight_codes import code_weights  # brings mt-quant

        code_weights(self, format, group=self.state.group("etp"), has_values=has_values)

    def _placement_of(self, layer: int) -> ShardContext:
        again, offloads = self.plan.modules(layer), self.plan.offloads(layer)
        return replace(self.shard, recomputed=again, offloads=offloads)

    def _check_patterns(self) -> None:
        """Check that each rule names modules of a layer that it applies to, on any stage."""
        for rule in self.plan.rules:
            patterns = sorted(set(rule.modules).difference(WORDS))
            names = self._module_names(rule) if patterns else []
            for pattern in patterns:
                if names and not fnmatch.filter(names, pattern):
                    raise ValueError(
                        f"recompute names the module {pattern!r}, which none of its layers has. "
                        f"{did_you_mean(pattern, (*WORDS, *names))}"
                    )

    def _module_names(self, rule: RecomputeRule) -> list[str]:
        """Return the names of the modules in all layers of the model that a rule applies to."""
        config, shard = self.config, replace(self.shard, device=torch.device("meta"))
        kinds = {layer: index for index, layer in enumerate(config.all_layers) if rule.has(index)}
        layers = [TransformerLayer(x, config, layer=i, shard=shard) for x, i in kinds.items()]
        return sorted({name for layer in layers for name, _ in layer.named_modules() if name})

    def _mark_shared(self, weight: nn.Parameter) -> None:
        """Mark a parameter that every stage holds: the first owns it, all give it gradients."""
        if not (self.has_embedding and self.has_head):
            spec = sharding_of(weight).spec
            shard_param(weight, spec, partial_grad=("pp",), is_copy=not self.has_embedding)

    def _saved(self, device: torch.device) -> SavedActivations | None:
        if not torch.is_grad_enabled() or (self.plan.offload is None and self._kept is None):
            return None
        return SavedActivations(self.plan, device, self._kept)

    def _tables(self, positions: Tensor, length: int | Tensor) -> dict[Rotary, RotaryTable]:
        """Return the rotary tables of this stage's layers; equal ones are made once."""
        mixers = (layer.config.mixer for layer in self.built_layers())
        kinds = {mixer.rotary for mixer in mixers if mixer is not None}
        how = {"dtype": self.shard.dtype, "angles": self._angles}
        make = partial(rotary_table, positions, length=length, **how)
        return {kind: make(kind) for kind in kinds if kind}

    def _temperatures(self, positions: Tensor) -> dict[TemperatureConfig, Tensor]:
        """Return the query temperatures of this stage's layers; equal ones are made once."""
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
