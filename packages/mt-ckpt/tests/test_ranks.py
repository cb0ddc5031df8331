import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    latest_checkpoint,
    load_checkpoint,
    param_shards,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.stored import packing
from mt_parallel_state import ParallelLayout, PartitionSpec, shard_param, sharding_of
from mt_testing import KillAt, expect_kill

# name -> (global shape, spec, pipeline stages that hold it as owner, stages that hold a copy)
MODEL = {
    "embedding.weight": ((8, 4), PartitionSpec("tp"), 0, -1),
    "layers.0.qkv": ((8, 3, 2, 4), PartitionSpec("tp"), 0, None),
    "layers.0.norm": ((4,), PartitionSpec(), 0, None),
    "layers.1.mlp": ((2, 8, 4), PartitionSpec(None, "tp"), -1, None),
    "layers.1.experts": ((4, 8, 4), PartitionSpec("ep", "etp"), -1, None),
    "layers.1.router": ((4, 4), PartitionSpec(), -1, None),
    "final_norm.bias": ((), PartitionSpec(), -1, None),
}


def whole(name, scale=1.0):
    shape = MODEL[name][0]
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32).reshape(shape) + len(name)) * scale


def local_params(layout, rank, *, filled=True):
    """The parameters of one rank, cut by hand from the whole tensors."""
    coords = layout.coordinates(rank)
    params = {}
    for name, (shape, spec, owner, copy) in MODEL.items():
        is_owner = coords["pp"] == owner % layout.pp
        is_copy = copy is not None and not is_owner and coords["pp"] == copy % layout.pp
        if is_owner or is_copy:
            values = whole(name)
            for dim, axes in enumerate(spec.dims):
                for axis in axes:
                    values = values.chunk(layout.size(axis), dim)[coords[axis]]
            param = torch.nn.Parameter(values.clone() if filled else torch.zeros_like(values))
            assert param.shape == spec.local_shape(shape, layout)
            params[name] = shard_param(param, spec, is_copy=is_copy)
    return params


def all_shards(layout, rank, *, filled=True):
    params = local_params(layout, rank, filled=filled)
    moments = {name: param.detach() * (3 if filled else 0) for name, param in params.items()}
    return (
        params,
        moments,
        [
            *param_shards(params.items(), layout, rank, prefix="model"),
            *param_shards(moments.items(), layout, rank, prefix="optimizer/exp_avg", params=params),
        ],
    )


def assert_loads(path, layout, rank, group=None, ignore=()):
    params, moments, shards = all_shards(layout, rank, filled=False)
    assert load_checkpoint(path, shards, group=group, ignore=ignore) == {"tag": 1}
    for name, expected in local_params(layout, rank).items():
        assert torch.equal(params[name], expected)
        assert torch.equal(moments[name], expected * 3)


