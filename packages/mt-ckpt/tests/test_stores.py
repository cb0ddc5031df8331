"""Checkpoints in an object store: moto's server on loopback behind a proxy that loses answers."""

import itertools
import os
import subprocess
import sys
import threading
import time

import mt_ckpt
import pytest
import torch
from mt_ckpt import (
    BackgroundSaver,
    CheckpointError,
    TensorShard,
    clean,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    open_arrays,
    save_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.objects.disk import StoreDisk
from mt_ckpt.path import StoredPath, as_path
from mt_ckpt.root import committed_steps
from mt_files import ObjectError, ObjectStore, ObjectTries
from mt_testing import unsteady_store

QUICK = ObjectTries(first_wait=0.001, longest_wait=0.01)
ROOT = "s3://bucket/run/checkpoints"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server():
    with unsteady_store() as proxy:
        yield proxy


@pytest.fixture
def store(server, monkeypatch):
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "mt_ckpt.objects.disk.open_disk", lambda url: StoreDisk(ObjectStore(url, QUICK))
    )
    server.fault = None
    yield server
    server.fault = None


@pytest.fixture
def root(store):
    return f"s3://bucket/test{next(_numbers)}/checkpoints"


def values(seed):
    draw = torch.Generator().manual_seed(seed)
    return {
        "model/w": torch.randn(40, 30, generator=draw),
        "model/b": torch.randn(60, generator=draw).bfloat16(),
        "step": torch.tensor(seed),
    }


def shards(seed, rank=0, size=1):
    found = []
    for name, tensor in values(seed).items():
        if not tensor.dim():
            found.append(TensorShard(name, tensor, write=rank == 0))
            continue
        rows = len(tensor) // size
        part, rest = tensor[rank * rows : (rank + 1) * rows], [0] * (tensor.dim() - 1)
        shape = tuple(tensor.shape)
        found.append(TensorShard(name, part, global_shape=shape, offsets=(rank * rows, *rest)))
    return found


def save(root, seed, step=None, **options):
    step = seed if step is None else step
    return save_checkpoint(root, step, shards(seed), {"seed": seed}, **options)


def load(root):
    """Return the seed of a checkpoint whose every bit is that seed's."""
    found = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    seed = load_checkpoint(root, [TensorShard(*item) for item in found.items()])["seed"]
    for name, tensor in values(seed).items():
        assert torch.equal(found[name], tensor), name
    return seed


def on_ranks(root, variables, step):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(variables)
    save_checkpoint(root, step, shards(step, rank, size), {"seed": step}, group=dist.group.WORLD)
    found = shards(0, rank, size)
    load_checkpoint(root, found, group=dist.group.WORLD)
    for have, want in zip(found, shards(step, rank, size), strict=True):
        assert torch.equal(have.tensor, want.tensor)


def test_ranks_put_their_own_objects_and_another_layout_reads_what_a_folder_gives(
    ranks, store, root, tmp_path
):
    variables = dict(store.variables)
    ranks(2, on_ranks, root, variables, 5)
    ranks(2, on_ranks, str(tmp_path / "local"), variables, 5)
    stored, local = inspect_checkpoint(root), inspect_checkpoint(tmp_path / "local")
    assert stored.files == local.files
    assert stored.arrays == local.arrays
    assert stored.folder
    assert not local.folder
    assert load(root) == load(tmp_path / "local") == 5
    assert verify_checkpoint(root) == []


def test_a_copy_on_a_disk_is_read_as_it_is(root, tmp_path):
    save(root, 4)
    path = as_path(root)
    for info in path.disk.store.list("/".join(path.parts[2:])):
        copy = tmp_path / info.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.disk.store.get(info.path)[0])
    copied = tmp_path.joinpath(*path.parts[2:])
    assert load(copied) == 4
    assert verify_checkpoint(copied) == []
    save(copied, 5)  # goes on on the disk
    assert load(copied) == 5
    clean(copied)


