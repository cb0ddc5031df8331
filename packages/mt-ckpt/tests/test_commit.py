import resource

import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    Keep,
    TensorShard,
    clean,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from mt_testing import KillAt, expect_kill

POINTS = [
    "save.begin",
    "save.arrays",
    "save.data",
    "save.manifest",
    "save.before_rename",
    "save.after_rename",
    "save.after_latest",
]


def shards(seed):
    values = torch.arange(12.0).reshape(3, 4) * (seed + 1)
    return [TensorShard("model/w", values), TensorShard("model/b", values[0].clone())]


def load(path):
    filled = shards(-1)
    metadata = load_checkpoint(path, filled)
    for found, saved in zip(filled, shards(metadata["seed"]), strict=True):
        assert torch.equal(found.tensor, saved.tensor)
    return metadata["seed"]


def save(root, step, **options):
    return save_checkpoint(root, step, shards(step), {"seed": step}, **options)


def names(root):
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


def test_the_points_are_reached_in_order(tmp_path):
    seen = []
    save(tmp_path, 1, on_event=seen.append)
    assert seen == POINTS


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("before", [[10], []], ids=["later save", "first save"])
def test_after_a_kill_the_last_checkpoint_loads_and_the_save_succeeds(
    tmp_path, ranks, point, before
):
    for step in before:
        save(tmp_path, step)

    expect_kill(ranks, 1, save, tmp_path, 20, kill=KillAt(point))
    latest = latest_checkpoint(tmp_path)
    renamed = POINTS.index(point) >= POINTS.index("save.after_rename")
    if not before and not renamed:
        assert latest is None
    elif before and point != "save.after_latest":
        assert load(latest) == 10
    else:
        assert load(latest) == 20
    clean(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    if point != "save.after_latest":
        assert load(save(tmp_path, 20)) == 20
    assert load(latest_checkpoint(tmp_path)) == 20
    assert names(tmp_path) == ["latest", *(f"step_{s:08d}" for s in before), "step_00000020"]


def test_what_latest_names_is_never_saved_again(tmp_path):
    path = save(tmp_path, 20)
    with pytest.raises(
        CheckpointError, match=r"step_00000020 is saved already, and .*latest names"
    ):
        save(tmp_path, 20)
    assert names(tmp_path) == ["latest", "step_00000020"]
    assert load(path) == 20


def test_a_step_that_latest_does_not_name_is_replaced(tmp_path):
    old = save(tmp_path, 20)
    save(tmp_path, 10)
    assert latest_checkpoint(tmp_path).name == "step_00000010"
    new = save_checkpoint(tmp_path, 20, shards(99), {"seed": 99})
    assert new == old
    assert load(latest_checkpoint(tmp_path)) == 99
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020"]


def test_a_lagging_latest_is_what_resumes(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000010\n")
    assert latest_checkpoint(str(tmp_path)).name == "step_00000010"
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path).name == "step_00000020"


def test_retention_keeps_the_newest_and_never_what_latest_names(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step_00000015", "step_00000020"]
    # The run went back: the newer steps stay until they are saved again.
    (tmp_path / "latest").write_text("step_00000015\n")
    save(tmp_path, 17, keep=1)
    assert names(tmp_path) == ["latest", "step_00000017", "step_00000020"]
    assert load(latest_checkpoint(tmp_path)) == 17


def test_retention_keeps_every_mth_step_of_this_run(tmp_path):
    for step in range(1, 9):
        save(tmp_path, step, keep=Keep(2, every=3))
    assert [n[-1] for n in names(tmp_path)[1:]] == ["3", "6", "7", "8"]
    # The run goes back before a multiple, which is of an abandoned run then.
    (tmp_path / "latest").write_text("step_00000003\n")
    save(tmp_path, 7, keep=Keep(1, every=3))
    assert [n[-1] for n in names(tmp_path)[1:]] == ["3", "7", "8"]


def test_retention_happens_after_latest_has_moved(tmp_path):
    save(tmp_path, 5)
    seen = {}

    def look(name):
        seen[name] = names(tmp_path)

    save(tmp_path, 6, keep=1, on_event=look)
    assert "step_00000005" in seen["save.after_latest"]
    assert names(tmp_path) == ["latest", "step_00000006"]


def test_cleaning_removes_only_what_killed_saves_left(tmp_path):
    save(tmp_path, 10)
    tag = "0123456789abcdef" * 2
    for name in (f".step_00000020.tmp-{tag}", f".step_00000010.old-{tag}"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "zarr.json").write_text("{}")
    (tmp_path / f".latest.tmp-{tag}").write_text("step")
    for name in (".step_00000020.tmp-mine", "notes.tmp-1", ".git"):
        (tmp_path / name).touch()
    assert len(clean(tmp_path)) == 3
    assert names(tmp_path) == [
        ".git",
        ".step_00000020.tmp-mine",
        "latest",
        "notes.tmp-1",
        "step_00000010",
    ]
    assert clean(tmp_path / "nowhere") == []


def test_steps_beyond_eight_digits_work(tmp_path):
    save(tmp_path, 10**8 - 1)
    assert save(tmp_path, 10**9).name == "step_1000000000"
    assert latest_checkpoint(tmp_path).name == "step_1000000000"


def assert_untouched(root):
    assert names(root) == ["latest", "step_00000010"]
    assert load(latest_checkpoint(root)) == 10
    assert verify_checkpoint(root / "step_00000010") == []


def test_a_file_that_may_not_grow_is_reported_with_the_bytes_needed(tmp_path):
    save(tmp_path, 10)
    big = [TensorShard("model/big", torch.zeros(1 << 16))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, 20, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = str(caught.value)
    assert "model/big/c.0: File too large" in text
    assert "needed 262148 bytes for this file and 262148 bytes for the checkpoint" in text
    assert "bytes are free" in text
    assert_untouched(tmp_path)


def test_a_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "root").touch()
    with pytest.raises(CheckpointError, match=r"cannot create .*root: Not a directory"):
        save(tmp_path / "root", 1)


def test_an_error_in_a_point_is_raised_and_cleaned_up(tmp_path):
    save(tmp_path, 10)

    def fail(name):
        if name == "save.before_rename":
            raise KeyError(name)

    with pytest.raises(CheckpointError, match=r"KeyError: 'save.before_rename'"):
        save(tmp_path, 20, on_event=fail)
    assert_untouched(tmp_path)


def test_what_was_to_be_replaced_is_put_back_after_a_failure(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 10)

    def fail(name):
        if name == "save.before_rename":
            assert names(tmp_path) != ["latest", "step_00000010", "step_00000020"]
            raise KeyError(name)

    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, 20, shards(99), {"seed": 99}, on_event=fail)
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020"]
    assert load(tmp_path / "step_00000020") == 20


def test_the_only_checkpoint_survives_two_kills(tmp_path, ranks):
    expect_kill(ranks, 1, save, tmp_path, 20, kill=KillAt("save.after_rename"))
    assert latest_checkpoint(tmp_path).name == "step_00000020"
    expect_kill(ranks, 1, save, tmp_path, 20, kill=KillAt("save.before_rename"))
    assert clean(tmp_path)
    assert names(tmp_path) == ["step_00000020"]
    assert load(latest_checkpoint(tmp_path)) == 20


def test_steps_of_a_run_that_was_given_up_go_before_its_ancestors(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000010\n")
    save(tmp_path, 25, keep=2)
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000025", "step_00000030"]


def test_a_folder_in_the_way_is_named(tmp_path):
    (tmp_path / "step_00000020").mkdir()
    with pytest.raises(CheckpointError, match="step_00000020 exists and is no checkpoint"):
        save(tmp_path, 20)
