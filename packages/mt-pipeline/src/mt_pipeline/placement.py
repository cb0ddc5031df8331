"""Which layers live on which stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_parallel_state import ParallelState


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Cut a list of layers into contiguous stages of as equal length as can be.

    Where the layers do not divide evenly, the first of the middle stages take one more each, then
    the first stage: the first stage also has the embedding, and the last stage, which also has the
    head and the loss, never takes one.

    Args:
        num_layers: Number of layers.
        stages: Number of stages.

    Returns:
        For each stage the range of its layers; together they are `range(num_layers)`.

    Raises:
        ValueError: `stages` is below 1, or a stage would have no layer.

    Example:
        >>> split_layers(10, 4)
        [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    if stages < 1:
        raise ValueError(f"stages is {stages}: expected at least 1")
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} pipeline stages: every stage needs a layer, "
            f"so use at most {max(num_layers, 1)} stages or at least {stages} layers"
        )
    each, remainder = divmod(num_layers, stages)
    favoured = [*range(1, stages - 1), 0][:remainder]
    result: list[range] = []
    start = 0
    for stage in range(stages):
        stop = start + each + (stage in favoured)
        result.append(range(start, stop))
        start = stop
    return result


def own_layers(num_layers: int, state: ParallelState) -> range:
    """The layers of this rank's stage under `split_layers`, with one stage per pipeline rank.

    Args:
        num_layers: Layers of the whole model.
        state: This rank's place in the layout; its `pp` axis is the pipeline.

    Raises:
        ValueError: As from `split_layers`.
    """
    return split_layers(num_layers, state.size("pp"))[state.index("pp")]
