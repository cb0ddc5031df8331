"""bf16 masters of 16 bits and a flag: every fp32 number comes back, and every run is the same."""

import copy

import pytest
import torch
from mt_optim import OptimizerConfig, build_optimizer
from mt_optim.state.remainder import join, split
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_every_bf16_number_with_every_case_of_rounding_comes_back():
    """The lower half: exact, one off, just below, at and above the middle, and just below carry."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).unsqueeze(1) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    master = (high + low).flatten().view(torch.float32)
    param, distance, ties = split(master)
    assert (distance.dtype, ties.dtype) == (torch.int16, torch.uint8)
    assert ties.numel() == master.numel() // 8
    number = ~master.isnan()
    assert torch.equal(param[number], master.bfloat16()[number])
    back = join(param, distance, ties)
    assert same_bits(back[number], master[number])
    assert back[~number].isnan().all()
    assert number.sum() == 2**16 * 6 - 2 * (128 * 6 - 1)  # all but NaN: 5 of 6 of two infinities
    carried = param.view(torch.int16) != (master.view(torch.int32) >> 16).to(torch.int16)
    assert carried[number].float().mean() == pytest.approx(5 / 12, abs=0.01)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (64, 33)])
def test_numbers_of_any_bits_and_shape_come_back(shape):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
        master = bits.to(torch.int32).view(torch.float32)
        master = torch.where(master.isnan(), 1.0, master)
        assert same_bits(join(*split(master)), master)


def test_a_number_halfway_above_an_even_one_needs_the_flag():
    even, odd = 1 + 2**-8, 1 + 3 * 2**-8  # halfway to the next, above bf16 numbers even and odd
    param, distance, ties = split(torch.tensor([even, odd]))
    assert param.tolist() == [1.0, 1 + 2**-6]
    assert distance.tolist() == [-(2**15), -(2**15)]
    assert ties.tolist() == [0b01]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 17)).bfloat16()


def train(model, optimizer, first=0, steps=10):
    for step in range(first, first + steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.bfloat16()).square().mean().backward()
        optimizer.step()


def build(model, masters="remainder", **options):
    return build_optimizer(model, OptimizerConfig(masters=masters, **options), STATE)


def assert_same(ours, theirs):
    for name in theirs.names:
        assert same_bits(ours.master(name), theirs.master(name))
        for key in theirs.moments(name):
            assert torch.equal(ours.moment(name, key), theirs.moment(name, key))
    pairs = zip(ours.names, theirs.names, strict=True)
    assert all(torch.equal(ours.shard(a).param, theirs.shard(b).param) for a, b in pairs)


RULES = ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap")
CASES = [(name, moments) for name in RULES for moments in ("full", "bf16", "fp8")]


@pytest.mark.parametrize(("name", "moments"), [*CASES, ("torch.optim.RAdam", "full")])
def test_a_run_has_the_bits_of_one_with_full_masters(name, moments):
    runs = []
    for masters in ("full", "remainder"):
        model = make_model()
        options = {"lr": 1e-2, "weight_decay": 0.1, "moments_dtype": moments}
        optimizer = build(model, masters, name=name, **options)
        train(model, optimizer)
        runs.append(optimizer)
    assert_same(runs[1], runs[0])
    assert not any("master" in state for state in runs[1].state.values())


def test_steps_onto_the_middle_between_two_numbers_are_kept_too():
    """Below 256 the spacing of bf16 is one: every fourth step of an eighth is a half."""
    runs = []
    for masters in ("full", "remainder"):
        param = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
        optimizer = build([("w", param)], masters, name="sgd", momentum=0.0, lr=0.125)
        seen = []
        for _ in range(40):
            param.grad = torch.ones_like(param)
            optimizer.step()
            seen.append((optimizer.master("w")[0, 0].item(), param[0, 0].item()))
        runs.append(seen)
    assert runs[0] == runs[1]
    assert runs[1][3] == (255.5, 256.0)
    assert runs[1][11] == (254.5, 254.0)


def test_seventeen_bits_take_the_place_of_thirty_two():
    size = {}
    for masters in ("full", "remainder"):
        optimizer = build(make_model(), masters, lr=1.0)
        state = optimizer.state[optimizer.shard("0.weight").param]
        kept = (state[key] for key in state if key not in ("step", "exp_avg", "exp_avg_sq"))
        size[masters] = sum(tensor.numel() * tensor.element_size() for tensor in kept) / 960
    assert size == {"full": 4, "remainder": 2.125}


@pytest.mark.parametrize("pair", [("full", "remainder"), ("remainder", "full")])
@pytest.mark.parametrize("by", ["state dict", "masters"])
def test_a_run_goes_on_with_the_other_kind_of_masters(pair, by):
    straight = make_model()
    optimizer = build(straight, pair[0], lr=1e-2)
    train(straight, optimizer, steps=5)
    resumed = make_model()  # its weights are the initial ones: they come with the masters
    restored = build(resumed, pair[1], lr=1e-2)
    if by == "state dict":
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        for name in optimizer.names:
            restored.set_master(name, optimizer.master(name))
            for key in optimizer.moments(name):
                restored.set_moment(name, key, optimizer.moment(name, key))
        restored.step_count = optimizer.step_count
        restored.sync_params()
    for model, which in ((straight, optimizer), (resumed, restored)):
        train(model, which, first=5, steps=5)
    assert_same(restored, optimizer)


def test_masters_are_taken_from_weights_that_were_loaded_into_the_model():
    model = make_model()
    optimizer = build(model, lr=1e-2)
    train(model, optimizer, steps=3)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.sync_masters()
    assert torch.equal(optimizer.master("0.weight"), torch.full((40, 24), 0.5))
    assert same_bits(optimizer.master("2.weight"), model[2].weight.detach().float())


def test_what_can_not_work_says_why():
    with pytest.raises(ValueError, match="masters must be one of full, remainder; got 'fp16'"):
        OptimizerConfig(lr=1.0, masters="fp16")
    message = r"parameter '0.weight': masters 'remainder' is for bf16, and it is torch.float32; use"
    with pytest.raises(ValueError, match=message):
        build(make_model().float(), lr=1.0)
    optimizer = build(make_model(), lr=1.0)
    with pytest.raises(
        ValueError, match=r"the master of parameter '0.bias' has shape \(40,\), got"
    ):
        optimizer.set_master("0.bias", torch.zeros(2))
