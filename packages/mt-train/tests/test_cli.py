"""The command line: overrides anywhere, words for every mistake, any console."""

from __future__ import annotations

import dataclasses
import inspect
import os
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from mt_data_parallel import GradBuffer
from mt_model import FIELDS
from mt_testing import sample
from mt_train import ConfigError, load_config, to_yaml
from mt_train.cli import _options_last, _run_folder, main
from mt_train.config.kinds.registry import KINDS
from mt_train.config.lora_section import LoraSection
from mt_train.config.parallel_section import ParallelSection
from mt_train.keys import explain, sections

ROOT = Path(__file__).parents[3]
KEY_PAGE = ROOT / "packages/mt-train/tools/key_page.py"
TINY = Path(__file__).parents[1] / "examples" / "tiny.yaml"


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_overrides_stand_anywhere_among_the_options() -> None:
    given = ["run", "my.yaml", "a.b=1", "--out", "c.d=2", "training.steps=2", "--nproc=2", "e.f=-1"]
    words = ["run", "my.yaml", "a.b=1", "training.steps=2", "e.f=-1"]
    assert _options_last(given) == [*words, "--out", "c.d=2", "--nproc=2"]
    assert _options_last(["run", "--download", "a.b=1"]) == ["run", "a.b=1", "--download"]
    assert _options_last(["run", "--help", "a.b=1"]) == ["run", "--help", "a.b=1"]


def test_overrides_on_both_sides_of_an_option_reach_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", str(TINY), "parallel.tp=2", "--nproc", "3", "training.stpes=2"]
    code, _, message = command(arguments, capsys)
    assert (code, "training.stpes: unknown key. Did you mean training.steps?" in message) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    "text", ["**/*.txt", "*.txt", "!x", "%x", "@x", "`x", "a: b", "- a", "# a", "{a}", "[a-z]*.txt"]
)
def test_the_value_of_an_override_is_text_as_it_stands(text: str) -> None:
    quoted = f"'{text}'" if text[0] in "{[" else text  # brackets are YAML's own
    assert load_config(TINY, [f"data.glob={quoted}"]).config.data.glob == text


def test_stars_are_text_in_lists_too() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, ["data.corpus=null", "data.tokenizer=x", "data.train=[*a, b*, '*c']"])
    for name in ("*a.bin", "b*.bin", "*c.bin"):
        assert f"{Path.cwd() / name} does not exist" in str(caught.value)