def test_zarr_python_opens_the_folder_that_the_manifest_names(root):
    import obstore
    import zarr

    path = save(root, 3)
    folder = f"{path}/{inspect_checkpoint(path).folder}"
    group = zarr.open_group(zarr.storage.ObjectStore(obstore.store.from_url(folder)), mode="r")
    assert torch.equal(torch.from_numpy(group["model/w"][:]), values(3)["model/w"])


def test_states_and_saves_in_the_background_go_to_a_store(root):
    state = {"w": torch.randn(30), "steps": [1, {"a": 2.5}]}
    mt_ckpt.save(f"{root}/state", state)
    mt_ckpt.save(f"{root}/state", state | {"more": None})
    found = mt_ckpt.load(f"{root}/state")
    assert torch.equal(found["w"], state["w"])
    assert found["steps"] == state["steps"]
    assert "more" in found
    with BackgroundSaver(root) as saver:
        for seed in (1, 2):
            saver.save(seed, shards(seed), {"seed": seed})
        assert str(saver.wait()) == f"{root}/step_00000002"
    assert load(root) == 2


def test_latest_old_steps_and_replaced_ones(root, monkeypatch):
    monkeypatch.setattr("mt_ckpt.lock.STORE_GRACE_SECONDS", -60.0)
    for seed in (1, 2, 3):
        save(root, seed, keep=2)
    disk = as_path(root).disk
    steps = [name for name in disk.names(as_path(root)) if name.startswith("step_")]
    assert sorted(steps) == ["step_00000002", "step_00000003"]
    with pytest.raises(CheckpointError, match="is saved already"):
        save(root, 3)
    # The run goes back: step 3 is saved again, and only then are its old objects removed.
    content = b"step_00000002\n"  # as a person writes it
    disk.store.put("/".join(as_path(root).parts[2:]) + "/latest", content)
    assert load(root) == 2
    save(root, 7, step=3)
    assert load(root) == 7
    step = as_path(root) / "step_00000003"
    folder = inspect_checkpoint(step).folder
    assert set(disk.names(step)) == {"mt-manifest.json", folder}


def test_a_reader_keeps_ten_minutes_before_retention_takes_a_step(root):
    for seed in (1, 2):
        save(root, seed, keep=1)
    assert load(f"{root}/step_00000001") == 1


def test_a_part_of_an_array_reads_little_more_than_its_bytes(store, root):
    tensor = torch.randn(2048, 4096)
    save_checkpoint(root, 1, [TensorShard("w", tensor)], {})
    for part in (slice(512, 1024), slice(0, 512)):
        with open_arrays(root) as arrays:
            before = store.sent
            box = torch.zeros(512, 4096)
            arrays.fill(TensorShard("w", box, global_shape=(2048, 4096), offsets=(part.start, 0)))
            assert torch.equal(box, tensor[part])
            assert store.sent - before <= 1.1 * box.nbytes


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "other"])
def test_damaged_objects_are_named(root, damage):
    path = save(root, 1)
    manifest, disk = inspect_checkpoint(path), path.disk
    name = "model/w/c.0.0"
    key = "/".join((path / manifest.folder / name).parts[2:])
    content = bytearray(disk.store.get(key)[0])
    content[100] ^= 1
    if damage == "missing":
        disk.store.delete([key])
    else:
        disk.store.put(key, {"flip": content, "cut": content[:-1], "other": b""}[damage])
    (problem,) = verify_checkpoint(root)
    assert (problem.file, problem.tensor) == (name, "model/w")
    with pytest.raises(CheckpointError, match="model/w"):
        load(root)


def test_lost_answers_change_nothing(store, root):
    store.fail_some(0.25, seed=0)
    for step in range(1, 4):
        save(root, step, keep=2)
        assert load(root) == step
    store.fault = None
    assert verify_checkpoint(root) == []


def test_a_lost_answer_to_the_commit_is_read_back(store, root):
    lost = []

    def fault(method, path):
        if method == "PUT" and path.endswith(("mt-manifest.json", "/latest", "/.lock")):
            lost.append(path)
            return "drop" if lost.count(path) % 2 else None
        return None

    store.fault = fault
    assert str(save(root, 1)) == f"{root}/step_00000001"
    assert sum("manifest" in path for path in lost) == 2  # the second met its own object
    assert load(root) == 1


