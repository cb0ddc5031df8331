"""Conversion of dense runs to mixtures of experts that start with the same logits.

It needs mt-ckpt, from the extra `mt-hf[cli]`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mt_files import Checks, to_plain
from mt_model import MLPConfig, ModelConfig, MoEConfig, StackConfig
from mt_moe import upcycle, upcycle_router
from mt_parallel_state import ParallelLayout, initialize_
from torch import Tensor, nn

from mt_hf.family.error import ExchangeError
from mt_hf.writing.checkpoint import source_of
from mt_hf.writing.files import check_free, new_folder

if TYPE_CHECKING:
    from mt_ckpt import ArrayReader, TensorShard


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Parameters of the conversion of feed-forwards to experts.

    Attributes:
        num_experts: Number of experts in a layer.
        top_k: Number of experts for each token, a multiple of the granularity.
        granularity: Number of shards into which a feed-forward is cut; each expert holds one.
        every: Layers whose number, from 1, is a multiple of this get experts.
        aux_loss: Weight of the load-balancing loss.
        seed: Seed of the routers.
    """

    num_experts: int
    top_k: int = 2
    granularity: int = 1
    every: int = 1
    aux_loss: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "num_experts", "top_k", "granularity", "every")
        checks.at_least(0, "aux_loss")
        checks.done()
        for name in ("num_experts", "top_k"):
            if getattr(self, name) % self.granularity:
                text = f"is no multiple of granularity={self.granularity}, and copies are whole"
                checks.add(name, f"{getattr(self, name)} {text}")
        checks.done()

    def config_of(self, dense: ModelConfig) -> ModelConfig:
        """Return the config with experts instead of feed-forwards.

        Raises:
            ValueError: A feed-forward can't become experts; the message gives the reason.
        """
        layers = list(dense.layers)
        chosen = range(self.every - 1, len(layers), self.every)
        if not chosen:
            raise ValueError(f"every={self.every} chooses none of the {len(layers)} layers")
        for index in chosen:
            entry = layers[index].feed_forward
            try:
                moe = self._experts(entry)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from error
            layers[index] = replace(layers[index], feed_forward=moe)
        return replace(dense, layers=tuple(layers))

    def _experts(self, entry: object) -> MoEConfig:
        if not isinstance(entry, MLPConfig) or entry.dropout:
            has = "one with dropout inside" if isinstance(entry, MLPConfig) else f"{entry!r:.80}"
            raise ValueError(f"experts are made of a feed-forward without dropout, not of {has}")
        if entry.ffn_size % self.granularity:
            raise ValueError(
                f"granularity={self.granularity} does not divide the width {entry.ffn_size}"
            )
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            ffn_size=entry.ffn_size // self.granularity,
            activation=entry.activation,
            gated=entry.gated,
            bias=entry.bias,
            clamp=entry.clamp,
            up_offset=entry.up_offset,
            aux_loss=self.aux_loss,
        )