LAYOUTS = st.builds(
    lambda tp, dp, pp, cp, expert, order: ParallelLayout(
        tp=tp, dp=dp, pp=pp, cp=cp, ep=expert[0] if tp * cp * dp >= 2 else 1, order=order
    ),
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    expert=st.sampled_from([(1,), (2,)]),
    order=st.sampled_from(["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp"]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(saved=LAYOUTS, loaded=LAYOUTS)
def test_every_layout_saves_whole_arrays_that_every_layout_loads(tmp_path_factory, saved, loaded):
    shards = [shard for rank in range(saved.world_size) for shard in all_shards(saved, rank)[2]]
    path = save_checkpoint(tmp_path_factory.mktemp("root"), 1, shards, {"tag": 1})
    for rank in range(loaded.world_size):
        assert_loads(path, loaded, rank, ignore=("model/", "optimizer/"))
    full = {name: torch.zeros(shape) for name, (shape, *_) in MODEL.items()}
    load_checkpoint(
        path, [TensorShard(f"model/{n}", t) for n, t in full.items()], ignore=["optimizer/"]
    )
    assert all(torch.equal(full[name], whole(name)) for name in MODEL)


POWERS = (1, 2, 4, 8)
ALL = [
    ParallelLayout(tp=tp, pp=pp, dp=dp)
    for tp in POWERS
    for pp in POWERS
    for dp in POWERS
    if tp * pp * dp <= 8
]


@pytest.mark.campaign
@pytest.mark.parametrize(
    "saved", ALL, ids=lambda layout: f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}"
)
def test_what_a_layout_saves_each_of_the_twenty_loads(tmp_path, saved):
    shards = [shard for rank in range(saved.world_size) for shard in all_shards(saved, rank)[2]]
    path = save_checkpoint(tmp_path, 1, shards, {"tag": 1})
    for loaded in ALL:
        for rank in range(loaded.world_size):
            assert_loads(path, loaded, rank, ignore=("model/", "optimizer/"))


def test_copies_and_replicas_are_not_written():
    layout = ParallelLayout(tp=2, dp=2, pp=2)
    writers = {name: [] for name in MODEL}
    for rank in range(8):
        for name, param in local_params(layout, rank).items():
            (shard,) = param_shards([(name, param)], layout, rank, prefix="model")
            assert shard.name == f"model/{name}"
            if shard.write:
                writers[name].append(rank)
    assert writers == {
        "embedding.weight": [0, 1],
        "layers.0.qkv": [0, 1],
        "layers.0.norm": [0],
        "layers.1.mlp": [4, 5],
        "layers.1.experts": [4, 5],
        "layers.1.router": [4],
        "final_norm.bias": [4],
    }


def test_moments_take_the_sharding_of_their_parameter():
    layout = ParallelLayout(tp=2)
    param = shard_param(torch.nn.Parameter(torch.zeros(2, 4)), PartitionSpec("tp"))
    (shard,) = param_shards(
        [("w", torch.ones(2, 4))], layout, 1, prefix="optimizer/exp_avg", params={"w": param}
    )
    assert (shard.global_shape, shard.offsets, shard.write) == ((4, 4), (2, 0), True)
    assert sharding_of(param).spec.axes == {"tp"}


@pytest.mark.parametrize(
    ("sizes", "packed"),
    [
        ({"tp": 2}, False),
        ({"dp": 2}, True),
        ({"pp": 2}, False),
        ({"tp": 2, "pp": 2}, True),
        ({"tp": 2, "dp": 2}, True),
    ],
    ids=str,
)
def test_ranks_save_together_and_any_layout_loads(tmp_path, ranks, sizes, packed):
    layout = ParallelLayout(**sizes)

    def save_and_load():
        packing.MIN_ARRAYS = 0 if packed else 256
        _, _, shards = all_shards(layout, dist.get_rank())
        metadata = {"tag": 1} if dist.get_rank() == 0 else {}
        path = save_checkpoint(tmp_path, 5, shards, metadata, group=dist.group.WORLD, keep=1)
        assert_loads(path, layout, dist.get_rank(), group=dist.group.WORLD)
        return str(path)

    paths = ranks(layout.world_size, save_and_load)
    assert set(paths) == {str(tmp_path / "step_00000005")}
    assert verify_checkpoint(paths[0]) == []
    assert (latest_checkpoint(tmp_path) / "__packs").is_dir() == packed
    assert_loads(latest_checkpoint(tmp_path), ParallelLayout(), 0)
    other = ParallelLayout(tp=4)
    ranks(
        4,
        lambda: assert_loads(tmp_path / "step_00000005", other, dist.get_rank(), dist.group.WORLD),
    )


def test_a_failure_on_one_rank_is_the_same_error_on_all(tmp_path, ranks):
    save_checkpoint(tmp_path, 1, [TensorShard("w", torch.ones(4))], {})

    def fail(point, bad_rank):
        rank = dist.get_rank()

        def event(name):
            if (name, rank) == (point, bad_rank):
                raise OSError(28, "No space left on device")

        shard = TensorShard("w", torch.ones(2), global_shape=(4,), offsets=(2 * rank,))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, 2, [shard], {}, group=dist.group.WORLD, on_event=event)
        return str(caught.value)

    for point, rank, text in [
        ("save.begin", 1, "rank 1: OSError: .Errno 28. No space left on device"),
        ("save.data", 1, "rank 1: OSError: .Errno 28. No space left on device"),
        ("save.data", 0, "rank 0: OSError: .Errno 28. No space left on device"),
        ("save.before_rename", 0, "OSError: .Errno 28. No space left on device"),
    ]:
        errors = ranks(2, fail, point, rank)
        assert errors[0] == errors[1]
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(errors[0])
        assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["latest", "step_00000001"]
        assert not list(tmp_path.glob(".step*"))


def test_a_damaged_chunk_is_an_error_on_every_rank(tmp_path, ranks):
    path = save_checkpoint(
        tmp_path,
        1,
        [TensorShard("w", torch.ones(2), global_shape=(4,), offsets=(o,)) for o in (0, 2)],
        {},
    )
    chunk = path / "w" / "c.1"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 16
    chunk.write_bytes(data)

    def load():
        rank = dist.get_rank()
        shard = TensorShard("w", torch.ones(2), global_shape=(4,), offsets=(2 * rank,))
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, [shard], group=dist.group.WORLD)
        return str(caught.value), caught.value.file, caught.value.tensor

    first, second = ranks(2, load)
    assert first == second
    assert first[0].startswith("rank 1: ")
    assert first[1:] == ("w/c.1", "w")