def test_a_store_that_stays_away_is_named_and_leaves_the_old_checkpoint(store, root):
    save(root, 1)
    for ending in ("/latest", "mt-manifest.json", "c.0.0"):
        store.fault = lambda _, path, ending=ending: "refuse" if path.endswith(ending) else None
        with pytest.raises(CheckpointError, match=r"s3://bucket/.*after 8 tries: .*503"):
            save(root, 2)
        store.fault = None
        assert load(root) == 1


class StoppedError(BaseException):
    """The saver is gone, as after a kill."""


class StoppingStore(ObjectStore):
    """A store whose client stops for good before or after its nth request."""

    def __init__(self, nth, *, after):
        super().__init__(ROOT, QUICK)
        self.count, self.nth, self.after, self.stopped = 0, nth, after, False

    def _tried(self, path, action):
        if threading.current_thread().name == "mt-ckpt-lease":
            raise ObjectError(path, "this thread is gone with its process")
        if self.stopped:
            raise StoppedError
        self.count += 1
        self.stopped = self.count >= self.nth
        if self.stopped and not self.after:
            raise StoppedError
        result = super()._tried(path, action)
        if self.stopped:
            raise StoppedError
        return result


def stop_at(root, nth, *, after):
    """Save step 2 where step 1 is, stop at the nth request, and return whether it got there."""
    for seed in (1, 2):
        disk = StoreDisk(StoppingStore(nth if seed == 2 else 10**6, after=after))
        try:
            save(StoredPath.on(disk, root), seed, keep=1)
        except StoppedError:
            return True
    return False


def check_stopped(root, nth, *, after):
    stopped = stop_at(root, nth, after=after)
    assert load(root) in ((1, 2) if stopped else (2,))
    assert verify_checkpoint(root) == []
    if not stopped:
        return False
    time.sleep(0.3)  # until the lock of the one that is gone is over
    if load(root) == 1:
        save(root, 2)
        assert load(root) == 2
    clean(root)
    for step in ("step_00000001", "step_00000002"):
        manifest = inspect_checkpoint(f"{root}/{step}")
        disk, path = as_path(root).disk, as_path(f"{root}/{step}")
        assert set(disk.names(path)) == {"mt-manifest.json", manifest.folder}
    return True


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("mt_ckpt.objects.lease.LEASE_SECONDS", 0.2)
    monkeypatch.setattr("mt_ckpt.publication.LEFT_SECONDS", -60.0)


@pytest.mark.parametrize(("nth", "after"), [(10, False), (22, True), (24, True)])
def test_a_save_that_stops_at_a_request_leaves_the_old_or_the_new_step(short, root, nth, after):
    check_stopped(root, nth, after=after)


@pytest.mark.campaign
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_stops_at_any_request_leaves_the_old_or_the_new_step(short, root, after):
    for nth in itertools.count(1):
        if not check_stopped(f"{root}/{nth}", nth, after=after):
            break
    assert nth > 20