def upcycle_checkpoint(
    checkpoint: str | Path, out: str | Path, how: Upcycling, *, ema: bool = False
) -> StackConfig:
    """Convert a dense run to a run folder of a mixture of experts with the same logits.

    Each token's experts are whole copies of the feed-forward, with weights that sum to 1
    (`mt_moe.upcycle`; Komatsuzaki et al., 2023; He et al., 2024). mt-train starts from the folder
    (`checkpoint.load`, with `load_mode: weights`), mt-infer reads it, and `export_checkpoint`
    exports it. Memory holds the dense model, but not its copies.

    Args:
        checkpoint: A run folder, such as `import_pretrained` makes, or one of its steps.
        out: The folder to make; it must not exist, or be empty.
        how: Parameters of the experts.
        ema: Whether to use the moving average of the weights.

    Returns:
        The config of the model with experts.

    Raises:
        ExchangeError: The model can't have such experts, or `out` exists.
        CheckpointError: The checkpoint is damaged, or holds no model.
        FileError: A file can't be read or written.
    """
    from mt_ckpt import RunFolder, SavedModel, open_arrays, save_checkpoint

    check_free(Path(out))
    source, run = source_of(Path(checkpoint))
    with open_arrays(source) as arrays:
        saved = arrays.manifest.metadata_as(SavedModel)
        dense = StackConfig.from_dict(saved.model)
        if not isinstance(dense, ModelConfig):
            raise ExchangeError(f"{arrays.path}: experts are for decoders and encoders of tokens")
        try:
            config = how.config_of(dense)
        except ValueError as error:
            raise ExchangeError(f"{arrays.path}: {error}") from error
        prefix = RunFolder.EMA if ema else RunFolder.WEIGHTS
        if not any(name.startswith(f"{prefix}/") for name in arrays.manifest.arrays):
            raise ExchangeError(f"{arrays.path} has no {prefix}; give a checkpoint that has")
        with new_folder(Path(out)) as temporary:
            made = RunFolder(temporary)
            if run.tokenizer.exists():
                shutil.copy2(run.tokenizer, made.tokenizer)
            metadata = to_plain(SavedModel(model=config.to_dict(), tokenizer=saved.tokenizer))
            save_checkpoint(made.checkpoints, 0, _shards(arrays, config, how, prefix), metadata)
    return config


def _shards(
    arrays: ArrayReader, config: ModelConfig, how: Upcycling, prefix: str
) -> Iterator[TensorShard]:
    """Yield the weights; experts are views of the dense weights."""
    from mt_ckpt import RunFolder, TensorShard

    stored = {
        name.partition("/")[2]: name
        for kind in (RunFolder.WEIGHTS, prefix)  # only the weights include buffers
        for name in arrays.manifest.arrays
        if name.startswith(f"{kind}/")
    }
    blocks = {
        f"layers.{index}.feed_forward": layer.feed_forward
        for index, layer in enumerate(config.layers)
        if isinstance(layer.feed_forward, MoEConfig)
    }
    dense = {f"{block}.{leaf}" for block in blocks for leaf in _LEAVES}
    for target, name in stored.items():
        if target not in dense:
            yield TensorShard(f"{RunFolder.WEIGHTS}/{target}", _read(arrays, name))
    for block, moe in blocks.items():
        own = {
            leaf: _read(arrays, stored[f"{block}.{leaf}"])
            for leaf in _LEAVES
            if f"{block}.{leaf}" in stored
        }
        for leaf, copy in _copy(own, how.granularity).items():
            shape = (moe.num_experts, *copy.shape[1:])
            for first in range(0, moe.num_experts, how.granularity):
                yield TensorShard(
                    f"{RunFolder.WEIGHTS}/{block}.experts.{leaf}",
                    copy,
                    global_shape=shape,
                    offsets=(first, *(0 for _ in shape[1:])),
                )
        name, up = f"{block}.router.weight", own["up.weight"]
        rows = torch.empty(how.num_experts // how.granularity, config.hidden_size, dtype=up.dtype)
        at = {"layout": ParallelLayout(), "rank": 0, "std": config.init_std}
        initialize_(nn.Parameter(rows), seed=how.seed, name=name, **at)
        yield TensorShard(f"{RunFolder.WEIGHTS}/{name}", upcycle_router(rows, how.num_experts))


_LEAVES = ("up.weight", "down.weight", "up.bias", "down.bias")


def _copy(dense: Mapping[str, Tensor], granularity: int) -> dict[str, Tensor]:
    """Return the weights of the experts that together hold one feed-forward."""
    up, down = upcycle(
        dense["up.weight"], dense["down.weight"], granularity, granularity=granularity
    )
    copy = {"up.weight": up, "down.weight": down}
    if "up.bias" in dense:
        copy["up.bias"] = torch.stack(dense["up.bias"].chunk(granularity, -1))
        copy["down.bias"] = dense["down.bias"].expand(granularity, -1)
    return copy


def _read(arrays: ArrayReader, name: str) -> Tensor:
    from mt_ckpt import TensorShard

    spec = arrays.manifest.arrays[name]
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    arrays.fill(TensorShard(name, tensor))
    return tensor
