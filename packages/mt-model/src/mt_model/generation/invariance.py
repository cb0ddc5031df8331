"""A probe: whether a token has the same bits whatever else is in its pass."""

from __future__ import annotations

import torch

from mt_model.attend.slots import Slots
from mt_model.language.decoder import GPT

_PIECES = (13, 1, 1, 3, 1, 14)  # tokens of each pass


@torch.no_grad()
def invariance_obstacle(model: GPT) -> str | None:
    """Run a text in one sequence and in pieces, and say where a bit differs; None if none does.

    Call it on every rank of a tensor-parallel group.

    Args:
        model: Whole model with `Kernels(attention="invariant")`, in evaluation mode.
    """
    if not model.shard.kernels.is_invariant:
        return "the model was not built with Kernels(attention='invariant')"
    if not (model.has_embedding and model.has_head) or model.config.encoder_layers:
        return "only a decoder with all its layers can be probed"
    length = min(sum(_PIECES), model.config.max_sequence_length)
    if model.config.cache_break(1, length) is not None:
        return "its rotary embedding is another one for a longer text"
    device = model.shard.device
    text = torch.arange(length, device=device)[None] * 7919 % model.config.vocab_size
    whole, pages = model.logits(text)[0], model.new_pages(blocks=1, block_size=64, states=1)
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
        found = model(None, {"tokens": text[:, own], "cache": pages, "slots": slots})
        same = (found[0] == whole[own]).all(1)  # pyright: ignore[reportArgumentType,reportCallIssue,reportIndexIssue]
        if not same.all():
            place = start + int(same.int().argmin())
            return (
                f"token {place} of a text has other bits in a pass of {len(own)} tokens than in "
                f"its whole sequence, on {device} in {model.shard.dtype} with "
                f"{torch.get_num_threads()} threads"
            )
        start += count
    return None