def two_savers(root, step):
    """Let two threads save a step, and return the error of each."""
    start, ends = threading.Barrier(2), [None, None]

    def work(number):
        start.wait()
        try:
            save(root, 10 * step + number, step=step, keep=2)
        except CheckpointError as error:
            ends[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def check_two_savers(root, rounds):
    for step in range(1, rounds + 1):
        ends = two_savers(root, step)
        saved = [number for number, end in enumerate(ends) if end is None]
        assert len(saved) == 1, ends
        for end in ends:
            assert end is None or "is in use by process" in str(end) or "saved" in str(end), end
        assert load(root) == 10 * step + saved[0]
        assert verify_checkpoint(root) == []


def test_of_two_savers_of_a_step_one_is_told_that_it_is_saved(root):
    check_two_savers(root, 3)


def test_of_two_savers_one_saves_though_answers_are_lost(store, root):
    store.fail_some(0.1, seed=0)
    check_two_savers(root, 2)


@pytest.mark.campaign
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_of_two_savers_one_saves_in_200_rounds(store, root, share, monkeypatch):
    monkeypatch.setattr("mt_ckpt.lock.STORE_GRACE_SECONDS", -60.0)  # retention in each round
    store.fail_some(share, seed=1)
    check_two_savers(root, 200)


def prune(root, **options):
    from mt_ckpt.command.pruning import Prune

    return Prune(path=as_path(root), keep=1, yes=True, **options).run()


def test_prune_spares_what_may_be_read_and_removes_the_rest(root, monkeypatch, capsys):
    for seed in (1, 2, 3):
        save(root, seed)
    assert prune(root) == 1
    assert "step_00000001, step_00000002" in capsys.readouterr().err
    assert [load(f"{root}/step_{step:08d}") for step in (1, 2, 3)] == [1, 2, 3]
    monkeypatch.setattr("mt_ckpt.lock.STORE_GRACE_SECONDS", -60.0)
    assert prune(root) == 0
    disk, path = as_path(root).disk, as_path(root)
    assert {name for name in disk.names(path) if name.startswith("step_")} == {"step_00000003"}
    assert load(root) == 3


@pytest.mark.campaign
@pytest.mark.parametrize("after", [False, True])
def test_prune_that_stops_at_any_request_leaves_whole_steps(short, root, monkeypatch, after):
    monkeypatch.setattr("mt_ckpt.lock.STORE_GRACE_SECONDS", -60.0)
    stopped, nth = True, 0
    while stopped:
        nth, place = nth + 1, f"{root}/{nth}"
        for seed in (1, 2, 3):
            save(place, seed)
        try:
            prune(StoredPath.on(StoreDisk(StoppingStore(nth, after=after)), place))
            stopped = False
        except StoppedError:
            time.sleep(0.3)  # until the lock of the one that is gone is over
        for path in committed_steps(as_path(place)).values():
            assert verify_checkpoint(path) == []
        assert load(place) == 3
        clean(place)
        assert prune(place) == 0
        clean(place)
        objects = as_path(place).disk.store.list("/".join(as_path(place).parts[2:]))
        assert {info.path.split("/")[-1] for info in objects if "/step_" not in info.path} == {
            ".lock",
            "latest",
        }
        assert all("/step_00000003/" in info.path for info in objects if "/step_" in info.path)
    assert nth > 10


def read_until(end, root, read, errors):
    """Load the latest checkpoint again and again."""
    while not end.is_set():
        try:
            read.append(load(root))
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)