def test_an_array_that_no_rank_asks_for_is_missed_by_all(tmp_path, ranks):
    path = save_checkpoint(tmp_path, 1, [TensorShard(n, torch.ones(1)) for n in "abc"], {})

    def load(names):
        shard = TensorShard(names[dist.get_rank()], torch.zeros(1))
        try:
            load_checkpoint(path, [shard], group=dist.group.WORLD)
        except CheckpointError as error:
            return str(error)

    errors = ranks(2, load, "ab")
    assert errors[0] == errors[1]
    assert "c: in the checkpoint, but not requested" in errors[0]
    assert ranks(3, load, "abc") == [None, None, None]


def test_wrong_plans_are_refused_on_every_rank_before_anything_is_written(tmp_path, ranks):
    def save(kind):
        rank = dist.get_rank()
        offsets = (0,) if kind == "overlap" else (2 * rank,)
        shape = (6,) if kind == "hole" else (4,)
        dtype = torch.float64 if kind == "dtype" and rank else torch.float32
        shard = TensorShard("w", torch.zeros(2, dtype=dtype), global_shape=shape, offsets=offsets)
        step = rank if kind == "step" else 0
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "root", step, [shard], {}, group=dist.group.WORLD)
        return str(caught.value)

    for kind, text in {
        "overlap": "tensor 'w' of shape (4,): the part [0:2] has 2 writers, ranks [0, 1]",
        "hole": "tensor 'w' of shape (6,): no rank writes the part [4:6]",
        "dtype": "rank 1 says shape (4,) and dtype float64, another says (4,) and float32",
        "step": "the ranks save different steps: [0, 1]",
    }.items():
        errors = ranks(2, save, kind)
        assert errors[0] == errors[1]
        assert text in errors[0]
        assert not (tmp_path / "root").exists()


def test_without_a_group_a_rank_saves_alone(tmp_path, ranks):
    def save():
        rank = dist.get_rank()
        half = TensorShard("w", torch.zeros(2), global_shape=(4,), offsets=(2 * rank,))
        with pytest.raises(CheckpointError, match="pass their group"):
            save_checkpoint(tmp_path / "bad", 0, [half], {})
        save_checkpoint(tmp_path / f"{rank}", 0, [TensorShard("w", torch.zeros(2))], {})

    ranks(2, save)
    assert (tmp_path / "0" / "latest").exists()
    assert (tmp_path / "1" / "latest").exists()


@pytest.mark.parametrize("point", ["save.begin", "save.arrays", "save.data"])
def test_a_killed_rank_leaves_the_previous_checkpoint(tmp_path, ranks, point):
    def save(step, on_event=None):
        rank = dist.get_rank()
        shard = TensorShard("w", torch.full((2,), step), global_shape=(4,), offsets=(2 * rank,))
        save_checkpoint(tmp_path, step, [shard], {}, group=dist.group.WORLD, on_event=on_event)

    ranks(2, save, 1)
    expect_kill(ranks, 2, save, 2, kill=KillAt(point, rank=1))
    found = torch.zeros(4, dtype=torch.int64)
    load_checkpoint(latest_checkpoint(tmp_path), [TensorShard("w", found)])
    assert found.tolist() == [1] * 4
    ranks(2, save, 2)
    load_checkpoint(latest_checkpoint(tmp_path), [TensorShard("w", found)])
    assert found.tolist() == [2] * 4


def test_ranks_load_one_checkpoint(tmp_path, ranks):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, [TensorShard("w", torch.full((2,), float(step)))], {})

    def load():
        shard = TensorShard("w", torch.zeros(2))
        path = tmp_path / f"step_0000000{dist.get_rank() + 1}"
        with pytest.raises(CheckpointError, match="the ranks load different checkpoints"):
            load_checkpoint(path, [shard], group=dist.group.WORLD)
        return shard.tensor.sum().item()

    assert ranks(2, load) == [0, 0]


def test_a_tensor_that_does_not_say_how_it_is_split_is_refused():
    layout, moment = ParallelLayout(tp=2), torch.zeros(2, 3)
    for params in (None, {"v": moment}):
        with pytest.raises(ValueError, match="'w' is no parameter, so its split"):
            param_shards([("w", moment)], layout, 1, prefix="model", params=params)
    (shard,) = param_shards([("w", moment)], layout, 1, prefix="model", params={"w": moment})
    assert not shard.write
