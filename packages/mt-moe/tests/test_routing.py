"""`route` against its formula in Python's floats, and against the routers of transformers."""

import math
from dataclasses import replace

import pytest
import torch
from mt_moe import Router, RouterOptions, route
from mt_testing import pairwise
from plain import F64, drawn

EXPERTS = 8
SCORES = ("softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus")


def plain_scores(z, score):
    if score == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in z]
    if score == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(v))) for v in z]
    each = [math.exp(v - max(z)) for v in z]
    return [v / math.fsum(each) for v in each]


def plain_route(z, options, bias):
    """One token's experts, from the highest, and their weights."""
    scores = plain_scores(z, options.score)
    key = z if options.score == "softmax_of_chosen" else scores
    key = [k + b for k, b in zip(key, bias, strict=True)]
    size = len(z) // options.num_groups
    groups = [range(at, at + size) for at in range(0, len(z), size)]
    judges = options.group_top or options.top_k // options.top_groups
    height = [sum(sorted((key[e] for e in g), reverse=True)[:judges]) for g in groups]
    best = sorted(range(len(groups)), key=lambda g: -height[g])[: options.top_groups]
    may = [expert for g in best for expert in groups[g]]
    chosen = sorted(may, key=lambda e: -key[e])[: options.top_k]
    if options.score == "softmax_of_chosen":
        weights = plain_scores([z[e] for e in chosen], "softmax")
    else:
        weights = [scores[e] for e in chosen]
        if options.normalize:
            weights = [w / math.fsum(weights) for w in weights]
    return chosen, [w * options.scale for w in weights]


def may_be(row):
    constant = row["top_k"] == 1 and (row["normalize"] or row["score"] == "softmax_of_chosen")
    number, top, judges = row["groups"]
    judges = judges or row["top_k"] // top
    held = top * EXPERTS // number
    return not constant and (number == 1 or (judges >= 1 and held >= row["top_k"]))


ROWS = pairwise(
    {
        "score": SCORES,
        "normalize": (True, False),
        "scale": (1.0, 2.5),
        "top_k": (1, 2, 3, 4, 8),
        "groups": ((1, 1, None), (4, 2, None), (4, 2, 2), (2, 1, 1), (4, 4, 1), (2, 1, 3)),
        "bias": (False, True),
        "dtype": (torch.float32, F64),
    },
    allowed=may_be,
)


