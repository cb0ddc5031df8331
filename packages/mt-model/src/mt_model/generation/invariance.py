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

_PIECES = (13, 1, 1, 3, 1, 14)  # tokens of each request in each pass
_BESIDE = [1], [2, 3]  # requests that run together
_BLOCK = 64


@torch.no_grad()
def invariance_obstacle(model: GPT) -> str | None:
    """Run a text whole, and in pieces alone and beside another, and say where a bit differs.

    Call it on every rank of a tensor-parallel group. A later stage starts from drawn features.

    Args:
        model: Model, or stage of it, with `Kernels(attention="invariant")`, in evaluation mode.

    Returns:
        Where a bit differs; None if none does.
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
    pages = model.new_pages(blocks=4, block_size=_BLOCK, states=4)
    x = None if model.has_embedding else _features(model, length)
    if isinstance(model, EncoderDecoder):
        whole = model.logits(text, encoder_tokens=text)[0]
        model.encode(text, pages, torch.arange(length, device=device))
    else:
        whole = _run(model, x, {"tokens": text})
    for requests in _BESIDE:
        start = 0
        for count in _PIECES:
            own = torch.arange(length, device=device)[start : start + count]
            if not len(own):
                break
            slots = _slots(requests, own, length if model.config.encoder_layers else None)
            rows = len(requests)
            batch = {"tokens": text[:, own].repeat(1, rows), "cache": pages, "slots": slots}
            found = _run(model, None if x is None else x[:, own].repeat(1, rows, 1), batch)
            same = (found.unflatten(0, (rows, -1)) == whole[own]).all(-1).all(0)
            if not same.all():
                place = start + int(same.int().argmin())
                return (
                    f"token {place} of a text has other bits in a pass with {len(own)} tokens of "
                    f"{rows} requests than in its whole sequence, on {device} in "
                    f"{model.shard.dtype} with {torch.get_num_threads()} threads"
                )
            start += count
    return None


def _slots(requests: list[int], own: Tensor, memory: int | None) -> Slots:
    """Return the slots of requests, each in the block and the states of its number.

    Args:
        requests: Numbers of the requests.
        own: Positions of the tokens of each.
        memory: Number of the encoder's tokens, in block 0; None without an encoder.
    """
    rows = torch.tensor(requests, device=own.device)
    ones = torch.ones_like(rows)
    return Slots(
        starts=torch.arange(len(rows) + 1, device=own.device) * len(own),
        positions=own.repeat(len(rows)),
        places=(rows[:, None] * _BLOCK + own).flatten(),
        tables=rows[:, None],
        lengths=ones * (own[-1] + 1),
        states=rows,
        scored=torch.arange(len(rows) * len(own), device=own.device),
        memory_tables=None if memory is None else ones[:, None] - 1,
        memory_lengths=None if memory is None else ones * memory,
    )


def _features(model: GPT, length: int) -> Tensor:
    """Return an activation of another stage, [1, S, hidden], with values in [-1, 1)."""
    index = torch.arange(length * model.config.hidden_size, device=model.shard.device)
    drawn = 2 * random_uniform(hash_key("invariance"), index) - 1
    return drawn.view(1, length, -1).to(model.shard.dtype)


def _run(model: GPT, x: Tensor | None, batch: Batch) -> Tensor:
    """Return the scores or features of a batch's tokens, without the losses of its layers."""
    found = model(x, batch)
    return cast("Tensor", found[0] if isinstance(found, tuple) else found)[0]
