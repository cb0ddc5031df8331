"""The activations that a stage will keep for backward, measured before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mt_moe import Router
from torch import Tensor

from mt_model.language.decoder import GPT
from mt_model.recompute.saved_activations import KeptBytes, SavedActivations
from mt_model.stack.batch import check_batch


def expected_bytes(stage: GPT, batch: Mapping[str, Any]) -> dict[int, KeptBytes]:
    """Measure on the first row of a batch what each layer will keep for all of it.

    The layers run forward once, with their recomputation and offloading, and nothing is kept. All
    ranks that share the stage's weights or sequences call it together.

    Args:
        stage: whose layers they are; its buffers stay as they are.
        batch: as the stage is called with.

    Returns:
        By the layer's index in the whole model.
    """
    check_batch(batch)
    given = batch.get("embeddings")
    rows, length = (batch["tokens"] if given is None else given).shape[:2]
    one = {name: _first_row(name, x) for name, x in batch.items()}
    if stage.images is not None and batch.get("pixel_values") is not None:
        one["pixel_values"] = batch["pixel_values"][: stage.images.num_images(one["tokens"])]
    place, plan, x = stage.shard, stage.plan, None
    if plan.offload is not None:
        plan = replace(
            plan, offload=replace(plan.offload, min_bytes=plan.offload.min_bytes // rows)
        )
    if not stage.has_embedding:
        length += stage.config.handed_tokens(one) - one["tokens"].shape[1] if "tokens" in one else 0
        length //= place.tp if place.sequence_parallel else 1
        sizes = (1, length, stage.config.hidden_size)
        x = torch.zeros(sizes, dtype=place.dtype, device=place.device, requires_grad=True)
    found: dict[int, KeptBytes] = {}
    held = [(buffer, buffer.clone()) for buffer in stage.buffers()]
    with torch.enable_grad():
        x, shared = stage.begin(x, one)
        saved = SavedActivations(plan, x.device, found)
        shared = replace(shared, saved=saved, plain=True)
        x, _ = stage.run_layers(x, shared)
        stage.mtp_losses(x, shared, one)
    for buffer, before in held:  # what layers count in training is not of this pass
        buffer.copy_(before)
    for module in stage.modules():
        if isinstance(module, Router):
            module.end_step()
    return {i: KeptBytes(kept.device * rows, kept.host * rows) for i, kept in found.items()}


def _first_row(name: str, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x[:, :1] if name == "positions" and x.dim() == 3 else x[:1]