def options_of(row):
    names = zip(("num_groups", "top_groups", "group_top"), row["groups"], strict=True)
    kept = {name: row[name] for name in ("score", "normalize", "scale", "top_k", "dtype")}
    return RouterOptions(**kept, **dict(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_every_option_is_its_formula(row):
    options, logits = options_of(row), 3 * drawn(40, EXPERTS, seed=5)
    bias = drawn(EXPERTS, seed=6) if row["bias"] else torch.zeros(EXPERTS, dtype=F64)
    found = route(logits, options, bias=bias if row["bias"] else None)
    expected = [plain_route(z, options, bias.tolist()) for z in logits.tolist()]
    assert found.experts.tolist() == [experts for experts, _ in expected]
    assert found.weights.dtype == found.scores.dtype == options.dtype
    wanted = torch.tensor([weights for _, weights in expected], dtype=F64)
    # torch's softplus is the identity from 20 on: 2e-9 in fp64.
    near = {torch.float32: 2e-6, F64: 1e-14}[options.dtype]
    torch.testing.assert_close(found.weights.double(), wanted, rtol=near, atol=near)
    scores = torch.tensor([plain_scores(z, options.score) for z in logits.tolist()], dtype=F64)
    torch.testing.assert_close(found.scores.double(), scores, rtol=near, atol=near)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_gradcheck_of_weights_and_scores(score, normalize, groups):
    options = RouterOptions(
        **{"score": score, "normalize": normalize, "scale": 1.5, "dtype": F64},
        **dict(zip(("num_groups", "top_groups"), groups, strict=True)),
    )
    logits = drawn(5, EXPERTS).requires_grad_()
    bias = drawn(EXPERTS, seed=2)
    torch.autograd.gradcheck(lambda z: route(z, options, bias=bias)[::2], (logits,))


def test_a_bias_moves_the_choice_and_neither_weights_nor_gradients():
    options = RouterOptions(score="sigmoid", dtype=F64, normalize=False)
    logits, bias = drawn(30, EXPERTS).requires_grad_(), 5 * drawn(EXPERTS, seed=1)
    bias.requires_grad_()
    found = route(logits, options, bias=bias)
    assert not torch.equal(found.experts, route(logits, options).experts)
    assert torch.equal(found.weights, logits.sigmoid().gather(1, found.experts))
    found.weights.sum().backward()
    assert bias.grad is None


def test_a_bias_below_every_score_still_keeps_tokens_in_their_groups():
    """Filled with 0 instead of minus infinity, the others would be higher than those chosen."""
    options = RouterOptions(score="sigmoid", top_k=4, num_groups=4, top_groups=2, group_top=2)
    found = route(drawn(50, EXPERTS), options, bias=torch.full((EXPERTS,), -7.0))
    used = torch.zeros(50, 4).scatter_(1, found.experts // 2, 1.0)
    assert torch.equal(used.sum(1), torch.full((50,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("score", SCORES)
def test_extreme_logits_have_finite_weights_and_gradients(score, dtype):
    options = RouterOptions(score=score, dtype=dtype)
    logits = torch.tensor([[-900.0, -901, -950, -990], [900, 1, -900, 0]], dtype=dtype)
    logits.requires_grad_()
    weights = route(logits, options).weights
    (weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert weights.isfinite().all()
    assert logits.grad.isfinite().all()


def config(name, **fields):
    import transformers

    sizes = {"hidden_size": 16, "num_experts_per_tok": 4}
    return getattr(transformers, name)(**sizes, **fields)


def theirs(name, made, seed=0):
    """A router of transformers with drawn parameters."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    classes = {
        "MixtralConfig": MixtralTopKRouter,
        "DeepseekV3Config": DeepseekV3TopkRouter,
        "GptOssConfig": GptOssTopKRouter,
    }
    router = classes[name](made)
    for at, tensor in enumerate([*router.parameters(), *router.buffers()]):
        tensor.data = drawn(*tensor.shape, seed=seed + at) / 2
    return router


def assert_same_bits(logits, options, weights, experts, bias=None):
    """The same choice; and of it the same weights, summed in the order of theirs."""
    found = route(logits, options, bias=bias)
    assert torch.equal(found.experts.sort(1).values, experts.sort(1).values)
    again = route(logits, options, experts=experts).weights
    assert again.dtype == weights.dtype
    assert torch.equal(again, weights)


@pytest.mark.parametrize("seed", range(3))
def test_mixtral_and_gpt_oss_are_bit_equal_from_fp64_on(seed):
    """Mixtral's scores are float32 by its own cast; its logits and all of GPT-OSS are fp64."""
    x = drawn(64, 16, seed=10 + seed)
    for name, options in (
        ("MixtralConfig", RouterOptions(top_k=4)),
        ("GptOssConfig", RouterOptions(top_k=4, score="softmax_of_chosen", dtype=F64)),
    ):
        other = theirs(name, config(name, num_local_experts=EXPERTS), seed)
        bias = getattr(other, "bias", None)
        logits, weights, experts = other(x)
        assert logits.dtype == F64
        options = replace(options, linear_bias=bias is not None)
        ours = Router(16, EXPERTS, options, dtype=F64)
        ours.load_state_dict(other.state_dict())
        own = ours.logits(x)
        assert torch.equal(own, logits)
        assert_same_bits(own, options, weights, experts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalize", [True, False])
def test_deepseek_v3_is_bit_equal_in_the_float32_it_forces(normalize, seed):
    made = config(
        "DeepseekV3Config",
        **{"n_routed_experts": 16, "n_group": 4, "topk_group": 2},
        **{"norm_topk_prob": normalize, "routed_scaling_factor": 2.5},
    )
    other, x = theirs("DeepseekV3Config", made, seed), drawn(64, 16, seed=20 + seed)
    other = other.float()
    options = RouterOptions(
        **{"top_k": 4, "score": "sigmoid", "normalize": normalize, "scale": 2.5},
        **{"num_groups": 4, "top_groups": 2, "group_top": 2},
    )
    logits, weights, experts = other(x)
    ours = Router(16, 16, options)
    with torch.no_grad():
        ours.weight.copy_(other.weight)
    assert torch.equal(ours.logits(x.float()), logits)
    assert_same_bits(logits, options, weights, experts, other.e_score_correction_bias)


def test_errors_say_what_is_wrong():
    with pytest.raises(TypeError, match=r"floating \[T, E\]"):
        route(torch.ones(4, 8, dtype=torch.int64), RouterOptions())
    with pytest.raises(ValueError, match="top_k=9 is more than the 8 experts"):
        route(torch.ones(4, 8), RouterOptions(top_k=9))
    with pytest.raises(ValueError, match="other tokens"):
        route(torch.ones(4, 8), RouterOptions(), experts=torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_k": 2.0}, TypeError, "top_k"),
        ({"score": "relu"}, ValueError, "score must be one of"),
        ({"dtype": torch.bfloat16}, ValueError, r"torch\.float32 or torch\.float64"),
        ({"jitter": 1.0}, ValueError, "jitter"),
        ({"scale": 0}, ValueError, "scale"),
        ({"scale": math.nan}, ValueError, "scale"),
        ({"sinkhorn": 3, "num_groups": 2}, ValueError, "sinkhorn=3 decides the choice alone"),
        ({"sinkhorn": -1}, ValueError, "sinkhorn must be at least 0"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, "is more than num_groups=2"),
        ({"num_groups": 4, "top_groups": 4}, ValueError, "set group_top"),
        ({"losses": {"auxiliary": 0.1}}, ValueError, "aux, sequence_aux"),
        ({"losses": {"z": math.inf}}, ValueError, "not finite"),
    ],
    ids=str,
)
def test_errors_of_options_say_what_is_wrong(fields, kind, words):
    with pytest.raises(kind, match=words):
        RouterOptions(**fields)


@pytest.mark.parametrize(
    "fields", [{}, {"normalize": False, "score": "softmax_of_chosen"}], ids=str
)
def test_one_expert_of_weight_1_is_for_inference_alone(fields):
    router = Router(4, 8, RouterOptions(top_k=1, **fields))
    found = router.eval()(torch.randn(3, 4))
    assert torch.equal(found.weights, torch.ones(3, 1))
    with pytest.raises(ValueError, match="router no gradient"):
        router.train()(torch.randn(3, 4))
    router.weight.requires_grad_(False)
    assert torch.equal(router(torch.randn(3, 4)).weights, torch.ones(3, 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_groups": 3}, "num_groups=3 does not divide the 8 experts"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 4, "group_top": 1}, "raise top_groups"),
        ({"num_groups": 4, "top_groups": 2, "group_top": 3}, "lower group_top"),
    ],
    ids=str,
)
def test_experts_that_do_not_fit_the_options_are_an_error(fields, words):
    with pytest.raises(ValueError, match=words):
        route(torch.ones(4, 8), RouterOptions(**fields))
