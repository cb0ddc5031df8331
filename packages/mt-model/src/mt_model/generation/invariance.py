"""A probe: whether a token has the same bits whatever else is in its pass."""

from __future__ import annotations

from typing import cast

import torch
from mt_parallel_state import hash_key, random_uniform
from torch import Tensor

from mt_model.attend.slots import Slots
from mt_model.language.decoder import GPT
from mt_model.stack.batch import Batch

_PIECES = (13, 1, 1, 3, 1, 14)  # tokens of each pass


@torch.no_grad()
def invariance_obstacle(model: GPT) -> str | None:
    """Run a text in one sequence and in pieces, and say where a bit differs; None if none does.

    Call it on every rank of a tensor-parallel group. A later stage starts from drawn features.

    Args:
        model: Model, or stage of it, with `Kernels(attention="invariant")`, in evaluation mode.
    """
    if not model.shard.kernels.is_invariant:
        return "the model was not built with Kernels(attention='invariant')"
    if model.config.encoder_layers:
        return "only a decoder can be probed"
    length = min(sum(_PIECES), model.config.max_sequence_length)
    if model.config.cache_break(1, length) is not None:
        return "its rotary embedding is another one for a longer text"
    device = model.shard.device
    text = torch.arange(length, device=device)[None] * 7919 % model.config.vocab_size
    x = None if model.has_embedding else _features(model, length)
    whole, pages = (
        _run(model, x, {"tokens": text}),
        model.new_pages(blocks=1, block_size=64, states=1),
    )
    start = 0
    for count in _PIECES:
        own = torch.arange(length, device=device)[start : start + count]
        if not len(own):
            break
        one = torch.zeros(1, dtype=torch.int64, device=device)
        slots = Slots(
            starts=torch.tensor([0, len(own)], device=device),
            positions=own,
            places=own,
            tables=one[None],
            lengths=own[-1:] + 1,
            states=one,
            scored=own - start,
        )
        batch = {"tokens": text[:, own], "cache": pages, "slots": slots}
        found = _run(model, None if x is None else x[:, own], batch)
        same = (found == whole[own]).all(1)
        if not same.all():
            place = start + int(same.int().argmin())
            return (
                f"token {place} of a text has other bits in a pass of {len(own)} tokens than in "
                f"its whole sequence, on {device} in {model.shard.dtype} with "
                f"{torch.get_num_threads()} threads"
            )
        start += count
    return None


def _features(model: GPT, length: int) -> Tensor:
    """Return an activation of another stage, [1, S, hidden], with values in [-1, 1)."""
    index = torch.arange(length * model.config.hidden_size, device=model.shard.device)
    drawn = 2 * random_uniform(hash_key("invariance"), index) - 1
    return drawn.view(1, length, -1).to(model.shard.dtype)


def _run(model: GPT, x: Tensor | None, batch: Batch) -> Tensor:
    """Return the scores or features of a batch's tokens, without the losses of its layers."""
    found = model(x, batch)
    return cast("Tensor", found[0] if isinstance(found, tuple) else found)[0]
