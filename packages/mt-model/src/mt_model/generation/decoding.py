"""Passes of generation as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from mt_fusions import Graph, GraphError
from torch import Tensor

from mt_model.attend.cache import KVCache
from mt_model.language.decoder import GPT
from mt_model.stack.batch import Batch

_NAME = "a step of decoding"


class GraphedDecoding:
    """A stage's passes of one token with a cache, each the replay of one CUDA graph.

    Call it in place of the stage, as `(x, batch)`, once the cache holds the first tokens. The place
    of the next token is a tensor (`KVCache.place`), so one graph serves all; the next call
    overwrites the result. On a CPU each pass runs eagerly, and an operation that a replay would
    compute wrong raises `mt_fusions.GraphError`.

    ALiBi, whose slopes are Python numbers, and a rope whose angles change with the length run
    eagerly.

    Args:
        stage: Stage of a language model.
        cache: Cache with the tokens so far; from now on all passes go through this object.
        then: Function of the stage's output and the place of the next token that makes the result,
            in the same graph.
        state: Tensors that `then` reads, by name.
        on_eager: Function to call once with the reason why passes can't be captured; None raises an
            error with the reason.

    Raises:
        ValueError: The cache holds no token, or is full in a pass.
        GraphError: Without `on_eager`: passes can't be captured.

    Example:
        >>> from mt_model import GPT, preset
        >>> model = GPT(preset("tiny", vocab_size=64, num_layers=1)).eval()
        >>> cache, tokens = model.new_cache(batch_size=1, max_length=8), torch.ones(1, 3).long()
        >>> with torch.no_grad():
        ...     scores = model(None, {"tokens": tokens, "cache": cache})
        ...     decoding = GraphedDecoding(model, cache)
        ...     for _ in range(5):
        ...         token = scores[:, -1].argmax(-1, keepdim=True)
        ...         scores = decoding(None, {"tokens": token, "cache": cache})
        >>> cache.length
        8
    """

    def __init__(
        self,
        stage: GPT,
        cache: KVCache,
        *,
        then: Callable[[Tensor, Tensor], Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
        on_eager: Callable[[str], object] | None = None,
    ) -> None:
        if not cache.length:
            raise ValueError("the cache holds no token; run the first ones through the model")
        self._stage, self._cache, self._then = stage, cache, then
        self._length = cache.length
        device = next(stage.parameters()).device
        self._place = cache.place = torch.tensor(cache.length, device=device)
        self._run: Callable[[Tensor | None, Tensor], Tensor] = self._step
        obstacle = _obstacle(stage, cache)
        if obstacle is None:
            held = {**dict(_held(stage, cache)), **(state or {}), "place": self._place}
            self._run = Graph(self._step, state=held, name=_NAME, on_eager=on_eager)
        elif on_eager is None:
            raise GraphError(f"{_NAME} can't run as a CUDA graph: {obstacle}")
        else:
            on_eager(f"{_NAME} runs eagerly: {obstacle}")

    @property
    def replays(self) -> int:
        """Number of replayed passes, or of their stand-ins on a CPU."""
        return self._run.replays if isinstance(self._run, Graph) else 0

    def __call__(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Run the stage on one token of each row.

        Args:
            x: The activation of the stage before; None on the first stage.
            batch: Mapping with `tokens` and the cache; other entries may be None.
        """
        given = sorted(name for name, value in batch.items() if value is not None)
        if given != ["cache", "tokens"] or batch["cache"] is not self._cache:
            raise ValueError(
                f"a graph of decoding takes tokens and its own cache, got {', '.join(given)}; run "
                "the stage itself for other passes"
            )
        if batch["tokens"].shape[1] != 1 or self._length == self._cache.max_length:
            raise ValueError(
                f"{batch['tokens'].shape[1]} tokens for a cache that holds {self._length} of "
                f"{self._cache.max_length}: give one at a time, or allocate a larger cache"
            )
        returned = self._run(x, batch["tokens"])
        self._length += 1
        self._cache.length = self._length  # a replay runs no Python
        return returned

    def _step(self, x: Tensor | None, tokens: Tensor) -> Tensor:
        self._cache.length = self._length
        y = self._stage(x, {"tokens": tokens, "cache": self._cache})
        assert isinstance(y, Tensor), "a pass with a cache returns scores"  # noqa: S101
        self._place.add_(1)
        return y if self._then is None else self._then(y, self._place)


def _held(stage: GPT, cache: KVCache) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    yield from stage.named_buffers()
    for index, tensors in cache.layers.items():
        for name, x in tensors.items():
            yield f"{name} of layer {index} in the cache", x
    if cache.mask is not None:
        yield "the cache's mask", cache.mask


def _obstacle(stage: GPT, cache: KVCache) -> str | None:
    """Name a Python value of the passes that changes with the length; None where none does."""
    if stage.config.retro is not None:
        return "a pass that finishes a chunk reads neighbours (retro), and others don't"
    now = cache.length + 1
    last = stage.config.cache_break(cache.length, cache.max_length) or cache.max_length
    for index, layer in enumerate(stage.config.layers):
        rotary = None if layer.mixer is None else layer.mixer.rotary
        if rotary is not None and rotary.angles(now) != rotary.angles(max(now, last)):
            return (
                f"the rope of layer {index} turns by other angles as the text grows "
                f"({type(rotary.rope.scaling).__name__}), and a graph has those of its capture"
            )
    return None
