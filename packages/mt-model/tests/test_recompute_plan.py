"""Plans of what layers make again in backward, and of what waits in the host's memory."""

import copy
from dataclasses import replace

import pytest
import torch
from mt_files import FieldError, SchemaError, build, to_plain
from mt_model import (
    GPT,
    KeptBytes,
    OffloadConfig,
    RecomputePlan,
    RecomputeRule,
    expected_bytes,
    gpt,
)
from mt_parallel_state import ParallelLayout, ParallelState
from routed import RoutedConfig

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "ffn_size": 32}
BATCH = {
    "tokens": torch.arange(32).view(2, 16),
    "labels": torch.arange(32).view(2, 16).roll(-1, 1),
    "sample_ids": torch.tensor([3, 5]),
}
EVERYTHING = OffloadConfig(min_bytes=0)
PLANS = {
    "first": RecomputePlan(rules=(RecomputeRule(first=2),)),
    "every": RecomputePlan(rules=(RecomputeRule(every=3), RecomputeRule(modules=("norm",)))),
    "attention": RecomputePlan(rules=(RecomputeRule(modules=("attention", "activation")),)),
    "modules": RecomputePlan(rules=(RecomputeRule(modules=("mixer", "feed_forward")),)),
    "glob": RecomputePlan(rules=(RecomputeRule(modules=("*_norm", "feed_forward.*")),)),
    "offload": RecomputePlan(offload=EVERYTHING),
    "mixed": RecomputePlan(
        rules=(RecomputeRule(layers=(0, 2)), RecomputeRule(modules=("attention",))),
        offload=replace(EVERYTHING, layers=(1, 2)),
    ),
}


def config_of(**options):
    config = gpt(**SIZES, dropout=0.1, attention_dropout=0.1, qk_norm="head", **options)
    routed = replace(config.layers[0], feed_forward=RoutedConfig(width=8))
    fed = replace(
        config.layers[0], feed_forward=replace(config.layers[0].feed_forward, dropout=0.2)
    )
    return replace(config, layers=(fed, *config.layers[1:3], routed))


def run(plan, state=None, layers=None, **options):
    """Losses, gradients by name, and what each layer keeps, through stages of these layers."""
    config, x, kept, values, grads = config_of(), None, {}, {}, {}
    for stage in layers or [range(4)]:
        model = GPT(config, state, layers=stage, recompute=plan, dtype=torch.float64, **options)
        with model.watch_activations() as counts:
            output = model(x, BATCH)
        x, losses = output if isinstance(output, tuple) else (output, {})
        if isinstance(x, dict):
            x, losses = None, x
        kept |= counts
        values |= losses
        grads |= dict(model.named_parameters())
    sum(value for name, value in values.items() if name != "tokens").backward()
    return values, {name: param.grad for name, param in grads.items()}, kept


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_changes_a_number(name):
    values, grads, _ = run("none")
    found, gradients, _ = run(PLANS[name])
    assert all(torch.equal(found[key], values[key]) for key in values)
    assert all(torch.equal(gradients[key], grads[key]) for key in grads)


@pytest.mark.parametrize("name", ["modules", "glob", "mixed"])
def test_no_plan_changes_a_number_on_two_ranks(ranks, name):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            for sp in (False, True):
                stages = [range(2), range(2, 4)]
                values, grads, _ = run("none", state, stages, sequence_parallel=sp)
                found, gradients, _ = run(PLANS[name], state, stages, sequence_parallel=sp)
                assert all(torch.equal(found[key], values[key]) for key in values)
                assert all(torch.equal(gradients[key], grads[key]) for key in grads)

    ranks(2, body)


def test_a_plan_keeps_what_it_says():
    stream = 2 * 16 * 16 * 8  # the residual stream of one layer, in bytes
    kept = {name: run(plan)[2] for name, plan in [("none", "none"), *PLANS.items()]}
    assert kept["first"][0] == kept["first"][1] == KeptBytes(device=stream)
    assert kept["first"][2] == kept["none"][2]
    assert kept["every"][3] == KeptBytes(device=stream)
    assert stream < kept["every"][1].device < kept["none"][1].device
    assert all(kept["modules"][i].device < 0.6 * kept["none"][i].device for i in range(3))
    assert kept["attention"][0].device < 0.6 * kept["none"][0].device
    for index, layer in kept["offload"].items():
        assert layer == KeptBytes(device=0, host=kept["none"][index].device)
    assert kept["mixed"][2] == KeptBytes(device=0, host=stream)
    large = RecomputePlan(offload=OffloadConfig(min_bytes=1 << 40))
    assert run(large)[2] == kept["none"]


def test_offloaded_memory_is_let_go_once_backward_has_read_it():
    config = config_of()
    model = GPT(config, recompute=PLANS["offload"], dtype=torch.float64)
    for _ in range(2):  # two passes before their backwards, as in a pipeline
        first, second = model(None, BATCH), model(None, BATCH)
        sum(first[name] for name in ("lm", "aux", "z")).backward()
        sum(second[name] for name in ("lm", "aux", "z")).backward()
    expected = run("none")[1]
    assert all(torch.allclose(p.grad, 4 * expected[n]) for n, p in model.named_parameters())


