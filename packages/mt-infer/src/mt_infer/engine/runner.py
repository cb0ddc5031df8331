"""A pass of the model over the tokens of many requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from mt_model import GPT, EncoderDecoder, Pages, Peers
from mt_parallel_state import ParallelState, gather_rows
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule
from torch import Tensor

from mt_infer.engine.arrays import Places, Spans, cut, rows_of, slots_of
from mt_infer.engine.host import Move
from mt_infer.engine.host_pages import HostPages
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.request import Request, Span, StateCopy

_LONG = 64  # least tokens of a pass that ranks of cp share; each runs a shorter pass in full
_GROUP = 128  # tokens of a group; pipeline stages work on different groups of a pass


class Runner:
    """A model with the pages of its requests.

    Args:
        model: The model, or this rank's stage of it, with pages of its own layers.
        options: Sizes.
        state: This rank's place in the layout.
        blocks: Number of blocks; None for the number in the options.

    Attributes:
        packs_weights: See `EngineOptions.pack_weights`.
        features: Features of the last pass for MTP modules; None without such modules.

    Raises:
        ValueError: The model is a stage without its place.
    """

    def __init__(
        self,
        model: GPT,
        options: EngineOptions,
        state: ParallelState | None,
        blocks: int | None = None,
    ) -> None:
        _check_layout(model, state)
        self.model, self._options, self.state = model, options, state
        self.blocks = options.num_blocks(model.config) if blocks is None else blocks
        self._has_mtp, self.packs_weights = options.speculate == "mtp", options.pack_weights
        self.features: Tensor | None = None
        self.device = next(model.parameters()).device
        self._stages = None if state is None else _stages_of(model, state)
        # All stages together, since their ranks have one schedule.
        layers = range(model.config.encoder_layers, model.config.num_layers)
        mixers = [mixer for index, mixer in model.config.mixers.items() if index in layers]
        self.has_states = any(not mixer.token_cache for mixer in mixers)
        longest = model.config.max_sequence_length
        self._breaks = model.config.cache_break(1, longest) is not None
        rotary = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
        self.by_length = any(each.angles(1) != each.angles(longest) for each in rotary)
        # A row for the states after each token that may be taken back.
        self._turns = 1 + options.num_drafts * bool(options.speculate and self.has_states)
        # Keys that depend on the length of their pass, and states after each token, need one group.
        self._can_cut = not self.by_length and self._turns == 1
        self._peers = None if state is None else state.group("cp")
        self._pages: Pages | None = None
        self._host: HostPages | None = None
        self.wake()

    def wake(self) -> None:
        """Make the pages, unless they exist."""
        if self._pages is not None:
            return
        options = self._options
        self._pages = self.model.new_pages(
            blocks=self.blocks,
            block_size=options.block_size,
            states=options.max_batch * (self._turns + options.prefix_cache),
            kv_cache_dtype=options.kv_cache_dtype,
            mtp=self._has_mtp,
        )
        if self._host is None and options.host_blocks:
            self._host = HostPages(self._pages, options.host_blocks)

    def sleep(self) -> None:
        """Free the pages."""
        self._pages = None

    @property
    def is_awake(self) -> bool:
        """Whether the pages exist."""
        return self._pages is not None

    def check_awake(self) -> None:
        """Raise RuntimeError if the engine sleeps."""
        if self._pages is None:
            raise RuntimeError("the engine sleeps; call wake() before it serves requests")

    @property
    def pages(self) -> Pages:
        """The pages; see `check_awake`."""
        self.check_awake()
        return cast("Pages", self._pages)

    def check_embeds(self, pooling: str) -> None:
        """Raise ValueError for an unknown pooling, an encoder, or texts split among ranks."""
        if pooling not in ("last", "mean"):
            raise ValueError(f"pooling={pooling!r}: use 'last' or 'mean'")
        if self.model.config.encoder_layers:
            raise ValueError("embed needs a decoder alone, and the model has an encoder")
        if self._peers is not None:
            raise ValueError("embed needs a whole text on each rank, and cp > 1 shares it")

    @torch.inference_mode()
    def embedding(self, tokens: Sequence[int], *, mean: bool) -> Tensor:
        """Return the last layer's normed features of a text's last token, or the mean of all.

        Shape:
            Returns [hidden], fp32.
        """
        batch = {"tokens": torch.tensor([list(tokens)], device=self.device), "features": True}
        x = self._run([batch], self.model.config.hidden_size)[0][0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide.mean(0) if mean else wide[-1]).float()

    @torch.inference_mode()
    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks and states of requests between the pages and host memory."""
        for move in moves:
            if self._host is not None:
                row = rows_of(move.state, move.turn, self._turns)[0]
                self._host.make(move, self.pages, row)

    def restarts(self, held: int, length: int) -> bool:
        """Return whether a longer text needs new keys, because longrope's factors change."""
        return self._breaks and self.model.config.cache_break(held, length) is not None

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy states of requests to rows of the prefix cache, or back.

        Raises:
            RuntimeError: The engine sleeps.
        """
        for copy in copies:
            own, kept = rows_of(copy.state, copy.turn, self._turns)[0], self.kept_row(copy.kept)
            for x in self.pages.tensors(states=True):
                x[own if copy.is_back else kept] = x[kept if copy.is_back else own]

    def kept_row(self, row: int) -> int:
        """Return the row of the pages with the states in a row of the prefix cache."""
        return self._options.max_batch * self._turns + row

    def scores(self, parts: Spans, places: Places) -> Tensor:
        """Run the model over the parts of a pass.

        Args:
            parts: The parts.
            places: For each part, the places among its tokens after which scores are wanted.

        Shape:
            Returns [number of places, vocab], with the vocabulary's padding.
        """
        if self._has_mtp:
            batch = self._batch(parts, places)
            scores, self.features = self.model.features(batch)
            return scores[0]
        total = sum(len(part.fed) for part in parts)
        if self._peers is not None and total >= _LONG and self._can_cut:
            return self._shared_scores(parts, places, total, self._peers)
        groups = [(parts, places)]
        if self._stages is not None and self._can_cut:
            whole, rest = divmod(total, _GROUP)
            groups = cut(parts, places, [_GROUP] * whole + [rest] * (rest > 0))
        return self._scored([self._batch(*group) for group in groups], groups)

    def _scored(
        self, batches: Sequence[dict[str, Any]], groups: Sequence[tuple[Spans, Places]]
    ) -> Tensor:
        """Return the scores of the groups of a pass, one after the other."""
        features: dict[bytes, Tensor] = {}
        for batch, (parts, _) in zip(batches, groups, strict=True):
            self._put_images(batch, parts, features)
        return torch.cat(self._run(batches, self.model.config.vocab_size), dim=1)[0]

    def _shared_scores(
        self, parts: Spans, places: Places, total: int, group: dist.ProcessGroup
    ) -> Tensor:
        """Run a part of the tokens on each rank that shares sequences, and gather the scores."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        counts = [total * (index + 1) // size - total * index // size for index in range(size)]
        shares = cut(parts, places, counts)
        whole = self._batch(parts, places)["slots"].places
        peers = Peers(group=group, counts=counts, places=whole)
        own = {**self._batch(*shares[rank]), "peers": peers}
        scores = self._scored([own], [shares[rank]])
        return gather_rows(scores, group, [sum(map(len, wanted)) for _, wanted in shares])

    def ahead(
        self, depth: int, features: Tensor, spans: Sequence[Span], places: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Run an MTP module over spans of tokens, which it reads together with the features.

        Shape:
            features: [T, hidden]. Returns [number of places, vocab] and [T, hidden].
        """
        scores, more = self.model.ahead(depth, features[None], self._batch(spans, places))
        return scores[0], more[0]

    def _batch(self, parts: Spans, places: Places) -> dict[str, Any]:
        sizes = self._options.block_size, self._turns
        tokens, slots = slots_of(parts, places, sizes, self.device)
        return {"tokens": tokens, "cache": self.pages, "slots": slots}

    def _run(self, batches: Sequence[Mapping[str, Any]], width: int) -> list[Tensor]:
        """Run all stages, and return the outputs of the last one, [1, length, width] each."""
        if self._stages is None:
            return [_stage(self.model, None, batch) for batch in batches]

        def output(batch: Mapping[str, Any]) -> TensorSpec:
            length = batch["tokens"].shape[1] + ("places" in batch)
            if "slots" in batch:
                length = len(batch["slots"].scored)
            return TensorSpec((1, length, width), self.model.shard.dtype)

        return self._stages.infer(batches, output=output)

    def encode(self, request: Request) -> None:
        """Let the encoder read a request's source, and fill the blocks of its memory."""
        size, length = self._options.block_size, len(request.source)
        places = np.arange(length)
        places = np.array(request.memory)[places // size] * size + places % size
        source, where = (
            torch.as_tensor(np.asarray(x, dtype=np.int64)).to(self.device)
            for x in (request.source, places)
        )
        batch = {"tokens": source[None], "cache": self.pages, "places": where}
        self._run([batch], self.model.config.hidden_size)

    def _put_images(
        self, batch: dict[str, Any], parts: Spans, features: dict[bytes, Tensor]
    ) -> None:
        """Give a batch the embeddings of its tokens, if images are among them.

        Args:
            batch: The batch.
            parts: Its parts.
            features: Features of the pass's images by digest; each image is encoded alone.
        """
        start = 0
        for part in parts:
            held, count = part.start, len(part.fed)
            for image in part.request.images:
                first, last = max(image.start, held), min(image.end, held + count)
                if first >= last or self.model.images is None:
                    continue
                x = batch.get("embeddings")
                if x is None:
                    x = batch["embeddings"] = self.model.embedding(batch["tokens"])
                if image.digest not in features:
                    pixels = image.pixels.to(self.device, x.dtype)
                    features[image.digest] = self.model.images.features(pixels[None])[0]
                own = features[image.digest][first - image.start : last - image.start]
                x[0, start + first - held : start + last - held] = own
            start += count


def _stage(model: GPT, x: Tensor | None, batch: Mapping[str, Any]) -> Tensor:
    """Run a stage in a pass: its layers, its part of the encoder, or its layers for features."""
    if "places" in batch:
        how = batch["tokens"], batch["cache"], batch["places"], x
        return cast("EncoderDecoder", model).encode(*how)
    if "features" in batch:
        return model.final_features({"tokens": batch["tokens"]}, x)
    return cast("Tensor", model(x, batch))


def _stages_of(model: GPT, state: ParallelState) -> Executor[Mapping[str, Any]] | None:
    """Return the pipeline of a model's stages; None for one stage. All its ranks must call it."""
    group = state.group("pp")
    if group is None:
        return None
    schedule = make_schedule("1f1b", stages=dist.get_world_size(group), microbatches=1)

    def activation(batch: Mapping[str, Any]) -> TensorSpec:
        length = batch["tokens"].shape[1] + ("places" in batch)  # with a token of the decoder
        return TensorSpec((1, length, model.config.hidden_size), model.shard.dtype)

    return Executor(
        schedule,
        partial(_stage, model),
        group=group,
        activation=activation,
        device=state.device,
        # Ranks of other pipelines would wait for the layers that a failed one skips.
        stop_at_failure=state.layout.world_size > state.size("pp"),
    )


def _check_layout(model: GPT, state: ParallelState | None) -> None:
    """Refuse a stage without its place in a pipeline, and an encoder that cp would share."""
    if state is not None and state.size("cp") > 1 and model.config.encoder_layers:
        raise ValueError(
            f"cp={state.size('cp')}: an encoder reads a text on one rank; use tp or pp in its place"
        )
    held, pp = len(model.layer_range), 1 if state is None else state.size("pp")
    if (held < model.config.num_layers) != (pp > 1):
        raise ValueError(
            f"the model holds {held} of {model.config.num_layers} layers, and state has pp={pp}; "
            "give the state with which the model was built"
        )
