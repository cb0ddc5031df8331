"""A bridge between two layouts against the two modules on one rank."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import ParallelLayout
from mt_pipeline import Bridge, Executor, Move, TensorSpec, batch_boxes, layout_boxes, plan_moves
from mt_schedule import Op, make_schedule
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:mt_pipeline.Bridge is experimental")
SEQUENCE, WIDTH = 3, 4


def box(*ends):
    return tuple(range(start, stop) for start, stop in ends)


def test_fan_out_sends_each_part_of_the_batch_to_its_rank():
    moves = plan_moves(batch_boxes(6, [[0], [1]]), batch_boxes(6, [[2], [3], [4]]))
    assert moves == (
        Move(source=0, destination=2, box=box((0, 2))),
        Move(source=0, destination=3, box=box((2, 3))),
        Move(source=1, destination=3, box=box((3, 4))),
        Move(source=1, destination=4, box=box((4, 6))),
    )


def test_copies_take_turns_and_a_rank_on_both_sides_keeps_its_own():
    copies = plan_moves(batch_boxes(4, [[0, 1]]), batch_boxes(4, [[2, 3, 4, 5]]))
    assert [(m.source, m.destination) for m in copies] == [(0, 2), (0, 4), (1, 3), (1, 5)]
    own = plan_moves(batch_boxes(4, [[0, 1]]), batch_boxes(4, [[1, 2]]))
    assert [(m.source, m.destination) for m in own] == [(0, 2), (1, 1)]


def test_a_layout_shares_the_batch_over_its_data_parallel_axis():
    layout = ParallelLayout(tp=2, dp=2, pp=2)
    assert layout_boxes(5, layout, stage=1, first_rank=10) == {
        14: box((0, 3)),
        15: box((0, 3)),
        16: box((3, 5)),
        17: box((3, 5)),
    }


cuts = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def sides(draw):
    """Two ways to cut the same rows x positions, with copies, on ranks that may be on both."""
    rows, positions = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    result = []
    for _ in range(2):
        boxes, ranks = {}, iter(draw(st.permutations(range(18))))
        for dims in itertools.product(
            *(cut_up(draw(st.integers(1, min(3, size))), size) for size in (rows, positions))
        ):
            for _ in range(draw(st.integers(1, 2))):
                boxes[next(ranks)] = dims
        result.append(boxes)
    return rows, positions, *result


def cut_up(parts, size):
    return [b[0] for b in batch_boxes(size, [[r] for r in range(parts)]).values()]


@settings(max_examples=60, deadline=None)
@given(sides())
def test_every_index_that_is_needed_comes_from_one_holder(case):
    _, _, source, destination = case
    moves = plan_moves(source, destination)
    for rank, needed in destination.items():
        found = [
            index
            for move in moves
            if move.destination == rank
            for index in itertools.product(*move.box)
        ]
        assert sorted(found) == sorted(itertools.product(*needed))
    for move in moves:
        assert all(
            set(m) <= set(held) for m, held in zip(move.box, source[move.source], strict=True)
        )
        assert (
            move.source == move.destination or source.get(move.destination) != source[move.source]
        )


def test_a_bridge_that_cannot_be_says_why():
    with pytest.raises(ValueError, match=r"rank 1 is in two places of \[\[0, 1\], \[1\]\]"):
        batch_boxes(4, [[0, 1], [1]])
    with pytest.raises(
        ValueError, match=r"ranks \[0\] hold 0\.\.3 and ranks \[1\] hold 2\.\.4, which overlap"
    ):
        plan_moves({0: box((0, 3)), 1: box((2, 4))}, {2: box((0, 4))})
    with pytest.raises(ValueError, match=r"rank 2 needs 0\.\.4 x 0\.\.2, but .* hold 6 of its 8"):
        plan_moves({0: box((0, 3), (0, 2))}, {2: box((0, 4), (0, 2))})
    with pytest.raises(ValueError, match="boxes differ in their number of dims"):
        plan_moves({0: box((0, 3))}, {2: box((0, 3), (0, 2))})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: batch_boxes(4, []), ValueError, "copies is empty"),
        (lambda: batch_boxes(-1, [[0]]), ValueError, "rows is -1: expected a whole number"),
        (lambda: batch_boxes(4, None), ValueError, "copies is empty"),
        (lambda: layout_boxes(4, None), TypeError, "layout must be a ParallelLayout, got None"),
        (lambda: layout_boxes(4, ParallelLayout(pp=2), stage=99), ValueError, r"stages 0\.\.1"),
        (lambda: layout_boxes(4, ParallelLayout(), first_rank=-1), ValueError, "first_rank is -1"),
        (lambda: plan_moves({}, {}), ValueError, "there is no source box"),
        (
            lambda: Bridge({0: box((0, 4))}, {1: box((0, 4))}, group=None),
            ValueError,
            r"rank 1 has a box, but the group has ranks 0\.\.0",
        ),
    ],
)
def test_what_cannot_be_a_side_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_ranks_without_a_transfer_meet_the_others_before_the_first_batch(ranks):
    """NCCL may make a group's communicator in its first batch, which then needs every rank."""

    def body():
        calls = []
        reduce, batch = dist.all_reduce, dist.batch_isend_irecv
        dist.all_reduce = lambda *a, **k: (calls.append("meet"), reduce(*a, **k))[1]
        dist.batch_isend_irecv = lambda *a, **k: (calls.append("batch"), batch(*a, **k))[1]
        try:
            bridge = Bridge({0: box((0, 4))}, {1: box((0, 4))}, group=dist.group.WORLD)
            spec = TensorSpec((4,), torch.float32)
            if dist.get_rank() < 2:
                x = torch.arange(4.0) if dist.get_rank() == 0 else None
                y = bridge.forward(x, spec)
                assert y is None or torch.equal(y.detach(), torch.arange(4.0))
        finally:
            dist.all_reduce, dist.batch_isend_irecv = reduce, batch
        return calls

    assert ranks(3, body) == [["meet", "batch"], ["meet", "batch"], ["meet"]]