def test_a_copy_of_a_model_runs_its_own_modules_again():
    model = GPT(config_of(), recompute=PLANS["modules"], dtype=torch.float64)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    values, grads, _ = run("none")
    output = other(None, BATCH)
    sum(output[name] for name in ("lm", "aux", "z")).backward()
    assert torch.equal(output["lm"], values["lm"])
    assert all(torch.equal(p.grad, grads[n]) for n, p in other.named_parameters())


def test_a_pass_in_parts_follows_the_plan():
    model = GPT(config_of(), recompute=PLANS["mixed"], dtype=torch.float64)
    expected, state = model(None, BATCH), None
    parts = model.parts(BATCH)
    assert len(parts) == 2 + 1 + 1 + 1 + 2
    for part in parts:
        state = part(state)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    sum(state[name] for name in ("lm", "aux", "z")).backward()
    grads = run("none")[1]
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())


def test_plans_are_plain_values():
    plain = {"rules": [{"every": 2, "modules": ["mixer"]}], "offload": {"first": 3}}
    plan = build(RecomputePlan, plain)
    rule = RecomputeRule(every=2, modules=("mixer",))
    assert plan == RecomputePlan(rules=(rule,), offload=OffloadConfig(first=3))
    assert build(RecomputePlan, to_plain(plan)) == plan
    assert [plan.offloads(i) for i in range(5)] == [True, True, True, False, False]
    with pytest.raises(SchemaError, match=r"rules\[0\]\.first: does not go with layers; give one"):
        build(RecomputePlan, {"rules": [{"layers": [0], "first": 2}]})
    with pytest.raises(FieldError, match="layers: an empty list; name layers"):
        RecomputeRule(layers=())
    with pytest.raises(FieldError, match=r"layers: \[-1\]; use indices of 0 or more"):
        OffloadConfig(layers=(-1,))
    with pytest.raises(FieldError, match="modules: an empty list; give one or more of layer, norm"):
        RecomputeRule(modules=())


def test_plans_that_a_model_can_not_follow():
    config = config_of()
    with pytest.raises(FieldError, match="layers: 4 is no layer; the model has layers 0 to 3"):
        GPT(config, recompute=RecomputePlan(rules=(RecomputeRule(layers=(4,)),)))
    freed = RecomputePlan(rules=(RecomputeRule(modules=("norm",)),), offload=EVERYTHING)
    with pytest.raises(FieldError, match="offload: layer 0 frees its norm outputs"):
        GPT(config, recompute=freed)
    wrong = RecomputePlan(rules=(RecomputeRule(modules=("mixr",)),))
    with pytest.raises(ValueError, match=r"the module 'mixr', .* Did you mean mixer\?"):
        GPT(config, recompute=wrong)


def test_a_rule_may_name_modules_that_only_another_stage_has():
    routed = {name for name, _ in GPT(config_of(), layers=range(3, 4)).layers["3"].named_modules()}
    dense = {name for name, _ in GPT(config_of(), layers=range(1)).layers["0"].named_modules()}
    alone = min(routed - dense)
    plan = RecomputePlan(rules=(RecomputeRule(every=2), RecomputeRule(modules=(alone,))))
    losses, grads, kept = run(plan)
    in_stages = run(plan, layers=[range(2), range(2, 4)])
    assert (losses, kept) == (in_stages[0], in_stages[2])
    layers = {name: grad for name, grad in in_stages[1].items() if name.startswith("layers.")}
    assert all(torch.equal(grad, grads[name]) for name, grad in layers.items())


def expected_and_kept(name, state=None, **options):
    """What one rank's stages were expected to keep of three rows, and what they kept."""
    batch = {key: torch.cat([x, x[:1]]) for key, x in BATCH.items()}
    expected, kept, x = {}, {}, None
    for layers in (range(2), range(2, 4)):
        plan = PLANS.get(name, "none")
        model = GPT(config_of(), state, layers=layers, recompute=plan, **options)
        expected |= expected_bytes(model, batch)
        assert all(param.grad is None for param in model.parameters())
        with model.watch_activations() as counts:
            output = model(x, batch)
        x = output[0] if isinstance(output, tuple) else output
        kept |= counts
    return expected, kept


def assert_as_expected(expected, kept):
    assert expected.keys() == kept.keys() == set(range(4))
    for index, found in kept.items():
        assert expected[index].device == pytest.approx(found.device, rel=0.03)
        assert expected[index].host == pytest.approx(found.host, rel=0.03)


@pytest.mark.parametrize("name", ["none", *PLANS])
def test_layers_keep_what_one_row_lets_expect(name):
    assert_as_expected(*expected_and_kept(name))


def test_ranks_keep_what_one_row_lets_expect(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            assert_as_expected(*expected_and_kept("mixed", state, sequence_parallel=True))

    ranks(2, body)
