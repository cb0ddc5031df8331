import sys

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, grad_of
from mt_data_parallel.buffer import DEFAULT_BUCKET_SIZE
from torch import nn

MICROBATCHES = 3
ROWS = 4


class Net(nn.Module):
    """Three matrices, a shared one, and a side branch that only some micro-batches take."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8, dtype=dtype)
        self.hidden = nn.Linear(8, 8, dtype=dtype)
        self.side = nn.Linear(8, 8, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, tokens, *, branch):
        x = torch.tanh(self.hidden(self.embedding(tokens)))
        if branch:
            x = x + self.side(x)
        return (x @ self.embedding.weight.T).float().logsumexp(-1).sum()


def tokens_of(rank, microbatch):
    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    return torch.randint(11, (ROWS, 5), generator=generator)


def takes_branch(rank, microbatch):
    return (rank + microbatch) % 2 == 0


def backward(net, rank):
    for microbatch in range(MICROBATCHES):
        net(tokens_of(rank, microbatch), branch=takes_branch(rank, microbatch)).backward()


def buffered_grads(bucket_size, overlap, dtype=torch.float32):
    net = Net(dtype)
    group = dist.group.WORLD if dist.is_initialized() else None
    rank = dist.get_rank() if dist.is_initialized() else 0
    buffer = GradBuffer(
        net.named_parameters(),
        group=group,
        bucket_size=bucket_size,
        overlap=overlap,
        unused="zero",
    )
    for _ in range(2):  # the second round shows that start() forgets the first
        buffer.start(MICROBATCHES)
        backward(net, rank)
        buffer.finish()
    return {name: param.main_grad.clone() for name, param in net.named_parameters()}


def summed_grads(world_size, dtype=torch.float32, acc=torch.float64):
    """The oracle: one process, plain autograd, every gradient added in `acc`."""
    total = {name: torch.zeros_like(p, dtype=acc) for name, p in Net(dtype).named_parameters()}
    for rank in range(world_size):
        for microbatch in range(MICROBATCHES):
            net = Net(dtype)
            net(tokens_of(rank, microbatch), branch=takes_branch(rank, microbatch)).backward()
            for name, param in net.named_parameters():
                if param.grad is not None:
                    total[name] += param.grad.to(acc)
    return total


def assert_same(grads, other):
    assert grads.keys() == other.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, other[name]), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_the_sum_over_ranks_and_microbatches(ranks, world_size):
    expected = summed_grads(world_size)
    for grads in ranks(world_size, buffered_grads, 100, True):
        for name, grad in grads.items():
            torch.testing.assert_close(grad.double(), expected[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(grads["unused"], torch.zeros(3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_fp64_gradients_match_one_process_to_1e_minus_12(ranks, world_size):
    expected = summed_grads(world_size, torch.float64)
    for grads in ranks(world_size, buffered_grads, 100, True, torch.float64):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def test_bucket_size_and_overlap_do_not_change_a_bit_at_two_ranks(ranks):
    first = ranks(2, buffered_grads, None, False)
    assert_same(first[0], first[1])
    for bucket_size in (1, 100, None):
        for overlap in (True, False):
            for grads in ranks(2, buffered_grads, bucket_size, overlap):
                assert_same(grads, first[0])


def test_all_four_ranks_hold_the_same_bits(ranks):
    results = ranks(4, buffered_grads, 100, True)
    for grads in results[1:]:
        assert_same(grads, results[0])


def test_gradients_equal_those_of_torch_ddp_times_the_ranks(ranks):
    def body():
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        x = torch.randn(3, 8, dtype=torch.float64)
        torch.manual_seed(1)
        for param in net.parameters():
            nn.init.normal_(param)
        ddp = nn.parallel.DistributedDataParallel(net)
        ddp(x).square().sum().backward()
        expected = {name: 2 * p.grad.clone() for name, p in net.named_parameters()}
        net.zero_grad()
        with GradBuffer(net.named_parameters(), group=dist.group.WORLD, bucket_size=50) as buffer:
            buffer.start(1)
            net(x).square().sum().backward()
            buffer.finish()
            return expected, {name: p.main_grad.clone() for name, p in net.named_parameters()}

    for expected, grads in ranks(2, body):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def test_reduction_starts_inside_the_last_backward_and_only_with_overlap(ranks):
    def body(overlap):
        net = Net()
        buffer = GradBuffer(
            net.hidden.named_parameters(), group=dist.group.WORLD, bucket_size=1, overlap=overlap
        )
        seen = []
        launch = buffer._queue._launch
        buffer._queue._launch = lambda: (seen.append("launch"), launch())
        buffer.start(2)
        for index in range(2):
            net(tokens_of(dist.get_rank(), index), branch=False).backward()
            seen.append("backward")
        buffer.finish()
        return buffer.num_buckets, seen

    for count, seen in ranks(2, body, True):
        assert count == 2
        assert seen == ["backward", "launch", "launch", "backward"]
    for _, seen in ranks(2, body, False):
        assert seen == ["backward", "backward", "launch", "launch"]


def test_buckets_launch_in_one_order_though_ranks_are_ready_in_different_orders(ranks):
    def body():
        rank = dist.get_rank()
        params = {name: nn.Parameter(torch.ones(n)) for name, n in (("a", 5), ("b", 6), ("c", 7))}
        buffer = GradBuffer(params.items(), group=dist.group.WORLD, bucket_size=1, unused="zero")
        buffer.start(1)
        order = ["a", "b", "c"] if rank == 0 else ["c", "a"]  # rank 1 never sees b
        for name in order:
            (params[name] * (rank + 1)).sum().backward()
        buffer.finish()
        return {name: param.main_grad.tolist() for name, param in params.items()}

    for grads in ranks(2, body):
        assert grads == {"a": [3.0] * 5, "b": [1.0] * 6, "c": [3.0] * 7}


def test_one_rank_accumulates_exactly_what_autograd_does():
    plain = Net()
    backward(plain, 0)
    grads = buffered_grads(100, overlap=True)
    for name, param in plain.named_parameters():
        expected = torch.zeros(3) if param.grad is None else param.grad
        assert torch.equal(grads[name], expected), name


def test_bf16_parameters_accumulate_in_fp32():
    grads = buffered_grads(100, overlap=True, dtype=torch.bfloat16)
    expected = summed_grads(1, torch.bfloat16, acc=torch.float32)
    assert_same(grads, expected)


def test_fp64_and_bf16_parameters_get_a_buffer_each():
    params = {
        "a": nn.Parameter(torch.ones(4, dtype=torch.float64)),
        "b": nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        "c": nn.Parameter(torch.ones(4, dtype=torch.float64)),
    }
    buffer = GradBuffer(params.items(), group=None)
    assert {
        key.grad_dtype: [p.name for p in layout.params] for key, layout in buffer.layouts.items()
    } == {
        torch.float64: ["c", "a"],
        torch.float32: ["b"],
    }
    assert params["b"].main_grad.dtype == torch.float32
    buffer.close()
    lean = GradBuffer(params.items(), group=None, grad_dtype=torch.bfloat16)
    assert lean.num_buckets == 1
    assert params["a"].main_grad.dtype == torch.bfloat16


def test_views_share_one_flat_buffer_in_reversed_order():
    net = Net()
    buffer = GradBuffer(net.named_parameters(), group=None, unused="zero")
    storages = {p.main_grad.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(storages) == 1
    offsets = [p.main_grad.storage_offset() for p in net.parameters()]
    assert offsets == sorted(offsets, reverse=True)
    assert buffer.num_buckets == 1
    assert DEFAULT_BUCKET_SIZE * 4 == 25 * 2**20


def test_after_finish_param_grad_is_the_buffer_where_dtypes_agree():
    for dtype in (torch.float32, torch.bfloat16):
        net = Net(dtype)
        with GradBuffer(net.named_parameters(), group=None, unused="zero") as buffer:
            buffer.start(MICROBATCHES)
            backward(net, 0)
            assert net.hidden.weight.grad is None
            buffer.finish()
            if dtype == torch.float32:
                assert net.hidden.weight.grad is net.hidden.weight.main_grad
            else:
                assert net.hidden.weight.grad is None
            assert grad_of(net.hidden.weight) is net.hidden.weight.main_grad


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_double_backward_does_not_count_the_gradient_twice():
    param = nn.Parameter(torch.tensor([2.0, 3.0]))
    buffer = GradBuffer([("w", param)], group=None)
    buffer.start(2)
    for _ in range(2):
        param.pow(3).sum().backward(create_graph=True)
    buffer.finish()
    assert param.main_grad.tolist() == [24.0, 54.0]
    assert not param.main_grad.requires_grad


def test_frozen_parameters_are_left_out():
    net = Net()
    net.side.requires_grad_(False)
    buffer = GradBuffer(net.named_parameters(), group=None, unused="zero")
    assert not hasattr(net.side.weight, "main_grad")
    names = [p.name for layout in buffer.layouts.values() for p in layout.params]
    assert names == ["hidden.bias", "hidden.weight", "embedding.weight", "unused"]


def test_close_removes_hooks_and_attributes():
    net = Net()
    buffer = GradBuffer(net.named_parameters(), group=None, unused="zero")
    buffer.close()
    assert not hasattr(net.hidden.weight, "main_grad")
    net(tokens_of(0, 0), branch=True).backward()
    assert net.hidden.weight.grad is not None
    assert grad_of(net.hidden.weight) is net.hidden.weight.grad
    GradBuffer(net.named_parameters(), group=None, unused="zero").close()


def test_close_lets_go_of_the_group(ranks):
    def body():
        group, net = dist.group.WORLD, Net()
        before = sys.getrefcount(group)
        buffer = GradBuffer(net.named_parameters(), group=group, unused="zero")
        buffer.start(1)
        net(tokens_of(0, 0), branch=True).backward()
        buffer.finish()
        held = sys.getrefcount(group)
        buffer.close()
        return held - before, sys.getrefcount(group) - before

    assert ranks(2, body) == [(1, 0)] * 2


def test_calls_out_of_order_are_errors_that_say_what_to_call():
    net = Net()
    buffer = GradBuffer(net.named_parameters(), group=None, unused="zero")
    with pytest.raises(RuntimeError, match=r"finish\(\) without start\(\); call start"):
        buffer.finish()
    with pytest.raises(RuntimeError, match=r"outside of start\(\) and finish\(\)"):
        net(tokens_of(0, 0), branch=True).backward()
    buffer.start(1)
    with pytest.raises(RuntimeError, match=r"start\(\) was called twice; call finish\(\)"):
        buffer.start(1)
    net(tokens_of(0, 0), branch=True).backward()
    with pytest.raises(RuntimeError, match="got more than 1 gradients"):
        net(tokens_of(0, 0), branch=True).backward()
    buffer.finish()
    with pytest.raises(ValueError, match="num_backwards must be at least 1, got 0"):
        buffer.start(0)
    buffer.close()
    with pytest.raises(RuntimeError, match=r"start\(\) after close\(\)"):
        buffer.start(1)


def test_bad_parameters_and_arguments_are_named():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="'b' is listed twice, also as 'a'"):
        GradBuffer([("a", weight), ("b", weight)], group=None)
    with pytest.raises(ValueError, match="'a' is listed twice; names must be unique"):
        GradBuffer([("a", weight), ("a", nn.Parameter(torch.ones(2)))], group=None)
    meta = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"lie on \['cpu', 'meta'\]"):
        GradBuffer([("a", weight), ("b", meta)], group=None)
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int32"):
        GradBuffer([("a", weight)], group=None, grad_dtype=torch.int32)
    GradBuffer([("a", weight)], group=None)
    with pytest.raises(ValueError, match=r"'a' already belongs to a GradBuffer; close\(\)"):
        GradBuffer([("a", weight)], group=None)


def test_parameters_may_expect_different_numbers_of_backwards() -> None:
    """Two pipeline stages of a rank that share a parameter give it two gradients a micro-batch."""
    shared, own = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    named = {"shared": shared.weight, "own": own.weight}
    with GradBuffer(named.items(), group=None, bucket_size=1) as buffer:
        buffer.start({"shared": 2, "own": 1})
        x = torch.ones(1, 2)
        shared(x).sum().backward()
        (shared(x) + own(x)).sum().backward()
        buffer.finish()
        assert shared.weight.main_grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert own.weight.main_grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        with pytest.raises(ValueError, match="num_backwards has no entry for 'own'"):
            buffer.start({"shared": 2})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sink_sums_what_autograd_would(dtype):
    torch.manual_seed(0)
    by_hand, by_autograd = nn.Linear(3, 2, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
    by_autograd.load_state_dict(by_hand.state_dict())
    inputs = [torch.randn(4, 3, dtype=dtype) for _ in range(3)]
    with (
        GradBuffer(by_hand.named_parameters(), group=None) as ours,
        GradBuffer(by_autograd.named_parameters(), group=None) as theirs,
    ):
        sink = ours.sink(by_hand.weight)
        for _ in range(2):  # the second round replaces the first's sums
            ours.start(3)
            theirs.start(3)
            for x in inputs:
                by_autograd(x).sum().backward()
                (x @ by_hand.weight.detach().T + by_hand.bias).sum().backward()
                grad = torch.ones(4, 2, dtype=dtype).T @ x
                out, accumulate = sink.begin()
                out.add_(grad) if accumulate else out.copy_(grad)
                sink.end()
            ours.finish()
            theirs.finish()
        for mine, expected in zip(by_hand.parameters(), by_autograd.parameters(), strict=True):
            assert torch.equal(mine.main_grad, expected.main_grad)


def test_a_sink_launches_buckets_and_counts():
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with GradBuffer([("w", weight), ("b", bias)], group=None, unused="zero") as buffer:
        sink = buffer.sink(weight)
        with pytest.raises(RuntimeError, match=r"gradient for 'w' outside of start\(\)"):
            sink.begin()
        buffer.start(1)
        out, accumulate = sink.begin()
        assert not accumulate
        out.fill_(3)
        sink.end()
        with pytest.raises(RuntimeError, match="'w' got more than 1 gradients"):
            sink.begin()
        buffer.finish()
        assert weight.grad.tolist() == [3, 3]
        assert bias.grad.tolist() == [0, 0]
        with pytest.raises(ValueError, match=r"no such parameter \(of shape \(5,\).*2 trained"):
            buffer.sink(nn.Parameter(torch.ones(5)))


def test_ranks_with_other_layouts_are_refused_before_anything_is_summed(ranks):
    def start(kind):
        rank = dist.get_rank()
        names = ["a", "b"][:: -1 if kind == "order" and rank else 1]
        size = 3 if kind == "size" and rank else 2
        params = [(name, nn.Parameter(torch.ones(size))) for name in names]
        buffer = GradBuffer(params, group=dist.group.WORLD)
        if kind == "same":
            buffer.start(1)
            return
        with pytest.raises(ValueError, match=rf"ranks \[{1 - rank}\] of the group have other"):
            buffer.start(1)

    for kind in ("order", "size", "same"):
        ranks(2, start, kind)


def test_what_cannot_be_summed_densely_is_named():
    with pytest.raises(TypeError, match="'w' is complex"):
        GradBuffer([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))], group=None)
    embedding = nn.Embedding(5, 2, sparse=True)
    buffer = GradBuffer(embedding.named_parameters(), group=None)
    buffer.start(1)
    with pytest.raises(TypeError, match="'weight' got a sparse gradient"):
        embedding(torch.tensor([1])).sum().backward()


def test_a_parameter_without_elements_is_left_out():
    empty, full = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2))
    buffer = GradBuffer([("empty", empty), ("full", full)], group=None)
    buffer.start(1)
    (empty.sum() + full.sum()).backward()
    buffer.finish()
    assert grad_of(full).tolist() == [1, 1]
    assert grad_of(empty).shape == (0, 3)