def test_one_rank_may_be_both_sides():
    bridge = Bridge({0: box((0, 4))}, {0: box((0, 4))}, group=None)
    spec = TensorSpec((4,), torch.float32)
    assert torch.equal(bridge.forward(torch.arange(4.0), spec).detach(), torch.arange(4.0))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Decoder(Encoder):
    def forward(self, x):
        return (self.layer(x).square() * torch.arange(SEQUENCE)[:, None]).sum()


def data(step, rows):
    torch.manual_seed(step)
    return torch.randn(rows, SEQUENCE, WIDTH, dtype=torch.float64)


def one_rank(rows):
    encoder, decoder = Encoder(), Decoder()
    for step in range(2):
        decoder(encoder(data(step, rows))).backward()
    return encoder.layer.weight.grad, decoder.layer.weight.grad


LAYOUTS = {
    "fan out": ([[0], [1]], [[2], [3], [4], [5]]),
    "fan in": ([[0], [1], [2], [3]], [[4]]),
    "uneven": ([[0], [1]], [[2], [3], [4]]),
    "copies": ([[0, 1], [2, 3]], [[4, 5]]),
    "shared ranks": ([[0], [1], [2]], [[2, 1], [3, 0]]),
    "same ranks": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_encoder_and_a_decoder_in_their_own_layouts_train_as_on_one_rank(ranks, name):
    one, other = LAYOUTS[name]
    rows = 8
    world = 1 + max(itertools.chain.from_iterable([*one, *other]))

    def body():
        rank = dist.get_rank()
        source, destination = batch_boxes(rows, one), batch_boxes(rows, other)
        bridge = Bridge(source, destination, group=dist.group.WORLD)
        encoder, decoder = Encoder(), Decoder()
        spec = TensorSpec((rows, SEQUENCE, WIDTH), torch.float64)
        for step in range(2):
            x = encoder(data(step, rows)[list(source[rank][0])]) if rank in source else None
            y = bridge.forward(x, spec)
            assert (y is None) == (rank not in destination)
            if y is not None:
                decoder(y).backward()
            grad = bridge.backward(None if y is None else y.grad, spec)
            assert (grad is None) == (rank not in source)
            if x is not None:
                x.backward(grad)
        gradients = []
        for module, copies in ((encoder, one), (decoder, other)):
            grad = module.layer.weight.grad
            grad = torch.zeros(WIDTH, WIDTH).double() if grad is None else grad
            # Of each part of the batch one copy counts.
            mine = any(rank == part[-1] for part in copies)
            total = grad * mine
            dist.all_reduce(total)
            gradients.append(total)
        return gradients

    expected = one_rank(rows)
    for result in ranks(world, body):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_boxes_may_cut_the_sequence_too_and_moves_may_overlap_work(ranks):
    def body():
        rank = dist.get_rank()
        whole = torch.arange(4 * 6 * 2, dtype=torch.float64).view(4, 6, 2)
        source = {r: box((0, 4), (3 * r, 3 * r + 3)) for r in (0, 1)}  # sequence parallel
        destination = {r: box((2 * (r - 2), 2 * (r - 2) + 2), (0, 6)) for r in (2, 3)}
        bridge = Bridge(source, destination, group=dist.group.WORLD)
        spec = TensorSpec((4, 6, 2), torch.float64)
        mine = whole[:, 3 * rank : 3 * rank + 3] if rank in source else None
        moving = [bridge.start(None if mine is None else mine * k, spec) for k in (1, 2)]
        results = [wait() for wait in moving]
        if rank in destination:
            for k, y in zip((1, 2), results, strict=True):
                assert torch.equal(y, whole[2 * (rank - 2) : 2 * (rank - 2) + 2] * k)
        back = bridge.backward(results[0], spec)
        assert back is None if mine is None else torch.equal(back, mine)
        if rank == 0:
            with pytest.raises(
                ValueError,
                match=r"^rank 0 gave \(1, 3, 2\) float64 .* its box is \(4, 3, 2\) float64$",
            ):
                bridge.forward(mine[:1], spec)

    ranks(4, body)


def four_layers():
    torch.manual_seed(1)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def four_layers_on_one_rank(rows, number, loss):
    layers = four_layers()
    for i in range(number):
        y = data(i, rows)
        for layer in layers:
            y = torch.tanh(layer(y))
        loss(y, i).backward()
    return [layer.weight.grad for layer in layers]


def test_a_bridge_joins_a_pipelined_encoder_and_a_pipelined_decoder(ranks):
    """Ranks 0 and 1 are the encoder's pipeline, ranks 2 and 3 the decoder's."""
    rows, number = 4, 3
    spec = TensorSpec((rows, SEQUENCE, WIDTH), torch.float64)

    def loss(y, i):
        return (y * data(10 + i, rows)).sum()

    def encode(bridge, stage, group, at):
        """All forwards, each sent over when it is there; then the gradients are waited for."""
        schedule = make_schedule("gpipe", 2, number)

        def send(y, i):
            bridge.forward(y, spec)
            return lambda: bridge.backward(None, spec)

        executor = Executor(schedule, stage, group=group, activation=lambda i: spec)
        executor.run(list(range(number)), objective=send)

    def decode(bridge, stage, group, at):
        received = [bridge.forward(None, spec) for _ in range(number)] if at == 0 else []
        Executor(
            make_schedule("1f1b", 2, number),
            lambda x, i: stage(received[i] if x is None else x, i),
            group=group,
            activation=lambda i: spec,
        ).run(list(range(number)), objective=loss)
        for i in backwards if received else []:  # as the encoder asks for them
            bridge.backward(received[i].grad, spec)

    order = make_schedule("gpipe", 2, number).ranks[1]
    backwards = [action.microbatch for action in order if action.op is Op.B]

    def body():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        bridge = Bridge(batch_boxes(rows, [[1]]), batch_boxes(rows, [[2]]), group=dist.group.WORLD)
        layer = four_layers()[rank]

        def stage(x, i):
            return torch.tanh(layer(data(i, rows) if x is None else x))

        (encode if rank < 2 else decode)(bridge, stage, groups[rank // 2], rank % 2)
        return layer.weight.grad

    expected = four_layers_on_one_rank(rows, number, loss)
    for ours, theirs in zip(ranks(4, body), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
