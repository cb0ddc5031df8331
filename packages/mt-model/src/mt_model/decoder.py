"""GPT: the layers of one pipeline stage, with the embedding and the head where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from mt_context_parallel import Algorithm
from mt_files import check_type, did_you_mean
from mt_parallel_state import (
    GradSink,
    ParallelLayout,
    ParallelState,
    PartitionSpec,
    WgradStore,
    all_gather,
    copy_to_group,
    gather_from_group,
    shard_param,
    sharding_of,
)
from mt_tensor_parallel import (
    IGNORE_INDEX,
    Gemm,
    VocabParallelEmbedding,
    defer_weight_gradients,
    linear_cross_entropy,
    linear_cross_entropy_and_z,
    parallel_linear,
    sum_weight_gradients,
)
from torch import Tensor, nn

from mt_model.attend import Attend, CachedAttend, Pass, SequenceAttend
from mt_model.batch import Batch, batch_of, check_batch, whole_of
from mt_model.cache import KVCache
from mt_model.choice import AttentionKernel, Recompute
from mt_model.config import MixerConfig, ModelConfig, validate_context, validate_split
from mt_model.dropout import DropoutSite, hidden_index
from mt_model.dtype import DTYPES
from mt_model.gemm import default_gemm
from mt_model.head_transform import HeadTransform
from mt_model.initialization import materialize, start_from
from mt_model.layer import Step, TransformerLayer
from mt_model.losses import Losses, add_losses, sum_losses
from mt_model.max_logit import ClippedMixer
from mt_model.norm import build_norm
from mt_model.padding import last_tokens, padding_as_document, positions_of
from mt_model.placement import Placement
from mt_model.recompute_plan import WORDS, RecomputePlan
from mt_model.rope import Rotary
from mt_model.rotary import RotaryTable, rotary_table
from mt_model.saved_activations import KeptBytes, SavedActivations
from mt_model.score_table import ScoreTable

# What a pass in parts hands on: activation, losses, tables of biases, and what has no gradient.
_Parted: TypeAlias = tuple[Tensor, Losses, dict[str, Tensor], Pass]


class GPT(nn.Module):
    """One pipeline stage of a decoder language model; with `layers=None` the whole model.

    Parameters have global names and every rank's shard records how it is cut (`sharding_of`), so
    nothing else needs to know this class: `embedding.weight`, `position_embedding.weight`,
    `layers.17.mixer_norm.weight`, `layers.17.mixer.qkv.weight`, ...,
    `final_norm.weight`, `head.weight`. Initial values depend on name, seed and global index
    only. The stage that starts at layer 0 has the embedding, the one that ends at the last layer
    the final norm and the head. A tied head on another stage than the embedding is a second
    `embedding.weight` (`is_copy`); both then have partial gradients over "embedding". A table of
    biases that layers share, `score_tables.NAME.weight`, is on every stage, copies but for the
    first, with partial gradients over "pp".

    Args:
        config: the model.
        state: this rank's place; None is a single process.
        layers: global indices of this stage's layers.
        sequence_parallel: split activations between the parallel regions over the sequence.
        context_algorithm: how attention reaches the keys of the other ranks of a context group;
            a list has one for each layer of the whole model.
        context_inner_size: ranks that swap tokens for heads, for the hierarchical algorithm.
        attention: the kernel that computes attention in training: `auto` is the first that
            serves. Another serves all layers or is refused, with the reason, when it is asked to.
        recompute: what backward computes again instead of keeping it: with "full" each layer
            keeps its input only (each tensor-parallel rank a share of it), with "selective" the
            outputs of norms and activations are freed, which costs far less; a plan says it for
            each layer, and what is offloaded. torch.compile makes its own choice, so use "none".
        seed: of initial values and dropout; None leaves the values undefined, for weights that are
            loaded.
        gemm: computes the linear layers.
        dtype: of parameters and activations.
        device: of parameters; the state's by default. On "meta" they have no memory yet, and the
            model runs on the state's once they have (`initializer`).

    Attributes:
        state: this rank's place.
        origin: the `Pretrained` that the values were read from, or None.

    Raises:
        ValueError: heads, FFN width or vocabulary do not divide by tp; `layers` is no range of
            the model's; or it is None and the layout has several pipeline stages.
    """

    def __init__(  # noqa: PLR0913 - a model's own settings, all but two by keyword
        self,
        config: ModelConfig,
        state: ParallelState | None = None,
        *,
        layers: range | None = None,
        sequence_parallel: bool = False,
        context_algorithm: Algorithm | Sequence[Algorithm] = "ring",
        context_inner_size: int | None = None,
        attention: AttentionKernel = "auto",
        recompute: Recompute | RecomputePlan = "none",
        seed: int | None = 0,
        gemm: Gemm | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(
                f"config must be a ModelConfig, as gpt(...) or preset(...) make it, got "
                f"{type(config).__name__}"
            )
        if dtype not in DTYPES.values():
            raise TypeError(f"dtype must be one of {tuple(DTYPES.values())}, got {dtype!r}")
        if seed is not None and not isinstance(seed, int):
            raise TypeError(f"seed must be an int or None, got {seed!r}")
        state = ParallelState(ParallelLayout()) if state is None else state
        check_type("state", state, ParallelState)
        self.config, self.layer_range = config, _stage_range(config, state, layers)
        self.state = state
        self.origin: object | None = None
        tp = state.size("tp")
        validate_split(config, tp)
        where = state.device if device is None else torch.device(device)
        runs_on = state.device if where.type == "meta" else where
        self.placement = Placement(
            group=state.group("tp"),
            tp=tp,
            tp_index=state.index("tp"),
            sequence_parallel=sequence_parallel and tp > 1,
            seed=seed or 0,
            gemm=default_gemm(runs_on) if gemm is None else gemm,
            dtype=dtype,
            device=runs_on,
            context=SequenceAttend(
                *(state, context_algorithm, context_inner_size),
                layers=config.num_layers,
                kernel=attention,
            ),
        )
        self.plan = RecomputePlan.of(recompute)
        self.plan.check(config.num_layers)
        self._kept: dict[int, KeptBytes] | None = None
        context = self.placement.context
        inner = context_inner_size or 1
        validate_context(config, context.algorithms, cp=context.size, inner=inner, tp=tp)
        self._build()
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
            f"layers.{mixer.index}.mixer.{name}": factor
            for mixer in self._clippable()
            if mixer.index in query
            for name, factor in mixer.logit_factors(query[mixer.index], key[mixer.index]).items()
        }

    def _clippable(self) -> Iterator[ClippedMixer]:
        mixers = (layer.mixer for layer in self.stage_layers())
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

    def forward(
        self,
        x: Tensor | None,
        batch: Batch | None = None,
        *,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Run the model, or one stage of it.

        `model(tokens)` returns logits and `model(tokens, labels=labels)` the losses. A stage of an
        `mt_pipeline` is called with `(x, batch)` instead: the activation of the stage before, and
        a mapping with the rest. The last stage returns losses where there are labels, else logits.

        Losses are sums over this rank's tokens, to be divided by the global count of labels once,
        by the trainer: `lm` of the cross entropies, those of this stage's layers by their names
        (`ModelConfig.loss_weights`), and `tokens`, the number of labels. They are fp32 (fp64 for
        an fp64 model), and equal on all ranks of a tensor-parallel group.

        Args:
            x: int64 tokens; with a batch the activation of the stage before, None on the first.
            batch: int64 `tokens`, and `labels` and `sample_ids` as below; `embeddings` in place
                of tokens; `token_types`, 0 where missing; `documents`, ids of packed documents
                that do not see each other; `positions` other than 0, 1, 2 and on, or three for
                each token (MRoPE); `mask`, True where a token is and False at padding, which no
                token sees and which has no positions; `memory` and `memory_mask` for
                cross-attention, whole on every rank; and for generation this stage's own `cache`,
                with which the last stage returns the logits after the last token of each row
                alone.
            labels: of the next token after each, int64; -100 does not count.
            sample_ids: unique per training sample; needed with dropout in training.

        Returns:
            The activation for the next stage, with the losses of the layers where they have
            some: `(x, losses)`; in generation it comes alone. On the last stage losses or logits:
            of all tokens this rank holds and the whole vocabulary, which is gathered over the
            tensor-parallel group and has gradients.

        Shape:
            tokens, labels, positions, token_types: [B, S / cp], this rank's as
            `mt_context_parallel.shard` cuts them, or positions [3, B, S / cp]; documents, mask:
            [B, S], whole; sample_ids: [B]; embeddings: [B, S / cp, hidden]; memory: [B, M, size];
            memory_mask: [B, M];
            x: [B, S / cp, hidden] (S / cp / tp tokens under sequence parallelism);
            logits: [B, S / cp, vocab_size].

        Raises:
            TypeError: tokens, labels or sample ids are no integers, or the batch is no mapping.
            ValueError: a shape does not fit, or what this stage needs is not given.
        """
        if batch is None:
            batch, x = batch_of(x, labels, sample_ids), None
        elif labels is not None or sample_ids is not None:
            raise ValueError("give labels and sample_ids in the batch, or tokens without a batch")
        check_batch(batch)
        x, shared = self.begin(x, batch)
        x, losses = self.run_layers(x, shared)
        return self.finish(x, losses, batch)

    def parts(self, batch: Batch) -> list[Callable[[Any], Any]]:
        """The same pass in parts, for overlapped pairs (`mt_pipeline.SplitStage`).

        The embedding, the mixer and the feed-forward of each layer, and the head. Modules are
        called below the layers, so hook and compile mixers and feed-forwards. Tables that layers
        share are handed on too, so that one gradient comes back of all parts.
        """
        check_batch(batch)

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
            saved = state[3].saved
            if saved is not None:
                saved.finish()
            return self.finish(state[0], self._whole(state[1]), batch)

        steps = [step for layer in self.stage_layers() for step in layer.parts()]
        return [begin, *map(through, steps), finish]

    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, Pass]:
        """Return the activation that enters this stage's layers, and what they share."""
        given = batch.get("embeddings")
        given = batch["tokens"] if given is None else given
        length = given.shape[1] * self.placement.context.size
        device = given.device if x is None else x.device
        positions = self._positions(batch, length, device)
        shared = self._share(batch, positions, length, device)
        if self.has_embedding:
            x = self.embed(batch, positions, shared)
        elif x is None:
            raise ValueError("x is None, and only the first stage starts from tokens")
        if self.training and torch.is_grad_enabled():
            used = {mixer.shared_table for mixer in self._mixers().values()}
            names = {table[0] for table in used if table is not None}
            for name, weight in shared.score_tables.items():
                if name not in names:  # each backward of a stage gives its parameters a gradient
                    x = x + 0 * weight.sum()
        return x, shared

    def embed(self, batch: Batch, positions: Tensor, shared: Pass) -> Tensor:
        """Embed this rank's tokens, or take their embeddings from the batch, and add the others.

        Shape:
            positions: [S / cp] or [B, S / cp]. Returns [B, S / cp, hidden], of which sequence
            parallelism leaves S / cp / tp.
        """
        given = batch.get("embeddings")
        if given is None:
            x = self.embedding(batch["tokens"])
            x = x if self.embedding_scale == 1 else x * self.embedding_scale
        else:
            x = self._between(given.to(self.placement.dtype), dim=1)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._between(positions, dim=-1))
        if (kinds := self._type_embedding(batch)) is not None:
            x = x + kinds
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return self.embedding_dropout(x, shared.hidden_index)

    def _type_embedding(self, batch: Batch) -> Tensor | None:
        """Embeddings of the tokens' types; of type 0 where the batch has none.

        Shape:
            [B, S / cp, hidden] or [hidden].
        """
        table, types = self.token_type_embedding, batch.get("token_types")
        if table is not None:
            return table.weight[0] if types is None else table(self._between(types, dim=1))
        if types is not None:
            raise ValueError(
                "the batch has token_types, but the model was built with token_types=0; leave them "
                "out, or build it with as many as there are"
            )
        return None

    def run_layers(self, x: Tensor, shared: Pass) -> tuple[Tensor, Losses]:
        """Apply this stage's layers in order, and sum their losses over them and their tokens.

        Under sequence parallelism the losses are summed over the tensor-parallel group in one
        all-reduce (backward identity), as each rank has its own tokens.
        """
        losses: Losses = {}
        for layer in self.stage_layers():
            x, more = layer(x, shared)
            losses = add_losses(losses, more)
        if shared.saved is not None:
            shared.saved.finish()
        return x, self._whole(losses)

    def _whole(self, losses: Losses) -> Losses:
        return sum_losses(
            losses, self.placement.group if self.placement.sequence_parallel else None
        )

    def finish(
        self, x: Tensor, losses: Losses, batch: Batch
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Return what the stage returns, from the output and the losses of its layers."""
        generates = batch.get("cache") is not None
        if generates:
            batch["cache"].length += x.shape[1]
        if not self.has_head:
            return (x, losses) if losses and not generates else x
        if batch.get("labels") is not None:
            return {**self.loss(x, batch["labels"]), **losses}
        return self.scores(last_tokens(x, batch.get("mask")) if generates else x)

    @torch.no_grad()
    def logits(
        self, tokens: Tensor, *, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Scores of the next token after every given one, without dropout or gradients.

        Args:
            tokens: sequences of equal length; with a cache, those after the ones it holds.
            cache: keys and values of the tokens before; the new ones are added.
            mask: True where a token is, False at padding; all are tokens where None.

        Shape:
            tokens, mask: [B, S]. Returns [B, S, vocab_size].

        Raises:
            ValueError: the model is one of several stages, or sequence or context parallel, or
                the tokens do not fit the cache or the model.
        """
        if not (self.has_embedding and self.has_head):
            raise ValueError(
                f"logits() needs the whole model, and this stage holds layers "
                f"{self.layer_range.start} to {self.layer_range.stop - 1} of "
                f"{self.config.num_layers}. Build it with pp=1, or call the stages in turn with "
                "a batch of tokens and each its own cache"
            )
        batch = {"tokens": tokens, "cache": cache, "mask": mask}
        check_batch(batch)
        self._check_whole_sequences("logits()")
        was_training = self.training
        self.training = False  # of this module alone: it says whether a pass drops anything
        try:
            x, shared = self.begin(None, batch)
        finally:
            self.training = was_training
        x, _ = self.run_layers(x, shared)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.scores(x)

    def new_cache(self, *, batch_size: int, max_length: int) -> KVCache:
        """Make an empty cache for `logits`, on this model's device and in its dtype.

        Raises:
            ValueError: `max_length` is longer than the model's sequences.
        """
        limit = self.config.max_sequence_length
        check_type("batch_size", batch_size, int)
        check_type("max_length", max_length, int)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not 1 or more")
        if not 0 < max_length <= limit:
            raise ValueError(
                f"max_length={max_length} is not between 1 and max_sequence_length={limit}"
            )
        tp, dtype, device = self.placement.tp, self.placement.dtype, self.placement.device
        wide = torch.promote_types(dtype, torch.float32)
        return KVCache(
            layers={
                index: {
                    name: torch.zeros(
                        shape, dtype=wide if name in mixer.wide_cache else dtype, device=device
                    )
                    for name, shape in mixer.cache_shapes(batch_size, max_length, tp).items()
                }
                for index, mixer in self._mixers().items()
            },
            max_length=max_length,
        )

    def _build(self) -> None:
        config, placement = self.config, self.placement
        if self.has_embedding or (self.has_head and config.tied):
            self.embedding = self._vocab_matrix()
            self._mark_tied(self.embedding.weight)
        if self.has_embedding:
            scale = torch.tensor(config.embedding_scale, dtype=placement.dtype)
            self.embedding_scale = scale.item()
            learned = config.positions == "learned"
            self.position_embedding = self._table(config.max_sequence_length) if learned else None
            types = config.token_types
            self.token_type_embedding = self._table(types) if types else None
            self.embedding_norm = self._norm() if config.embedding_norm else None
            self.embedding_dropout = DropoutSite(
                config.dropout, seed=placement.seed, layer=-1, name="embedding"
            )
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerLayer(
                    config.layers[i], config, layer=i, placement=self._placement_of(i)
                )
                for i in self.layer_range
            }
        )
        self._check_patterns()
        self.score_tables = nn.ModuleDict(
            {
                name: ScoreTable(buckets, heads, placement=placement)
                for name, (buckets, heads) in config.score_tables.items()
            }
        )
        for table in self.score_tables.values():
            self._mark_shared(cast("ScoreTable", table).weight)
        if self.has_head:
            self.final_norm = self._norm() if config.final_norm else None
            self.head_transform = None
            if config.head_transform is not None:
                kind = config.head_transform
                self.head_transform = HeadTransform(config, kind, placement=placement)
            if not config.tied:
                self.head = self._vocab_matrix()
            self.head_bias = self._vocab_bias() if config.head_bias else None

    def _norm(self) -> nn.Module:
        norm = build_norm(self.config.norm, self.config.hidden_size, dtype=self.placement.dtype)
        self.placement.mark_replicated(norm, partial=self.placement.sequence_parallel)
        return norm

    def _table(self, rows: int) -> nn.Embedding:
        """A table that every rank has whole."""
        like = {"dtype": self.placement.dtype, "device": "meta"}
        table = nn.Embedding(rows, self.config.hidden_size, **like)
        start_from(cast("nn.Parameter", table.weight), "embedding")
        self.placement.mark_replicated(table, partial=self.placement.sequence_parallel)
        return table

    def _vocab_bias(self) -> nn.Parameter:
        rows = self.config.vocab_rows // self.placement.tp
        bias = nn.Parameter(torch.empty(rows, dtype=self.placement.dtype, device="meta"))
        start_from(bias, "zeros")
        spec = PartitionSpec() if self.placement.group is None else PartitionSpec("tp")
        return shard_param(bias, spec)

    def _placement_of(self, layer: int) -> Placement:
        again, offloads = self.plan.modules(layer), self.plan.offloads(layer)
        return replace(self.placement, made_again=again, offloads=offloads)

    def _check_patterns(self) -> None:
        """Check that each rule names modules of some layer that it is for, if one is here."""
        for rule in self.plan.rules:
            layers = [layer for layer in self.stage_layers() if rule.has(layer.index)]
            layers = [layer for layer in layers if "layer" not in layer.made_again]
            always = {"layer", "norm", "activation"}
            for pattern in set(rule.modules) - always if layers else ():
                if not any(pattern in layer.patterns for layer in layers):
                    known = sorted({n for layer in layers for n, _ in layer.named_modules() if n})
                    raise ValueError(
                        f"recompute names the module {pattern!r}, which none of its layers has. "
                        f"{did_you_mean(pattern, (*WORDS, *known))}"
                    )

    def _vocab_matrix(self) -> VocabParallelEmbedding:
        matrix = VocabParallelEmbedding(
            self.config.vocab_rows,
            self.config.hidden_size,
            num_tokens=self.config.vocab_size,
            group=self.placement.group,
            sequence_parallel=self.placement.sequence_parallel,
            dtype=self.placement.dtype,
            device=torch.device("meta"),
        )
        start_from(matrix.weight, "embedding")
        return matrix

    def _mark_tied(self, weight: nn.Parameter) -> None:
        if self.config.tied and not (self.has_embedding and self.has_head):
            spec = sharding_of(weight).spec
            shard_param(weight, spec, partial_grad=("embedding",), is_copy=not self.has_embedding)

    def _mark_shared(self, weight: nn.Parameter) -> None:
        """Every stage has the parameter, the first one owns it, and all give it gradients."""
        if not (self.has_embedding and self.has_head):
            spec = sharding_of(weight).spec
            shard_param(weight, spec, partial_grad=("pp",), is_copy=not self.has_embedding)

    def _positions(self, batch: Batch, length: int, device: torch.device) -> Tensor:
        """Check the length, and return the positions of this rank's tokens."""
        cache = batch.get("cache")
        if cache is not None:
            self._check_whole_sequences("a cache")
            self._check_length(cache.length + length)
            if batch.get("documents") is not None:
                raise ValueError("documents do not go with a cache; give one text in each row")
            if cache.length + length > cache.max_length:
                raise ValueError(
                    f"{cache.length + length} tokens are more than the cache holds "
                    f"({cache.max_length}); allocate it with a larger max_length"
                )
            end = self.config.cache_break(cache.length, cache.length + length)
            if end is not None:
                raise ValueError(
                    f"the cache holds {cache.length} tokens, and keys made in sequences of up to "
                    f"{end} do not serve {cache.length + length}: the factors of longrope change "
                    "there. Make a new cache, and give all tokens again"
                )
            self._note_padding(cache, whole_of(batch, "mask", length))
            places = torch.arange(cache.length, cache.length + length, device=device)
            mask = cache.mask
        else:
            self._check_length(length)
            self.placement.check_length(length)
            places = self.placement.context.positions(length, device)
            mask = whole_of(batch, "mask", length)
        if batch.get("positions") is not None:
            return batch["positions"]
        if mask is None:
            return places
        return positions_of(mask).clamp(min=0).index_select(1, places)

    def _note_padding(self, cache: KVCache, mask: Tensor | None) -> None:
        for index, mixer in self._mixers().items():
            if mask is not None and not mixer.hides_padding:
                raise ValueError(
                    f"the {type(mixer).__name__} of layer {index} keeps a state of all that it has "
                    "seen, padding too. Give rows of equal length without a mask, or one at a time"
                )
        cache.note(mask)

    def _share(self, batch: Batch, positions: Tensor, length: int, device: torch.device) -> Pass:
        cache, sample_ids, index = batch.get("cache"), None, None
        if self.training and cache is None and self._drops():
            sample_ids = batch.get("sample_ids")
            if sample_ids is None:
                raise ValueError(
                    "dropout in training needs batch['sample_ids'] of shape [B], unique per "
                    "training sample; or call model.eval()"
                )
            if self.config.dropout:
                places = self._between(self.placement.context.positions(length, device), dim=0)
                sizes = (self.config.max_sequence_length, self.config.hidden_size)
                index = hidden_index(sample_ids, places, *sizes)
        documents, mask = whole_of(batch, "documents", length), batch.get("mask")
        attend: Attend = self.placement.context
        if cache is not None:
            places = torch.arange(cache.length, cache.length + length, device=device)
            attend = CachedAttend(cache=cache, places=places)
        if mask is not None:
            documents = padding_as_document(mask, documents)
        return Pass(
            attend=attend,
            score_tables={name: table() for name, table in self.score_tables.items()},
            tables=self._tables(positions, length if cache is None else cache.length + length),
            documents=documents,
            sample_ids=sample_ids,
            hidden_index=index,
            cache=cache,
            memory=batch.get("memory"),
            memory_mask=batch.get("memory_mask"),
            saved=self._saved(device),
        )

    def _saved(self, device: torch.device) -> SavedActivations | None:
        if not torch.is_grad_enabled() or (self.plan.offload is None and self._kept is None):
            return None
        return SavedActivations(self.plan, device, self._kept)

    def _between(self, x: Tensor, *, dim: int) -> Tensor:
        """This rank's tokens between the tensor-parallel regions."""
        if not self.placement.sequence_parallel:
            return x
        return x.chunk(self.placement.tp, dim=dim)[self.placement.tp_index]

    def _tables(self, positions: Tensor, length: int) -> dict[Rotary, RotaryTable]:
        """Rotary tables of this stage's layers; equal ones are made once."""
        kinds = {mixer.rotary for mixer in self._mixers().values()}
        make = partial(rotary_table, positions, length=length, dtype=self.placement.dtype)
        return {kind: make(kind) for kind in kinds if kind}

    def _drops(self) -> bool:
        return bool(self.config.dropout) or any(
            mixer.drops for mixer in self.config.mixers.values()
        )

    def _before_head(self, x: Tensor) -> Tensor:
        """What the head multiplies: the last layer's output, normed, transformed and scaled."""
        x = x if self.final_norm is None else self.final_norm(x)
        x = x if self.head_transform is None else self.head_transform(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def _head_weight(self) -> Tensor:
        return (self.embedding if self.config.tied else self.head).weight

    def scores(self, x: Tensor) -> Tensor:
        """Norm the last layer's output and score the next token, over the whole vocabulary."""
        group = self.placement.group
        scores = parallel_linear(
            self._before_head(x),
            self._head_weight(),
            self.head_bias,
            mode="column",
            group=group,
            gemm=self.placement.gemm,
            sequence_parallel=self.placement.sequence_parallel,
        )
        if (softcap := self.config.logit_softcap) is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return gather_from_group(scores, group, dim=-1)[..., : self.config.vocab_size]

    def loss(self, x: Tensor, labels: Tensor) -> Losses:
        """Norm the last layer's output, and sum its cross entropies with this rank's labels.

        Returns:
            `lm`, the sum; `tokens`, the number of labels that are not -100; and for a model with
            a `z_loss` the sum `z`, whose gradient comes with that of `lm`, made in one sweep.
        """
        group, hidden = self.placement.group, self._before_head(x)
        if self.placement.sequence_parallel:
            hidden = all_gather(hidden, group, dim=1)
        else:
            hidden = copy_to_group(hidden, group)
        operands = hidden.flatten(0, 1), self._head_weight(), labels.flatten()
        how: dict[str, Any] = {"group": group, "gemm": self.placement.gemm, "bias": self.head_bias}
        how |= {"softcap": self.config.logit_softcap, "vocab_size": self.config.vocab_size}
        tokens = (labels != IGNORE_INDEX).sum()
        if not self.config.z_loss:
            return {"lm": linear_cross_entropy(*operands, **how), "tokens": tokens}
        lm, z = linear_cross_entropy_and_z(*operands, z_loss=self.config.z_loss, **how)
        return {"lm": lm, "z": z, "tokens": tokens}

    def _check_length(self, end: int) -> None:
        if end > self.config.max_sequence_length:
            raise ValueError(
                f"{end} tokens are more than max_sequence_length="
                f"{self.config.max_sequence_length}. Cut the sequence, or build the model with a "
                f"larger max_sequence_length"
            )

    def _check_whole_sequences(self, what: str) -> None:
        if self.placement.context.group is not None:
            raise ValueError(
                f"{what} needs whole sequences, and cp={self.placement.context.size} ranks share "
                "them. Build the model with cp=1"
            )
        if self.placement.sequence_parallel:
            raise ValueError(f"{what} needs a model built with sequence_parallel=False")


def _stage_range(config: ModelConfig, state: ParallelState, layers: range | None) -> range:
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