def test_a_folder_without_a_match_names_the_glob_and_one_that_matches(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("words\n")
    for glob, text in (("", "matches '**/*.py'; try data.glob=**/*.txt"), ("../**x", "glob")):
        overrides = [f"data.corpus={tmp_path}", *([f"data.glob={glob}"] if glob else [])]
        with pytest.raises(ConfigError) as caught:
            load_config(TINY, overrides)
        (problem,) = caught.value.problems
        assert problem.path == "data.glob"
        assert text in problem.text
    load_config(TINY, [f"data.corpus={tmp_path}", "data.glob=**/*.txt"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(["--version"], capsys)
    assert (code, out.split()[0]) == (0, "mt-train")
    assert out.split()[1][0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu", "x.yaml"], "command line: 'rnu' is no command. Did you mean run?"),
        (["my.yaml"], "'my.yaml' is no command. Did you mean run my.yaml?"),
        (["zzz"], "'zzz' is no command. Known: quickstart, run, config, memory, profile, keys"),
        (["x" * 10_000], "is no command"),
        (["run", str(TINY), "--out", ""], "command line: --out: '' is no folder; name one"),
        (["quickstart", "--out", " "], "command line: --out: ' ' is no folder; name one"),
        (["keys", "optimiser"], "'optimiser' is no section and no key. Did you mean optimizer?"),
        (["keys", "data.globs"], "Did you mean data.glob?"),
    ],
)
def test_a_wrong_command_is_one_line_with_a_way_out(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, message = command(arguments, capsys)
    assert code == 2
    assert expected in message
    assert len(message) < 1000


def test_an_unknown_option_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(["run", str(TINY), "--ot", "x"], capsys)
    assert code == 2
    assert "--out" in out + err


def test_the_configuration_of_a_run_folder_continues_it(tmp_path: Path) -> None:
    folder = tmp_path / "my"
    folder.mkdir()
    assert _run_folder(folder / "config.yaml") == Path("runs/config")
    (folder / "metrics.jsonl").touch()
    assert _run_folder(folder / "config.yaml") == folder
    assert _run_folder(folder / "other.yaml") == Path("runs/other")


def test_config_shows_the_whole_model_and_loads_back_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = ("model.preset=qwen3-0.6b", "model.preset=gpt2", "model.preset=mixtral-8x7b")
    for override in (*presets, "model.bias=true", "model.moe={num_experts: 4}"):
        code, out, _ = command(["config", str(TINY), override], capsys)
        assert code == 0
        model = yaml.safe_load(out)["model"]
        missing = {name for name, value in model.items() if value is None}
        short = {"num_layers", "layer", "bias", "moe", "rope", "rope_theta"}  # the list says it
        off = {"logit_softcap", "head_transform", "embedding_std", "mtp", "pooled_head", "images"}
        off |= {"retro"}
        assert missing <= {"preset", "from", "vocab_size", "vocab_multiple", *short, *off}
        again = tmp_path / "again.yaml"
        again.write_text(out)
        before, after = load_config(TINY, [override]), load_config(again)
        assert after.model(512) == before.model(512)
        assert after.resolved() == before.resolved()


@pytest.mark.parametrize("preset", ["llama3.2-1b", "gemma2-2b", "pythia-410m", "mamba2-130m"])
def test_config_of_a_preset_with_layers_that_differ_loads_back_to_it(
    preset: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{preset: {preset}}}\ndata:" + LAYERS.partition("data:")[2])
    loaded = load_config(path)
    path.write_text(to_yaml(loaded.resolved()))
    assert load_config(path).model(300) == loaded.model(300)


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]


@pytest.mark.parametrize("command", ["memory", "run"])
def test_an_environment_that_torch_refuses_is_one_line(command: str) -> None:
    code = f"from mt_train.cli import main; main([{command!r}, {str(TINY)!r}])"
    done = run_python(code, env={**os.environ, "TORCH_LOGS": "bogus"})
    assert done.returncode == 1
    assert "Invalid log settings: bogus" in done.stderr
    assert done.stderr.count("\n") <= 3


HELP = (["--help"], ["run", "--help"], ["config", str(TINY)], ["keys"])


@pytest.mark.parametrize(
    ("arguments", "encoding"), sample(product(HELP, ("ascii", "latin-1", "utf-8")), every=2)
)
def test_any_encoding_of_the_console_will_do(encoding: str, arguments: list[str]) -> None:
    code = f"from mt_train.cli import main; main({arguments!r})"
    done = run_python(code, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", str(TINY)], ["x"]])
def test_a_closed_console_is_no_traceback(arguments: list[str]) -> None:
    code = f"import sys; from mt_train.cli import main; main({arguments!r})"
    shell = ["sh", "-c", f'exec "{sys.executable}" -c "$1" >&- 2>/dev/null', "sh", code]
    assert subprocess.run(shell, check=False).returncode == (2 if arguments == ["x"] else 0)
    shell[2] = f'exec "{sys.executable}" -c "$1" 2>&1 >&-'
    done = subprocess.run(shell, check=False, capture_output=True, text=True)
    assert "Traceback" not in done.stdout


def test_a_pipe_that_is_closed_early_is_no_traceback() -> None:
    code = f"from mt_train.cli import main; main(['config', {str(TINY)!r}])"
    shell = ["sh", "-c", f'"{sys.executable}" -c "$1" | true', "sh", code]
    done = subprocess.run(shell, check=False, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_configuration_is_checked_without_torch() -> None:
    heavy = ("torch", "sympy", "zarr", "tokenizers", "numpy", "matplotlib")
    code = (
        "import sys; from mt_train.cli import _main\n"
        f"assert _main(['config', {str(TINY)!r}, 'pipeline.schedule=zb-h1']) == 0\n"
        f"sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


LAYERS = """\
model:
  hidden_size: 32
  layers:
    - mixer: {num_heads: 4, num_kv_heads: 2, head_dim: 8, rope: {theta: 1e4}}
      feed_forward: {ffn_size: 48}
      repeat: 2
    - mixer: {type: attention, num_heads: 2, num_kv_heads: 2, head_dim: 16}
data: {corpus: standard-library}
training: {steps: 2, global_batch_size: 4, micro_batch_size: 2, sequence_length: 16}
"""


def test_a_list_of_layers_with_repeats_is_the_model(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LAYERS)
    loaded = load_config(path)
    model = loaded.model(300)
    assert [layer.feed_forward is None for layer in model.layers] == [False, False, True]
    assert model.layers[0] == model.layers[1]
    for config in (loaded.config, loaded.resolved()):
        path.write_text(to_yaml(config))
        assert load_config(path).model(300) == model


def test_attention_in_a_list_has_the_defaults_of_the_model(tmp_path: Path) -> None:
    rest, found = LAYERS[LAYERS.index("data:") :], []
    for layers in (
        "num_layers: 1, num_heads: 4, ffn_size: 48",
        "layers: [{mixer: {num_heads: 4}, feed_forward: {ffn_size: 48}}]",
    ):
        path = tmp_path / "run.yaml"
        path.write_text(f"model: {{hidden_size: 32, {layers}}}\n{rest}")
        found.append(load_config(path).model(300))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "num_kv_heads: 2, head_dim: 8",
            "num_kv_head: 2, head_dim: 8",
            "run.yaml:4: model.layers[0]",
        ),
        ("repeat: 2", "repeat: 0", "run.yaml:6: model.layers[0].repeat: 0 is too small"),
        ("repeat: 2", "repeat: 4096", "model.layers: 4097 layers with their repeats; use at most"),
        (
            "type: attention",
            "type: atention",
            "model.layers[1].mixer.type: 'atention' is not known",
        ),
        (
            "hidden_size: 32",
            "hidden_size: 32\n  num_layers: 3",
            "model.num_layers: does not go with",
        ),
    ],
)
def test_a_wrong_list_of_layers_names_the_entry(
    before: str, after: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LAYERS.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)


def test_every_key_has_a_meaning_and_the_page_is_current() -> None:
    keys = [key for section in sections() for key in section.keys]
    assert [key.name for key in keys if len(key.meaning) < 10] == []
    assert all(section.text for section in sections())
    shown = yaml.safe_load(to_yaml(load_config(TINY).config))
    parts = {"lora": [item.name.rstrip("_") for item in dataclasses.fields(LoraSection)]}
    shown = {name: parts.get(name) if part is None else part for name, part in shown.items()}
    named = {f"{s}.{k}" for s, part in shown.items() for k in part} | {"plugins"}
    named |= {f"data.{key}" for kind in KINDS for key in kind.own_keys()}
    assert named == {key.name for key in keys} - ({f"model.{name}" for name in FIELDS} - named)
    written = (ROOT / "docs" / "mt-train-keys.md").read_text()
    page = runpy.run_path(str(KEY_PAGE))["page"]()
    assert written == page, (
        "run: python packages/mt-train/tools/key_page.py > docs/mt-train-keys.md"
    )
    assert "anneal" in explain(["optimizer.anneal"])


def test_the_default_bucket_is_that_of_the_buffer() -> None:
    fields = {item.name: item.default for item in dataclasses.fields(ParallelSection)}
    default = inspect.signature(GradBuffer).parameters["bucket_size"].default
    assert fields["bucket_size"] == default


@pytest.mark.parametrize(("name", "code"), [("run", 75), ("config", 130)])
def test_ctrl_c_while_modules_are_imported_is_one_line(
    name: str, code: int, tmp_path: Path
) -> None:
    interrupts = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    swallowed = f"try:\n    {interrupts}\nexcept BaseException: pass\n"
    (tmp_path / "tyro.py").write_text(swallowed)
    done = subprocess.run(
        [sys.executable, "-m", "mt_train", name, str(TINY)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = "mt-train: stopped by a signal before anything was done\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
