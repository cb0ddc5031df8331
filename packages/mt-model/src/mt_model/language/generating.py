"""A stack whose layers keep keys, values and states in generation: its caches and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from mt_files import check_type
from torch import Tensor

from mt_model.attend.cache import SCALE, KVCache, Pages
from mt_model.attend.cached import CachedAttend
from mt_model.attend.context import Attend, ForwardContext
from mt_model.attend.padding import padding_as_document, positions_of
from mt_model.attend.paged import PagedAttend
from mt_model.attend.slots import Slots
from mt_model.block.entry import MixerConfig
from mt_model.block.kv_rounding import RoundsKV, check_rounds
from mt_model.stack.batch import Batch, whole_of
from mt_model.stack.cache_allocation import check_keeps, chosen_schemes, empty_layers
from mt_model.stack.layer import TransformerLayer
from mt_model.stack.stack import Stack

if TYPE_CHECKING:
    from mt_quant import KVFormat

    from mt_model.language.config import ModelConfig  # noqa: F401 - the base class names it


class GeneratingStack(Stack["ModelConfig"]):
    """Layers of a language model, with caches of what they keep, and the context of a pass."""

    def new_cache(
        self, *, batch_size: int, max_length: int, kv_cache_dtype: KVFormat | str = "auto"
    ) -> KVCache:
        """Make an empty cache for `logits`, on this model's device.

        Args:
            batch_size: Number of rows.
            max_length: Number of tokens that fit.
            kv_cache_dtype: Format of keys and values: `full`, the model's dtype; a format of
                mt-quant or its name, such as `fp8` or `int8`; or `auto`, each layer's scheme in
                `kv_schemes`, else the model's dtype. States stay as they are.

        Raises:
            ValueError: `max_length` is longer than the model's sequences.
            QuantizationError: There is no such format, or no layer keeps keys and values.
            CalibrationError: The format has static scales, and `kv_schemes` has none of them.
        """
        limit = self.config.max_sequence_length
        check_type("max_length", max_length, int)
        if not 0 < max_length <= limit:
            raise ValueError(
                f"max_length={max_length} is not between 1 and max_sequence_length={limit}"
            )
        sizes = {"rows": batch_size, "length": max_length}
        how = {"mixers": self.generating(), "batch_size": batch_size}
        layers, formats = self._empty(kv_cache_dtype, sizes, **how)
        return KVCache(layers=layers, max_length=max_length, formats=formats)

    def new_pages(
        self,
        *,
        blocks: int,
        block_size: int,
        states: int,
        kv_cache_dtype: KVFormat | str = "auto",
        mtp: bool = False,
    ) -> Pages:
        """Make empty pages for the tokens of many requests, on this model's device.

        Args:
            blocks: Number of blocks.
            block_size: Number of tokens of a block.
            states: Number of rows of recurrent states, one for each request that runs.
            kv_cache_dtype: Format of keys and values, as in `new_cache`.
            mtp: Whether the layers of the MTP modules have pages too, for `ahead`.

        Raises:
            QuantizationError: There is no such format, or no layer keeps keys and values.
            CalibrationError: The format has static scales, and `kv_schemes` has none of them.
        """
        sizes = {"rows": blocks, "length": block_size, "states": states}
        counts = {"blocks": blocks, "block_size": block_size, "states": states}
        mixers = self.generating()
        if mtp:
            behind = enumerate(self.config.mtp_layers, self.config.num_layers)
            mixers |= {i: layer.mixer for i, layer in behind if layer.mixer is not None}
        layers, formats = self._empty(kv_cache_dtype, sizes, mixers=mixers, **counts)
        rows = {
            i: [name for name in tensors if name.removesuffix(SCALE) not in mixers[i].token_cache]
            for i, tensors in layers.items()
        }
        return Pages(layers=layers, block_size=block_size, formats=formats, states=rows)

    def _empty(
        self,
        kv_cache_dtype: KVFormat | str,
        sizes: Mapping[str, int],
        *,
        mixers: Mapping[int, MixerConfig],
        **counts: int,
    ) -> tuple[dict[int, dict[str, Tensor]], dict[int, KVFormat]]:
        """Return empty tensors of each layer, and the formats of those in low precision."""
        for name, count in counts.items():
            check_type(name, count, int)
            if count < 1:
                raise ValueError(f"{name}={count} is not 1 or more")
        schemes = dict(self.kv_schemes) if kv_cache_dtype == "auto" else {}
        if kv_cache_dtype not in ("auto", "full"):
            check_keeps(self.config.mixers.values(), kv_cache_dtype)
            schemes = chosen_schemes(kv_cache_dtype, mixers, self.kv_schemes)
        layers = empty_layers(mixers, schemes, **sizes, shard=self.shard)
        return layers, {index: scheme.format for index, scheme in schemes.items()}

    def round_kv(self, formats: Mapping[int, KVFormat]) -> None:
        """Round keys and values in passes without a cache as a low-precision cache would.

        This is for training: gradients pass through the rounding unchanged. Passes with a cache use
        the cache's own formats.

        Args:
            formats: Formats of this stage's layers, by index; other layers do not round.

        Raises:
            QuantizationError: A format has static scales, or a layer keeps no keys and values.
        """
        mixers = {
            index: cast("TransformerLayer", self.layers[str(index)]).mixer
            for index in self.generating()
        }
        for index, format in formats.items():
            check_rounds(index, format, mixers.get(index))
        for index, mixer in mixers.items():
            if isinstance(mixer, RoundsKV):
                mixer.kv_format = formats.get(index)

    def generating(self) -> dict[int, MixerConfig]:
        """Return this stage's mixers that keep something in generation, by the layer's index."""
        return self._mixers()

    def _positions(self, batch: Batch, length: int, device: torch.device) -> Tensor:
        """Check the length, and return the positions of this rank's tokens."""
        cache, slots = batch.get("cache"), batch.get("slots")
        if cache is not None:
            self._check_whole_sequences("a cache", is_shared=slots is not None)
        if slots is not None:
            self._check_lengths(slots)
            return slots.positions if slots.positions.dim() == 1 else slots.positions[:, None]
        if cache is not None:
            self._check_length(cache.length + length)
            if batch.get("documents") is not None:
                raise ValueError("documents do not go with a cache; give one text in each row")
            if cache.length + length > cache.max_length:
                raise ValueError(
                    f"{cache.length + length} tokens are more than the cache holds "
                    f"({cache.max_length}); allocate it with a larger max_length"
                )
            self._check_break(cache.length, cache.length + length)
            self._note_padding(cache, whole_of(batch, "mask", length))
            places = cache.places(length, device)
            mask = cache.mask
        else:
            self._check_length(length)
            self.shard.check_length(length)
            places = self.shard.context.positions(length, device)
            mask = whole_of(batch, "mask", length)
        if batch.get("positions") is not None:
            return batch["positions"]
        if mask is None:
            return places
        return positions_of(mask).clamp(min=0).index_select(1, places)

    def _check_break(self, held: int, length: int) -> None:
        end = self.config.cache_break(held, length)
        if end is not None:
            raise ValueError(
                f"the cache holds {held} tokens, and keys made in sequences of up to {end} do not "
                f"serve {length}: the factors of longrope change there. Make a new cache, and give "
                "all tokens again"
            )

    def _check_lengths(self, slots: Slots) -> None:
        """Check what each request holds, where reading it waits for no device or has to be."""
        breaks = self.config.cache_break(1, self.config.max_sequence_length) is not None
        if slots.lengths.device.type != "cpu" and not breaks:
            return
        lengths, counts = slots.lengths.tolist(), slots.starts.diff().tolist()
        self._check_length(max(lengths))
        if not breaks:
            return
        for length, count in zip(lengths, counts, strict=True):
            self._check_break(length - count, length)

    def _note_padding(self, cache: KVCache, mask: Tensor | None) -> None:
        for index, mixer in self.generating().items():
            if mask is not None and not mixer.hides_padding:
                raise ValueError(
                    f"the {type(mixer).__name__} of layer {index} keeps a state of all that it has "
                    "seen, padding too. Give rows of equal length without a mask, or one at a time"
                )
        cache.note(mask)

    def _share(
        self, batch: Batch, positions: Tensor, length: int, device: torch.device
    ) -> ForwardContext:
        cache, sample_ids, index = batch.get("cache"), None, None
        if cache is None:
            sample_ids, index = self._dropout(batch, length, device)
        documents, mask = whole_of(batch, "documents", length), batch.get("mask")
        attend: Attend = self.shard.context
        whole: int | Tensor = length
        if isinstance(cache, Pages):
            attend = PagedAttend(cache=cache, slots=batch["slots"], peers=batch.get("peers"))
            whole = batch["slots"].lengths_by_token()
        elif cache is not None:
            attend = CachedAttend(cache=cache, places=cache.places(length, device))
            whole = cache.length + length
        if mask is not None:
            documents = padding_as_document(mask, documents)
        return ForwardContext(
            attend=attend,
            score_tables=self._score_weights(),
            tables=self._tables(positions, whole),
            temperatures=self._temperatures(positions),
            documents=documents,
            sample_ids=sample_ids,
            hidden_index=index,
            token_index=self._token_index(sample_ids, length, device),
            cache=cache if isinstance(cache, KVCache) else None,
            memory=batch.get("memory"),
            memory_mask=batch.get("memory_mask"),
            saved=self._saved(device),
            plain=cache is not None,
        )

    def _check_length(self, end: int) -> None:
        if end > self.config.max_sequence_length:
            raise ValueError(
                f"{end} tokens are more than max_sequence_length="
                f"{self.config.max_sequence_length}. Cut the sequence, or build the model with a "
                f"larger max_sequence_length"
            )

    def _check_whole_sequences(self, what: str, *, is_shared: bool = False) -> None:
        if self.shard.context.group is not None and not is_shared:
            raise ValueError(
                f"{what} needs whole sequences, and cp={self.shard.context.size} ranks share "
                "them. Build the model with cp=1"
            )
        if self.shard.sequence_parallel:
            raise ValueError(f"{what} needs a model built with sequence_parallel=False")
