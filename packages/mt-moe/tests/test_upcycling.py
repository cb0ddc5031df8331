"""A layer of upcycled experts against the dense layer that it was made of."""

import pytest
import torch
import torch.nn.functional as F
from mt_moe import (
    ExpertOptions,
    MoELayer,
    MoEOptions,
    RouterOptions,
    replayed_routes,
    upcycle,
    upcycle_router,
)
from plain import F64, drawn

HIDDEN, FFN = 6, 8


def dense_of(x, up, down):
    if up.dim() == 3:
        return (F.silu(x @ up[0].T) * (x @ up[1].T)) @ down.T
    return F.relu(x @ up.T).square() @ down.T


def layer_of(up, down, router, options):
    gated = up.dim() == 4
    experts = ExpertOptions(gated=gated, activation="silu" if gated else "relu2")
    made = MoEOptions(router=options, experts=experts)
    layer = MoELayer(HIDDEN, down.shape[2], len(up), options=made, dtype=F64)
    weights = {"experts.up.weight": up, "experts.down.weight": down, "router.weight": router}
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("granularity", [1, 2, 4])
@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_the_output_is_unchanged_whatever_copies_a_token_chooses(score, granularity, copies, gated):
    up = drawn(2, FFN, HIDDEN) if gated else drawn(FFN, HIDDEN)
    down, x = drawn(HIDDEN, FFN, seed=1), drawn(20, HIDDEN, seed=2)
    number = granularity * copies
    router = upcycle_router(drawn(copies, HIDDEN, seed=3), number)
    made = upcycle(up, down, number, granularity=granularity)
    for chosen in range(1, copies + 1):
        top_k = chosen * granularity
        if top_k == 1:
            continue  # the router would have no gradient
        layer = layer_of(*made, router, RouterOptions(top_k=top_k, score=score, dtype=F64))
        torch.testing.assert_close(layer(x).hidden, dense_of(x, up, down), rtol=1e-12, atol=1e-12)


def test_weights_that_are_not_divided_need_the_scale_of_all_experts():
    up, down, x = drawn(2, FFN, HIDDEN), drawn(HIDDEN, FFN, seed=1), drawn(20, HIDDEN, seed=2)
    number, granularity, top_k = 8, 2, 4
    scale = granularity * number / top_k
    made = upcycle(up, down, number, granularity=granularity, scale=scale)
    options = RouterOptions(top_k=top_k, normalize=False, dtype=F64)
    layer = layer_of(*made, torch.zeros(number, HIDDEN, dtype=F64), options)
    even = drawn(20, 2, seed=4).argsort(1)
    chosen = torch.cat([even, even + 2], 1)  # every shard twice
    with replayed_routes(layer, {"router": [chosen]}):
        torch.testing.assert_close(layer(x).hidden, dense_of(x, up, down), rtol=1e-12, atol=1e-12)


def test_neighbours_hold_the_whole_layer():
    up, down = drawn(2, FFN, HIDDEN), drawn(HIDDEN, FFN, seed=1)
    wide, narrow = upcycle(up, down, 8, granularity=4, scale=1.0)
    for first in (0, 4):
        assert torch.equal(torch.cat(list(wide[first : first + 4]), 1), up)
        assert torch.equal(torch.cat(list(narrow[first : first + 4]), 1), down)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 6, "granularity": 4}, "must be a multiple of granularity=4"),
        ({"num_experts": 6, "granularity": 3}, "does not divide the width 8"),
        ({"granularity": 0}, "at least 1"),
        ({"down": torch.ones(HIDDEN, 7)}, r"\[hidden, ffn\] of the same sizes"),
        ({"up": torch.ones(3, FFN, HIDDEN)}, "with a gate or"),
    ],
    ids=str,
)
def test_errors_say_what_is_wrong(change, words):
    given = {"up": torch.ones(2, FFN, HIDDEN), "down": torch.ones(HIDDEN, FFN), "num_experts": 4}
    with pytest.raises(ValueError, match=words):
        upcycle(**given | change)
    with pytest.raises(TypeError, match="up"):
        upcycle([1.0], torch.ones(2, 2), 2)
    with pytest.raises(ValueError, match="its rows divide the 5 experts"):
        upcycle_router(torch.ones(2, 3), 5)
