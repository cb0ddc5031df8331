"""States on the host, and their step there: the numbers, the copies, and what they cost."""

import copy
import errno
import os
import shutil
from itertools import chain, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data_parallel import shard
from mt_files import FileError
from mt_optim import (
    DistributedOptimizer,
    NamedOptimizer,
    OptimizerConfig,
    StateStorage,
    build_optimizer,
    is_hidden_matrix,
)
from mt_optim.rules.adamw import AdamWRule
from mt_optim.state import update as updating
from mt_optim.state.host import HostMemory, Mover, Traffic, choose_offloaded
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample
from torch import nn

STATE = ParallelState(ParallelLayout())
NAMES = ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap")


@given(st.lists(st.integers(0, 10**6), max_size=40), st.floats(0, 1))
@settings(max_examples=300)
def test_pieces_meet_the_share_up_to_half_of_the_smallest_left_out(numels, share):
    target = share * sum(numels)
    chosen = choose_offloaded(numels, target)
    assert chosen == sorted(set(chosen))
    rest = [numels[i] for i in range(len(numels)) if i not in chosen]
    missed = abs(sum(numels[i] for i in chosen) - target)
    assert missed <= min(rest, default=max(numels, default=0)) / 2 + 1e-6


def test_no_share_takes_nothing_and_the_whole_takes_all():
    assert choose_offloaded([3, 1, 2], 0) == []
    assert choose_offloaded([3, 1, 2], 6) == [0, 1, 2]


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 8)]
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, first=0, steps=10):
    for step in range(first, first + steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()


def build(model, **options):
    options = {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0, **options}
    return build_optimizer(model, OptimizerConfig(**options), STATE)


def assert_same(ours, theirs):
    for name in theirs.names:
        assert torch.equal(ours.shard(name).param, theirs.shard(name).param)
        assert torch.equal(ours.master(name), theirs.master(name))
        for key in theirs.moments(name):
            assert torch.equal(ours.moment(name, key), theirs.moment(name, key))


def offloaded(optimizer):
    pieces = [optimizer.shard(name) for name in optimizer.names]
    return [piece for piece in pieces if optimizer._storage.is_offloaded(piece)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("share", [0.45, 1.0])
def test_offloaded_steps_have_the_bits_of_plain_ones(name, dtype, share, monkeypatch):
    monkeypatch.setattr(updating, "_PORTION", 500)  # several portions, one of a single piece
    runs = []
    for offload in (0.0, share):
        model = make_model(dtype)
        optimizer = build(model, name=name, offload=offload)
        train(model, optimizer)
        runs.append(optimizer)
    assert_same(runs[1], runs[0])
    total = sum(p.numel() for p in model.parameters())
    held = sum(piece.param.numel() for piece in offloaded(runs[1]))
    assert held / total == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("moments", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("masters", ["full", "remainder"])
def test_states_in_fewer_bits_go_to_the_host_and_to_files_too(moments, masters, tmp_path):
    runs = []
    for options in ({}, {"offload": 0.5}, {"offload": 1.0, "offload_dir": tmp_path}):
        model = make_model(torch.bfloat16)
        optimizer = build(model, moments_dtype=moments, masters=masters, **options)
        train(model, optimizer)
        runs.append(optimizer)
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


class Spy(Mover):
    """A mover that notes its calls, and the places of the copies."""

    def __init__(self, device):
        super().__init__(device)
        self.calls, self.places = [], []

    def begin(self):
        super().begin()
        self.calls.append("begin")

    def fetch(self, turn, grads):
        super().fetch(turn, grads)
        self.calls.append(f"fetch {turn}")

    def fetched(self, turn):
        arrived = super().fetched(turn)
        self.calls.append(f"step {turn}")
        self.places += [grad.untyped_storage().data_ptr() for grad in arrived]
        return arrived

    def send(self, turn, params, masters):
        super().send(turn, params, masters)
        self.calls.append(f"send {turn}")

    def end(self):
        super().end()
        self.calls.append("end")


def test_copies_overlap_the_steps_and_go_to_other_memory(monkeypatch):
    monkeypatch.setattr(updating, "_PORTION", 300)
    model = make_model()
    optimizer = build(model, offload=1.0)
    spy = optimizer._storage._mover = Spy(torch.device("cpu"))
    stepped = []
    plain = updating._update
    monkeypatch.setattr(
        updating,
        "_update",
        lambda portion, grads, *rest: (stepped.append(grads), plain(portion, grads, *rest)),
    )
    train(model, optimizer, steps=1)
    portions = len(stepped)
    assert portions >= 3
    # The next portion's gradients are on their way before this one's are waited for.
    turns = [
        [*([f"fetch {n + 1}"] if n + 1 < portions else []), f"step {n}", f"send {n}"]
        for n in range(portions)
    ]
    assert spy.calls == ["begin", "fetch 0", *chain.from_iterable(turns), "end"]
    device = {p.untyped_storage().data_ptr() for p in model.parameters()}
    device |= {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    state = [t for own in optimizer.state.values() for key, t in own.items() if key != "step"]
    host = {tensor.untyped_storage().data_ptr() for tensor in state}
    assert len(set(spy.places)) == 2  # buffers that take turns
    assert not device & (set(spy.places) | host)
    assert len(host) == 3 * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_traffic_of_a_step_is_gradients_there_and_parameters_back(dtype, share):
    model = make_model(dtype)
    with shard(model, "none", group=None) as buffer:
        config = OptimizerConfig(lr=1e-2, offload=share)
        optimizer = DistributedOptimizer(buffer, lambda p: build_optimizer(p, config, STATE))
        assert optimizer.inner.offload_traffic == Traffic()
        for _ in range(2):
            buffer.start(1)
            model(torch.ones(4, 24, dtype=dtype)).square().mean().backward()
            buffer.finish()
            optimizer.step()
        numel = sum(piece.param.numel() for piece in offloaded(optimizer.inner))
        size = torch.finfo(dtype).bits // 8  # gradients are fp32 in a GradBuffer
        assert optimizer.inner.offload_traffic == Traffic(to_host=4 * numel, to_device=size * numel)
        assert (numel > 0) == (share > 0)


def test_a_missing_gradient_is_zero_and_travels_not():
    params = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b")}
    runs = []
    for share in (0.0, 1.0):
        own = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
        optimizer = build(own.items(), offload=share)
        own["a"].grad = torch.ones(4)
        optimizer.step()
        runs.append(optimizer)
    assert_same(runs[1], runs[0])
    assert runs[1].offload_traffic == Traffic(to_host=16, to_device=32)


@pytest.mark.parametrize("options", [{}, {"offload": 0.5}, {"masters": "remainder"}])
def test_states_leave_for_an_inference_phase_and_come_back(options):
    runs = []
    for leaves in (False, True):
        model = make_model(torch.bfloat16)
        optimizer = build(model, **options)
        train(model, optimizer, steps=3)
        if leaves:
            before = [t for state in optimizer.state.values() for t in state.values()]
            optimizer.offload_state()
            after = [t for state in optimizer.state.values() for t in state.values()]
            stayed = sum(t is own for t, own in zip(after, before, strict=True))
            assert stayed == 6 + 3 * len(offloaded(optimizer))  # the steps, and what was there
            with pytest.raises(RuntimeError, match=r"moved to the host; call restore_state\(\)"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="is on the host already"):
                optimizer.offload_state()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.restore_state()
            optimizer.load_state_dict(saved)
            with pytest.raises(RuntimeError, match="was not moved"):
                optimizer.restore_state()
        train(model, optimizer, first=3, steps=3)
        runs.append(optimizer)
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("pair", [(0.0, 1.0), (1.0, 0.0), (0.3, 0.8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_goes_on_with_any_share(pair, dtype):
    straight = make_model(dtype)
    optimizer = build(straight, offload=pair[0])
    train(straight, optimizer, steps=4)
    resumed = copy.deepcopy(straight)
    restored = build(resumed, offload=pair[1])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, which in ((straight, optimizer), (resumed, restored)):
        train(model, which, first=4, steps=4)
    assert_same(restored, optimizer)


def test_weights_that_were_loaded_into_the_model_reach_the_masters_on_the_host():
    model = make_model()
    optimizer = build(model, offload=1.0)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    optimizer.sync_masters()
    assert torch.equal(optimizer.master("0.weight"), torch.full((40, 24), 0.5))


@pytest.mark.parametrize("options", [{"offload": 0.5}, {"masters": "remainder"}])
def test_an_average_and_scaled_weights_are_the_same(options):
    runs = []
    for settings_ in ({}, options):
        model = make_model(torch.bfloat16)
        optimizer = build(model, ema=0.9, **settings_)
        optimizer.rescale = lambda: {"0.weight": torch.tensor(0.75), "2.bias": torch.tensor(1.5)}
        train(model, optimizer)
        runs.append(optimizer)
    assert_same(runs[1], runs[0])
    for name in runs[0].names:
        assert torch.equal(runs[1].ema.value(name), runs[0].ema.value(name))


def test_a_rate_for_a_graph_does_not_go_with_the_host():
    model = make_model()
    storage = StateStorage(offload=0.5)
    options = {"lr": torch.tensor(0.1), "weight_decay": 0.1, "storage": storage}
    optimizer = NamedOptimizer(model.named_parameters(), AdamWRule(), **options)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="lr is a tensor, for a step in a CUDA graph, and offload"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_copied_optimizer_steps_its_own_model():
    model = make_model()
    optimizer = build(model, offload=0.5)
    train(model, optimizer, steps=2)
    twin, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, first=2, steps=2)
    train(twin, copied, first=2, steps=2)
    assert_same(copied, optimizer)


def test_files_have_their_place_on_the_disk_and_no_name(tmp_path):
    tensor = torch.arange(3000, dtype=torch.float32).view(50, 60).t()
    made = HostMemory(tmp_path).copy(tensor)
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    assert list(tmp_path.iterdir()) == []
    with open("/proc/self/maps") as maps:
        assert sum("mt-optim-" in line for line in maps) == 1
    del made
    with open("/proc/self/maps") as maps:
        assert not any("mt-optim-" in line for line in maps)
    with pytest.raises(OSError, match="No such file or directory"):
        build(make_model(), offload=1.0, offload_dir=tmp_path / "none")


def test_a_folder_without_room_is_named_with_the_bytes_it_needs_and_has(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    model = make_model()
    masters = 4 * sum(param.numel() for param in model.parameters())
    with pytest.raises(FileError, match=f"{tmp_path}: offload_dir .* {masters} bytes.* 1000 bytes"):
        build(model, offload=1.0, offload_dir=tmp_path)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(
        FileError, match=r"offload_dir .* 16 bytes: No space .* 1000 bytes are free"
    ):
        HostMemory(tmp_path).copy(torch.zeros(4))
    assert list(tmp_path.iterdir()) == []


STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


def train_sharded(strategy, world, dtype, masters, share, name="adamw"):
    """Return the parameters, and how many elements of this rank are on the host and in all."""
    with ParallelState(ParallelLayout(dp=world)) as state:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([nn.Linear(24, 40), nn.Linear(40, 24)]), nn.Identity())
        model = model.to(dtype)
        model.forward = lambda x: model[0][1](model[0][0](x).tanh())
        whole = is_hidden_matrix if name == "muon" else None
        with shard(
            model, strategy, group=state.group("dp"), bucket_size=600, whole=whole
        ) as buffer:
            config = OptimizerConfig(name=name, lr=1e-2, masters=masters, offload=share)
            optimizer = DistributedOptimizer(buffer, lambda p: build_optimizer(p, config, state))
            for step in range(6):
                x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
                buffer.start(1)
                (model(x.chunk(world)[state.rank]).square().sum() / 8).backward()
                buffer.finish()
                optimizer.step()
                if step == 2:
                    optimizer.inner.offload_state()
                    optimizer.inner.restore_state()
            with buffer.gathered():
                params = {key: param.detach().clone() for key, param in model.named_parameters()}
            there = sum(piece.param.numel() for piece in offloaded(optimizer.inner))
            return params, there, sum(piece.param.numel() for piece in optimizer.shards)


@pytest.mark.parametrize(
    ("strategy", "world", "masters"),
    sample(product(STRATEGIES, (2, 4), ("full", "remainder")), every=3),
)
def test_every_strategy_offloads_without_a_change(ranks, strategy, world, masters):
    plain = ranks(world, train_sharded, strategy, world, torch.bfloat16, "full", 0.0)
    held = ranks(world, train_sharded, strategy, world, torch.bfloat16, masters, 0.6)
    for (expected, none, _), (params, there, total) in zip(plain, held, strict=True):
        assert none == 0
        assert total == 0 or 0.3 < there / total < 0.9
        assert all(torch.equal(params[key], expected[key]) for key in expected)


def test_muon_offloads_whole_matrices_on_two_ranks(ranks):
    args = ("optimizer", 2, torch.float32, "full")
    plain = ranks(2, train_sharded, *args, 0.0, "muon")
    held = ranks(2, train_sharded, *args, 1.0, "muon")
    for (expected, _, _), (params, there, total) in zip(plain, held, strict=True):
        assert there == total > 0
        assert all(torch.equal(params[key], expected[key]) for key in expected)


def test_settings_that_can_not_work_say_why(tmp_path):
    with pytest.raises(ValueError, match=r"offload is a share of the states, from 0 to 1; got 1.5"):
        OptimizerConfig(lr=1.0, offload=1.5)
    with pytest.raises(TypeError, match="offload must be a number, got True"):
        OptimizerConfig(lr=1.0, offload=True)
    with pytest.raises(ValueError, match=r"offload_dir is '.* and offload is 0, so nothing goes"):
        OptimizerConfig(lr=1.0, offload_dir=tmp_path)
    with pytest.raises(ValueError, match=r"offload 0.5 is not for classes of torch, and name is"):
        OptimizerConfig(lr=1.0, name="torch.optim.RAdam", offload=0.5)


def test_groups_that_come_later_keep_the_share():
    storage = StateStorage(offload=0.5)
    params = [(str(n), nn.Parameter(torch.ones(10))) for n in range(7)]
    options = {"lr": 0.1, "weight_decay": 0.1, "storage": storage}
    optimizer = NamedOptimizer(params[:1], AdamWRule(), **options)
    shares = []
    for number, (name, param) in enumerate(params[1:], start=2):
        optimizer.add_param_group({"params": [(name, param)]})
        shares.append(len(offloaded(optimizer)) / number)
    assert shares == pytest.approx([0.5, 1 / 3, 0.5, 0.4, 0.5, 3 / 7])