def check_readers(root, rounds):
    """Save, retain, prune and clean beside two readers, which stay below a reader's time."""
    save(root, 1)
    end, read, errors = threading.Event(), [], []
    readers = [
        threading.Thread(target=read_until, args=(end, root, read, errors)) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    for step in range(2, rounds + 2):
        save(root, step, keep=2)
        clean(root)
        prune(root)
    end.set()
    for reader in readers:
        reader.join()
    assert errors == []
    assert len(read) >= rounds // 4
    assert load(root) == rounds + 1
    removed = rounds + 1 - len(committed_steps(as_path(root)))
    assert removed > rounds // 4  # retention was at work meanwhile


@pytest.mark.campaign
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_readers_beside_retention_prune_and_clean_read_whole_steps(store, root, monkeypatch, share):
    monkeypatch.setattr("mt_ckpt.lock.STORE_GRACE_SECONDS", 10.0)
    monkeypatch.setattr("mt_ckpt.publication.LEFT_SECONDS", 10.0)
    store.fail_some(share, seed=2)
    check_readers(root, 100)


def test_a_lease_that_nobody_renews_is_taken_over(root, monkeypatch):
    from mt_ckpt.root import lock_root

    monkeypatch.setattr("mt_ckpt.objects.lease.LEASE_SECONDS", 0.5)
    monkeypatch.setattr("mt_ckpt.objects.lease.Lease._keep", lambda _: None)  # it is held up
    with lock_root(as_path(root), purpose="saving step 1") as check:
        with pytest.raises(CheckpointError, match=r"in use by process .*saving step 1"):
            save(root, 2)
        time.sleep(0.6)
        save(root, 2)
        with pytest.raises(CheckpointError, match="It has taken over"):
            check()
    assert load(root) == 2


def test_a_saver_that_lost_its_lock_saves_nothing(root, monkeypatch):
    save(root, 1)
    monkeypatch.setattr("mt_ckpt.objects.lease.LEASE_SECONDS", 0.2)
    monkeypatch.setattr("mt_ckpt.objects.lease.Lease._keep", lambda _: None)  # it is held up

    def event(name):
        if name == "save.data":
            time.sleep(0.3)
            save(root, 3)

    with pytest.raises(CheckpointError, match=r"in use by process|taken over"):
        save(root, 2, on_event=event)
    assert load(root) == 3
    assert as_path(root).disk.names(as_path(f"{root}/step_00000002")) == []


def test_clean_removes_what_no_manifest_names_and_spares_what_may_be_saved(root, monkeypatch):
    save(root, 1)
    with pytest.raises(StoppedError):
        save(StoredPath.on(StoreDisk(StoppingStore(18, after=True)), root), 2)
    monkeypatch.setattr("mt_ckpt.objects.lease._lives", lambda _: False)  # the saver is gone
    step = as_path(f"{root}/step_00000002")
    assert clean(root) == []
    monkeypatch.setattr("mt_ckpt.publication.LEFT_SECONDS", -60.0)
    (left,) = clean(root)
    assert left.parent == step
    assert step.disk.names(step) == []
    assert load(root) == 1


PROGRAM = """
import os, signal, sys, torch
from mt_ckpt import TensorShard, save_checkpoint

def event(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

save_checkpoint(sys.argv[1], 2, [TensorShard("w", torch.full((50,), 2.0))], {}, on_event=event)
"""


@pytest.mark.parametrize(
    ("point", "step"),
    [
        ("save.before_rename", 1),
        *(
            pytest.param(point, step, marks=pytest.mark.campaign)
            for point, step in (
                ("save.arrays", 1),
                ("save.data", 1),
                ("save.manifest", 1),
                ("save.after_rename", 1),
                ("save.after_latest", 2),
            )
        ),
    ],
)
def test_a_killed_saver_blocks_nobody_on_its_machine(root, point, step):
    save_checkpoint(root, 1, [TensorShard("w", torch.full((50,), 1.0))], {})
    ended = subprocess.run([sys.executable, "-c", PROGRAM, root, point], check=False)
    assert ended.returncode == -9
    path = latest_checkpoint(root)
    assert path is not None
    assert path.name == f"step_{step:08d}"
    assert verify_checkpoint(root) == []
    save_checkpoint(root, 3, [TensorShard("w", torch.full((50,), 3.0))], {})  # at once
    assert verify_checkpoint(root) == []


def test_what_needs_a_folder_says_so(root):
    path = as_path(root)
    with pytest.raises(OSError, match=f"{root}: is in an object store"):
        open(path)  # noqa: SIM115 - as programs that know no stores do
    assert str(path / "a" / ".." / "b") == f"{root}/a/../b"
    assert (path / "a").parent == path
    assert str(as_path("s3:/bucket/x")) == "s3://bucket/x"


def test_stores_of_other_kinds_are_opened_and_named_by_their_urls(monkeypatch):
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    assert str(as_path("gs://bucket/run") / "latest") == "gs://bucket/run/latest"
    with pytest.raises(ObjectError, match=r"az://box/run: can't be opened; .*Account must be"):
        latest_checkpoint("az://box/run")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "us")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/us")  # nobody listens
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setattr(
        "mt_ckpt.objects.disk.open_disk", lambda url: StoreDisk(ObjectStore(url, QUICK))
    )
    with pytest.raises(CheckpointError, match=r"az://box/run/.*the store fails, after 8 tries"):
        latest_checkpoint("az://box/run")
