"""Kinds of layers from a user's own file."""

import shutil
from pathlib import Path

import pytest
from mt_ckpt import RunFolder, SavedModel, inspect_checkpoint, latest_checkpoint
from mt_model import PluginError, load_recorded_plugins
from mt_train.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["data.max_files=5", "training.global_batch_size=4", "evaluation.max_windows=4"]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Copy the example, with a mixer that no other test has loaded, to a new account's folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("my_mixer.py", "my_mixer.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    code = (tmp_path / "my_mixer.py").read_text()
    word = tmp_path.name.replace("_", "").lower()
    code = code.replace("RunningMeanConfig(", f"RunningMean{word}Config(")
    (tmp_path / "my_mixer.py").write_text(code)
    text = (tmp_path / "my_mixer.yaml").read_text()
    (tmp_path / "my_mixer.yaml").write_text(text.replace("runningmean", f"runningmean{word}"))
    return tmp_path


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return ended.value.code


def test_an_own_mixer_trains_resumes_and_is_counted(example, capsys):
    config, out = example / "my_mixer.yaml", example / "run"
    assert call("run", config, *SMALL, "training.steps=1", "--out", out) == 0
    assert call("run", out / "config.yaml", "training.steps=2") == 0
    assert "continuing from" in capsys.readouterr().out
    assert call("memory", config, "parallel.tp=2") == 0
    assert "mixer.up" in capsys.readouterr().out
    path = latest_checkpoint(RunFolder(out).checkpoints)
    plugins = inspect_checkpoint(path).metadata_as(SavedModel).plugins
    assert list(plugins) == [str(example / "my_mixer.py")]
    load_recorded_plugins(plugins)


def test_another_code_than_the_runs_is_refused(example, capsys):
    config, out = example / "my_mixer.yaml", example / "run"
    assert call("run", config, *SMALL, "training.steps=1", "--out", out) == 0
    code = example / "my_mixer.py"
    code.write_text(code.read_text().replace("RunningMean", "RunningMedian"))
    path = latest_checkpoint(RunFolder(out).checkpoints)
    plugins = inspect_checkpoint(path).metadata_as(SavedModel).plugins
    with pytest.raises(PluginError, match="has changed"):
        load_recorded_plugins({str(code): "0" * 64})
    assert len(plugins) == 1
    text = config.read_text().replace("runningmean", "runningmedian")
    config.write_text(text)
    assert call("run", config, *SMALL, "training.steps=2", "--out", out) == 1
    assert "plugins" in capsys.readouterr().err


def test_code_that_this_account_never_ran_is_not_executed(tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(tmp_path / 'spoilt')!r}, 'w')")
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    with pytest.raises(PluginError, match="has not run"):
        load_recorded_plugins({str(code): digest})
    assert not (tmp_path / "spoilt").exists()


@pytest.mark.parametrize(
    ("code", "word"), [("1 / 0", "ZeroDivisionError"), (None, "does not exist")]
)
def test_a_plugin_that_fails_is_named_with_its_line(example, capsys, code, word):
    path = example / "my_mixer.py"
    path.unlink()
    if code is not None:
        path.write_text(code)
    assert call("config", example / "my_mixer.yaml") == 2
    message = capsys.readouterr().err
    assert "plugins[0]" in message
    assert word in message


def test_an_unknown_kind_says_how_to_add_one(example, capsys):
    layers = "model.layers=[{mixer: {type: runningmeen}}]"
    assert call("config", example / "my_mixer.yaml", layers) == 2
    assert "plugins" in capsys.readouterr().err
