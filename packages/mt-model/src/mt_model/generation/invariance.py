"""A probe: whether a token has the same bits whatever else is in its pass."""

from __future__ import annotations

from typing import cast

import torch
from mt_parallel_state import hash_key, random_uniform
from torch import Tensor

from mt_model.attend.slots import Slots
from mt_model.language.decoder import GPT
from mt_model.language.encoder_decoder import EncoderDecoder
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
    if model.config.encoder_layers and not (model.has_embedding and model.has_head):
        return "a stage of a model with an encoder can't be probed"
    length = min(sum(_PIECES), model.config.max_sequence_length)
    if model.config.cache_break(1, length) is not None:
        return "its rotary embedding is another one for a longer text"
    device = model.shard.device
    text = torch.arange(length, device=device)[None] * 7919 % model.config.vocab_size
    pages, start = model.new_pages(blocks=2, block_size=64, states=1), 0
    one = torch.ones(1, dtype=torch.int64, device=device)
    x = None if model.has_embedding else _features(model, length)
    memory: dict[str, Tensor] = {}
    if isinstance(model, EncoderDecoder):
        whole = model.logits(text, encoder_tokens=text)[0]
        model.encode(text, pages, 64 + torch.arange(length, device=device))
        memory = {"memory_tables": one[None], "memory_lengths": one * length}
    else:
        whole = _run(model, x, {"tokens": text})
    for count in _PIECES:
        own = torch.arange(length, device=device)[start : start + count]
        if not len(own):
            break
        slots = Slots(
            starts=torch.tensor([0, len(own)], device=device),
            positions=own,
            places=own,
            tables=one[None] - 1,
            lengths=own[-1:] + 1,
            states=one - 1,
            scored=own - start,
            **memory,
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
