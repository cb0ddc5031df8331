"""`save` and `load` of nested dicts: round trips, refusals, kills and damage."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_ckpt import CheckpointError, TensorShard, load, save, save_checkpoint
from mt_testing import KillAt, expect_kill

POINTS = ["save.arrays", "save.data", "save.before_rename", "save.after_rename"]


def same(left, right) -> bool:
    """Equal values of equal types, NaN equal to itself."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if isinstance(left, dict):
        return (
            type(right) is dict
            and [(type(key), key) for key in left] == [(type(key), key) for key in right]
            and all(same(left[key], right[key]) for key in left)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def test_a_model_and_its_optimizer_come_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    save(tmp_path / "x", state)
    loaded = load(tmp_path / "x")
    assert same(state, loaded)

    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    second = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    for mine, step in ((model, optimizer), (other, second)):
        step.zero_grad()
        mine(torch.ones(8, 4)).square().sum().backward()
        step.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8"))
)
TENSORS = st.builds(
    lambda shape, dtype: (torch.arange(math.prod(shape)).reshape(shape) * 37 - 11).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]),
)
KEYS = st.one_of(
    st.integers(), st.sampled_from(["", ".", "__x", "c", "zarr.json", "a/b", "A", "a"])
)
VALUES = st.recursive(
    st.one_of(PLAIN, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(state=st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_nested_value_comes_back_with_its_type(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state")
    save(path, state)
    assert same(state, load(path))


def test_arrays_have_the_names_of_their_keys_for_stock_zarr(tmp_path):
    weight = torch.randn(2, 3)
    save(tmp_path, {"model": {"layers.0.weight": weight, 7: [weight + 1]}, "model/x": weight + 2})
    group = zarr.open_group(next(tmp_path.glob("step_*")))
    assert torch.equal(torch.from_numpy(group["model/layers.0.weight"][:]), weight)
    assert torch.equal(torch.from_numpy(group["model/7/0"][:]), weight + 1)
    assert torch.equal(torch.from_numpy(group["model_x"][:]), weight + 2)


def test_one_memory_is_stored_once_and_is_one_again(tmp_path):
    weight = torch.nn.Parameter(torch.randn(2, 3))
    save(tmp_path, {"embedding": weight, "head": weight, "turned": weight.t()})
    loaded = load(tmp_path)
    assert loaded["embedding"] is loaded["head"]
    assert torch.equal(loaded["turned"], weight.t())
    assert type(loaded["head"]) is torch.Tensor
    assert len(list(tmp_path.glob("step_*/*/zarr.json"))) == 2


def test_a_dict_of_another_class_comes_back_as_a_dict(tmp_path):
    save(tmp_path, OrderedDict(a=1))
    assert type(load(str(tmp_path))) is dict


def within_itself() -> dict:
    state: dict = {}
    state["again"] = state
    return state


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


class Weight(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"a": {"b": [1, object()]}},
            r"state\['a'\]\['b'\]\[1\]: a object is not saved; use tensors",
        ),
        ({"a": b"bytes"}, r"state\['a'\]: a bytes is not saved"),
        ({"a": {1.5: 0}}, r"state\['a'\]: key 1.5 is neither a string nor an integer"),
        ({True: 0}, "key True is neither"),
        ({"a": torch.Size([1])}, "a Size is not saved"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, r"state\['a'\]: a: dtype torch.complex64"),
        ({"a": torch.zeros(2, device="meta")}, "on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "of the layout sparse_coo; save its to_dense"),
        ({"a": torch.eye(2).to_mkldnn()}, "of the layout mkldnn; save its to_dense"),
        ({"a": nested(torch.jagged)}, "a NestedTensor is not saved; use plain tensors"),
        ({"a": nested(torch.strided)}, "is nested; save its parts"),
        ({"a": torch.zeros(1).as_subclass(Weight)}, "a Weight is not saved; use plain tensors"),
        (within_itself(), "nested deeper than 64, or within itself"),
        ({"a": 10**5000}, "an integer of more than 8192 bits"),
        ([1], "state must be a dict, not list"),
        (None, "state must be a dict, not NoneType"),
    ],
)
def test_what_is_not_saved_is_named_with_its_place(tmp_path, state, text):
    with pytest.raises((TypeError, ValueError), match=text):
        save(tmp_path / "x", state)
    assert not (tmp_path / "x").exists()


def test_saving_again_replaces(tmp_path):
    for value in range(3):
        save(tmp_path, {"value": value, "tensor": torch.full((value,), value)})
        assert load(tmp_path)["value"] == value
    assert len(list(tmp_path.glob("step_*"))) == 1


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("before", [True, False], ids=["second save", "first save"])
def test_after_a_kill_the_old_or_the_new_state_loads_and_saving_works(
    tmp_path, ranks, point, before
):
    if before:
        save(tmp_path, {"value": 1})
    expect_kill(ranks, 1, save, tmp_path, {"value": 2, "w": torch.ones(3)}, kill=KillAt(point))
    renamed = point == "save.after_rename"
    if before or renamed:
        assert load(tmp_path)["value"] == (1 if before else 2)
    else:
        with pytest.raises(CheckpointError, match="has no committed checkpoint"):
            load(tmp_path)
    save(tmp_path, {"value": 3})
    assert load(tmp_path) == {"value": 3}
    assert len(list(tmp_path.glob("*step_*"))) == 1


def test_folders_of_something_else_are_refused(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match=r"contains 'thesis.txt'"):
        save(tmp_path, {})
    path = save_checkpoint(tmp_path / "run", 5, [TensorShard("w", torch.ones(2))], {})
    with pytest.raises(CheckpointError, match=r"was not written by mt_ckpt.save; load_checkpoint"):
        save(tmp_path / "run", {})
    with pytest.raises(CheckpointError, match=r"was not written by mt_ckpt.save; load_checkpoint"):
        load(path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", {})
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint directory"):
        load(tmp_path / "nowhere")


def test_the_second_of_two_that_save_at_once_is_told_who_the_first_is(tmp_path):
    def meanwhile(name):
        if name == "save.data":
            with pytest.raises(CheckpointError, match=r"is in use by process \d+ on .* \(saving"):
                save(tmp_path, {"value": 2})

    save(tmp_path, {"value": 1}, on_event=meanwhile)
    assert load(tmp_path) == {"value": 1}


def forge(path, metadata) -> None:
    """Put other metadata into the manifest, with a right seal."""
    manifest = next(path.glob("step_*/mt-manifest.json"))
    body = json.loads(manifest.read_text())
    del body["sha256"]
    body["metadata"] = {"mt.state": metadata}
    rest = json.dumps(body, indent=0).removeprefix("{\n").encode()
    seal = hashlib.sha256(rest).hexdigest().encode()
    manifest.write_bytes(b'{"sha256": "' + seal + b'",\n' + rest)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tensor": "nothing"},
        {"tensor": 5},
        {"tensor": "w", "more": 1},
        {"float": "5"},
        {"dict": [["a"]]},
        {"dict": [[None, 1]]},
        {"dict": [5]},
        {"dict": "ab"},
        {"set": []},
        {},
        [1],
        7,
    ],
)
def test_a_forged_state_is_refused(tmp_path, metadata):
    save(tmp_path, {"w": torch.ones(2)})
    forge(tmp_path, metadata)
    with pytest.raises(CheckpointError, match="its metadata holds no state"):
        load(tmp_path)


def test_damage_is_an_error_that_names_the_file(tmp_path):
    save(tmp_path, {"w": torch.ones(200)})
    chunk = next(tmp_path.glob("step_*/w/c.0"))
    data = bytearray(chunk.read_bytes())
    data[100] ^= 4
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"w/c\.0"):
        load(tmp_path)


def test_a_reader_beside_a_saver_always_gets_a_whole_state(tmp_path):
    save(tmp_path, {"value": 0, "w": torch.zeros(50)})
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            state = load(tmp_path)
            assert torch.equal(state["w"], torch.full((50,), float(state["value"])))
            seen.append(state["value"])

    reader = threading.Thread(target=read)
    reader.start()
    for value in range(1, 41):
        save(tmp_path, {"value": value, "w": torch.full((50,), float(value))})
    done.set()
    reader.join()
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert load(tmp_path)["value"] == 40


def test_a_forged_state_of_great_depth_is_refused(tmp_path):
    save(tmp_path, {})
    deep: object = 1
    for _ in range(70):
        deep = [deep]
    forge(tmp_path, {"dict": [["a", deep]]})
    with pytest.raises(CheckpointError, match="values are nested deeper than 64"):
        load(tmp_path)


def test_a_negative_view_is_saved_as_what_it_is(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    save(tmp_path, {"plus": numbers.imag, "minus": numbers.conj().imag})
    found = load(tmp_path)
    assert (found["plus"].tolist(), found["minus"].tolist()) == ([2, -4], [-2, 4])
