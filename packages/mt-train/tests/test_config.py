"""Broken configurations: one clear message with file:line and a way out, never a traceback."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from mt_model import MoEConfig, RopeConfig
from mt_train import ConfigError, load_config, to_yaml
from mt_train.cli import main
from mt_train.config.other_names import other_names
from mt_train.keys import sections

TINY = Path(__file__).parents[1] / "examples" / "tiny.yaml"

MINIMAL = """\
model:
  hidden_size: 64
  num_layers: 2
  num_heads: 4
data:
  corpus: standard-library
training:
  steps: 2
  global_batch_size: 4
  micro_batch_size: 2
  sequence_length: 16
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, overrides: list[str] | None = None) -> list[str]:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [str(problem).replace(str(path), "run.yaml") for problem in caught.value.problems]


def run_cli(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0), capsys.readouterr().err


BROKEN = {
    "typo": (
        MINIMAL + "parallel:\n  tpp: 2\n",
        "run.yaml:13: parallel.tpp: unknown key. Did you mean parallel.tp?",
    ),
    "name of another framework": (
        MINIMAL + "parallel:\n  tensor_model_parallel_size: 2\n",
        "run.yaml:13: parallel.tensor_model_parallel_size: unknown key. Use parallel.tp",
    ),
    "wrong type": (
        MINIMAL.replace("steps: 2", "steps: many"),
        "run.yaml:8: training.steps: expected an integer, found 'many'",
    ),
    "missing file": (
        MINIMAL.replace("standard-library", "no/such/folder"),
        "run.yaml:6: data.corpus: ",
    ),
    "duplicate key": (
        MINIMAL + "  steps: 3\n",
        "run.yaml:12: training.steps: this key is already set on line 8; keep one of the two",
    ),
    "negative steps": (
        MINIMAL.replace("steps: 2", "steps: -2"),
        "run.yaml:8: training.steps: -2 is too small; use 1 or more",
    ),
    "tab": (
        MINIMAL.replace("  steps: 2", "\tsteps: 2"),
        "run.yaml:8: a tab is used for indentation; YAML allows spaces only; use two spaces",
    ),
    "empty file": ("", "run.yaml:1: the file is empty"),
    "quoted number": (
        MINIMAL.replace("steps: 2", "steps: '2'"),
        "run.yaml:8: training.steps: expected an integer, found '2' (remove the quotes)",
    ),
    "alias": (
        MINIMAL.replace("steps: 2", "steps: &n 2"),
        "run.yaml:8: anchors and aliases (`n`) are not supported; write the value out",
    ),
    "tag": (MINIMAL.replace("steps: 2", "steps: !!int 2"), "run.yaml:8: the tag"),
    "list root": ("- a\n", "run.yaml:1: expected a mapping of sections"),
    "section is text": (
        MINIMAL + "parallel: two\n",
        "run.yaml:12: parallel: expected a mapping, found 'two'",
    ),
    "indivisible batch": (
        MINIMAL.replace("micro_batch_size: 2", "micro_batch_size: 3"),
        "run.yaml:10: training.micro_batch_size: 3 does not divide",
    ),
    "recomputation of compiled stages": (
        MINIMAL + "  recompute: selective\n  compile: true\n",
        "run.yaml:12: training.recompute: 'selective' does not go with training.compile",
    ),
    "a plan of compiled stages": (
        MINIMAL + "  recompute: {rules: [{modules: [mixer]}]}\n  compile: true\n",
        "run.yaml:12: training.recompute: a plan of modules does not go with training.compile",
    ),
    "a plan of no layers": (
        MINIMAL + "  recompute: {rules: [{first: 0}]}\n",
        "run.yaml:12: training.recompute.rules[0].first: 0 is too small",
    ),
    "unknown choice": (
        MINIMAL + "optimizer:\n  schedule: cosin\n",
        "run.yaml:13: optimizer.schedule: 'cosin' is not one of constant, linear, cosine, "
        "inverse-sqrt, wsd. Did you mean cosine?",
    ),
    "a setting of muon for another optimizer": (
        MINIMAL + "optimizer:\n  name: lion\n  muon_tp: blockwise\n",
        "run.yaml:14: optimizer.muon_tp: blockwise does not go with optimizer.name lion; leave it "
        "out, or use muon or adaptive_muon",
    ),
    "momentum of adamw": (
        MINIMAL + "optimizer:\n  momentum: 0.9\n",
        "run.yaml:13: optimizer.momentum: 0.9 does not go with optimizer.name adamw; leave it out, "
        "or use sgd or muon",
    ),
    "a format of moments that there is not": (
        MINIMAL + "optimizer:\n  moments_dtype: int8\n",
        "run.yaml:13: optimizer.moments_dtype: 'int8' is not one of full, fp32, bf16, fp16, fp8",
    ),
    "remainders of weights that lack nothing": (
        MINIMAL + "  dtype: fp32\noptimizer:\n  masters: remainder\n",
        "run.yaml:14: optimizer.masters: remainder is what bf16 weights lack, and training.dtype "
        "is fp32; use masters full, or dtype bf16",
    ),
    "more than all of the states on the host": (
        MINIMAL + "optimizer:\n  offload: 1.5\n",
        "run.yaml:13: optimizer.offload: 1.5 is too large; use 1 or less",
    ),
    "a folder for states that nobody offloads": (
        MINIMAL + "optimizer:\n  offload_dir: .\n",
        "run.yaml:13: optimizer.offload_dir: '.' stays empty with optimizer.offload 0; set offload "
        "to a share above 0, or leave offload_dir out",
    ),
    "a folder for states that is not there": (
        MINIMAL + "optimizer:\n  offload: 0.5\n  offload_dir: nowhere\n",
        "run.yaml:14: optimizer.offload_dir: ",
    ),
    "a folder for states that is none": (
        MINIMAL + "optimizer:\n  offload: 0.5\n  offload_dir: /dev/null\n",
        "run.yaml:14: optimizer.offload_dir: '/dev/null' is no folder",
    ),
    "rules of quantization that are not there": (
        MINIMAL + "quantization:\n  config: nowhere.yaml\n",
        "run.yaml:13: quantization.config: ",
    ),
    "a look ahead without momentum": (
        MINIMAL + "optimizer:\n  name: sgd\n  momentum: 0\n  nesterov: true\n",
        "run.yaml:15: optimizer.nesterov: true needs an optimizer.momentum above 0",
    ),
    "an override that overrides nothing": (
        MINIMAL + "optimizer:\n  overrides:\n    - names: embedding.*\n",
        "run.yaml:14: optimizer.overrides[0]: an override needs lr_scale, ",
    ),
    "an override with a slip": (
        MINIMAL + "optimizer:\n  overrides:\n    - {names: a, lr_scal: 1}\n",
        "run.yaml:14: optimizer.overrides[0].lr_scal: unknown key. Did you mean "
        "optimizer.overrides[0].lr_scale?",
    ),
    "a decay that ends nowhere": (
        MINIMAL + "optimizer:\n  weight_decay_schedule: cosine\n",
        "run.yaml:12: optimizer.weight_decay_end: missing; optimizer.weight_decay_schedule goes "
        "there, or leave that out",
    ),
    "a decay that stays and ends elsewhere": (
        MINIMAL + "optimizer:\n  weight_decay_end: 0.3\n",
        "run.yaml:13: optimizer.weight_decay_end: 0.3 is not optimizer.weight_decay 0.1, and "
        "optimizer.weight_decay_schedule is constant; use linear or cosine",
    ),
    "a clip of scores that norms bound": (
        MINIMAL.replace("num_heads: 4", "num_heads: 4\n  qk_norm: head")
        + "optimizer:\n  qk_clip: {threshold: 50}\n",
        "run.yaml:14: optimizer.qk_clip: does not go with model.qk_norm, whose norms undo what it",
    ),
    "tokens that see what they are to predict": (
        MINIMAL.replace("num_heads: 4", "num_heads: 4\n  causal: false"),
        "run.yaml:5: model.causal: false lets tokens see those that they are to predict; leave it",
    ),
    "a share of a clip that is none": (
        MINIMAL + "optimizer:\n  qk_clip: {alpha: 2}\n",
        "run.yaml:13: optimizer.qk_clip.alpha: 2.0 is too large; use 1 or less",
    ),
    "muP for muon": (
        MINIMAL + "optimizer:\n  name: muon\n  width_multiplier: 4\n",
        "run.yaml:14: optimizer.width_multiplier: 4.0 does not go with optimizer.name muon; leave "
        "it out, or use adamw or adam or sgd or lion",
    ),
    "fp16 without a loss scale": (
        MINIMAL + "  dtype: fp16\n",
        "run.yaml:12: training.dtype: fp16 needs optimizer.loss_scale, as small gradients are zero "
        "without: dynamic, or a number such as 65536; or use dtype bf16",
    ),
    "a loss scale for bf16": (
        MINIMAL + "optimizer:\n  loss_scale: dynamic\n",
        "run.yaml:13: optimizer.loss_scale: dynamic does not go with training.dtype bf16, which "
        "holds gradients as small as fp32 does; leave it out, or use dtype fp16",
    ),
    "a loss scale that is none": (
        MINIMAL + "  dtype: fp16\noptimizer:\n  loss_scale: auto\n",
        "run.yaml:14: optimizer.loss_scale: ",
    ),
    "a first scale below the smallest": (
        MINIMAL + "  dtype: fp16\noptimizer: {loss_scale: {initial: 2, minimum: 4}}\n",
        "run.yaml:13: optimizer.loss_scale: initial 2.0 is below minimum 4.0",
    ),
    "a norm group without a norm": (
        MINIMAL + "optimizer:\n  norm_groups:\n    - {names: 'layers.*', max_norm: 0}\n",
        "run.yaml:14: optimizer.norm_groups[0]: max_norm must be positive",
    ),
    "inner groups that do not divide": (
        MINIMAL + "parallel:\n  cp: 4\n  cp_algorithm: hierarchical\n  cp_inner: 3\n",
        "run.yaml:15: parallel.cp_inner: 3 does not divide parallel.cp 4, which the hierarchical "
        "algorithm needs; use one of 1, 2, 4",
    ),
    "an unknown algorithm for a layer": (
        MINIMAL + "parallel:\n  cp: 2\n  cp_algorithm: [ring, star]\n",
        "run.yaml:14: parallel.cp_algorithm[1]: 'star' is not one of ring, all_gather, ulysses, "
        "hierarchical.",
    ),
    "a sequence that context parallelism cannot cut": (
        MINIMAL + "parallel:\n  cp: 5\n",
        "run.yaml:11: training.sequence_length: 16 is not divisible by 10, which parallel.tp 1 "
        "with sequence_parallel=false and parallel.cp 5 need; use 10 or 20",
    ),
    "number too large": (
        MINIMAL.replace("steps: 2", "steps: 99999999999999999999"),
        "run.yaml:8: training.steps: expected an integer",
    ),
    "list item": (
        MINIMAL + "optimizer:\n  betas:\n    - 0.9\n    - high\n",
        "run.yaml:15: optimizer.betas[1]: expected a number, found 'high'",
    ),
    "unknown schedule": (
        MINIMAL + "pipeline:\n  schedule: zb-h3\n",
        "run.yaml:13: pipeline.schedule: 'zb-h3' is no schedule. Did you mean zb-h",
    ),
    "two numbers of stages": (
        MINIMAL + "parallel:\n  pp: 2\npipeline:\n  stages: 4\n",
        "run.yaml:15: pipeline.stages: 4 contradicts parallel.pp 2; leave one of them out",
    ),
    "heads": (
        MINIMAL.replace("num_heads: 4", "num_heads: 5"),
        "run.yaml:2: model.hidden_size: 64 does not divide by num_heads=5",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gives_one_message_with_place_and_way_out(name: str, tmp_path: Path) -> None:
    text, expected = BROKEN[name]
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_an_unknown_preset_is_suggested(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, MINIMAL.replace("hidden_size: 64", "preset: gpt2-xk"))
    assert found.startswith("run.yaml:2: model.preset: ")
    assert "gpt2-xl" in found


def test_all_problems_are_reported_in_one_pass(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps: 2", "steps: -1").replace("num_heads: 4", "num_heds: 4")
    found = problems(tmp_path, text + "optimizer:\n  lr: fast\n  epss: 1\n")
    assert [line.split(": ")[1] for line in found] == [
        "model.num_heds",
        "training.steps",
        "optimizer.lr",
        "optimizer.epss",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.rope={thete: 1.0}", "model.rope.thete: unknown key. Did you mean model.rope.theta"),
        ("model.rope.fraction=2", "model.rope.fraction: 2.0 is too large; use 1 or less"),
        ("model.rope.scaling={factor: 2.0}", "model.rope.scaling.type: missing; add `type:`"),
        ("model.rope={sections: [1, 2, 3]}", "model.head_dim: 16: rope.sections (1, 2, 3) are"),
        ("model.score_bias={type: alibbi}", "model.score_bias.type: 'alibbi' is not known here"),
        ("model.score_bias={type: relative, buckets: 1}", "model.score_bias.buckets: 1 is too sm"),
        ("model.chunk=0", "model.chunk: 0 is too small; use 1 or more"),
        ("model.temperature={strength: 0}", "model.temperature.strength: 0.0 must be greater"),
    ],
)
def test_positions_are_checked_by_their_paths(override: str, expected: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, MINIMAL, [override])
    assert expected in found


def test_the_short_form_of_rope_and_the_long_one_are_alike(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    short = load_config(path, ["model.rope_theta=5000"]).model(512)
    assert load_config(path, ["model.rope={theta: 5000}"]).model(512) == short
    assert short.layers[0].mixer.rope == RopeConfig(theta=5000.0)
    (found,) = problems(tmp_path, MINIMAL, ["model.rope_theta=5000", "model.rope={}"])
    assert "its theta is 10000.0, but rope_theta is 5000.0; say rope.theta" in found


def test_scientific_notation_is_a_float_and_no_is_not_a_bool(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "optimizer:\n  lr: 1e-4\n")).config
    assert config.optimizer.lr == 1e-4
    (found,) = problems(
        tmp_path, MINIMAL + "model_:\n".replace("model_", "parallel") + "  sequence_parallel: no\n"
    )
    assert "expected true or false, found 'no'" in found


def test_overrides_replace_values_and_are_blamed_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    config = load_config(
        path, ["training.steps=7", "parallel.tp=2", "optimizer.betas=[0.8, 0.9]"]
    ).config
    assert (config.training.steps, config.parallel.tp) == (7, 2)
    assert config.optimizer.betas == (0.8, 0.9)
    (found,) = problems(tmp_path, MINIMAL, ["training.stpes=7"])
    assert found.startswith("command line (training.stpes=7): training.stpes: unknown key")
    (found,) = problems(tmp_path, MINIMAL, ["training.steps"])
    assert "write section.key=value" in found


def test_the_resolved_yaml_loads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(TINY).config
    again = write(tmp_path, to_yaml(config))
    assert load_config(again).config == config


@pytest.mark.parametrize(
    ("overrides", "nproc", "expected"),
    [
        (["parallel.tp=3"], 3, "parallel.tp: vocab_size=512 does not divide by tp=3"),
        (["parallel.tp=2", "parallel.dp=2"], 2, "needs 4 processes, but there are 2"),
        (["parallel.tp=2"], 3, "parallel.tp: tp 2 x pp 1 x cp 1 needs 2 processes or a multiple"),
        (["parallel.cp=2"], 1, "parallel.cp: tp 1 x pp 1 x cp 2 needs 2 processes or a multiple, "),
        (["pipeline.stages=2"], 1, "pipeline.stages: tp 1 x pp 2 x cp 1 needs 2 processes"),
        (["parallel.cp=2", "parallel.cp_algorithm=[ring]"], 2, "1 algorithms for 4 layers; give"),
        (["parallel.cp=8", "parallel.cp_algorithm=ulysses"], 8, "ulysses shares 4 heads and 2 key"),
        (
            ["parallel.cp=2", "model.kernels={attention: flash}"],
            2,
            "model.kernels: flash needs whole",
        ),
        (["parallel.pp=8"], 8, "8 stages for 4 layers"),
        (["model.kernels={rope: torch}", "training.compile=true"], 1, "rope by torch is for eager"),
        (["training.recompute={offload: {layers: [9]}}"], 1, "layers: 9 is no layer; the model"),
        (["pipeline.stages=2", "pipeline.microbatches=3"], 2, "pipeline.microbatches: 3, but"),
        (["pipeline.stages=3", "pipeline.schedule=dualpipe"], 3, "pipeline.schedule: "),
        (["pipeline.stages=4", "pipeline.schedule=zb-v"], 4, "8 stages for 4 layers; every"),
        (["pipeline.stages=2", "pipeline.chunks=2"], 2, "pipeline.schedule: schedule '1f1b' has"),
        (["training.global_batch_size=6"], 4, "not divisible by micro_batch_size 2 x dp 4 = 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_process_starts(
    overrides: list[str], nproc: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = run_cli(["run", str(TINY), *overrides, "--nproc", str(nproc)], capsys)
    assert code == 2
    assert expected in message
    assert len(message.strip().splitlines()) == 1


def test_a_mistake_in_a_layout_is_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "pipeline.layout=Ett|tx|L"
    code, message = run_cli(["run", str(TINY), "pipeline.stages=2", layout, "--nproc", "2"], capsys)
    assert code == 2
    assert "pipeline.layout: layout, character 5" in message
    assert message.splitlines()[2].index("^") == message.splitlines()[1].index("x")
    code, message = run_cli(
        ["run", str(TINY), "pipeline.stages=2", "pipeline.layout=E|ttttL", "--nproc", "2"], capsys
    )
    assert code == 2
    assert "pipeline.layout: stage 0 has no layer" in message


def test_the_command_exits_with_2_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MINIMAL + "parallel:\n  tpp: 2\n")
    for command in ("run", "config"):
        code, message = run_cli([command, str(path)], capsys)
        assert code == 2
        assert message.startswith(f"{path}:13: parallel.tpp: unknown key")
        assert "Traceback" not in message


def test_config_prints_yaml_with_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", str(TINY), "training.steps=3"])
    assert caught.value.code == 0
    assert "steps: 3" in capsys.readouterr().out


def test_the_command_line_does_not_import_torch_to_answer_help() -> None:
    import subprocess

    code = "import sys, mt_train.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_files_and_a_wrong_model_are_reported_together_with_typos(tmp_path: Path) -> None:
    text = MINIMAL.replace("standard-library", "nowhere").replace("num_heads: 4", "num_heads: 5")
    found = problems(tmp_path, text + "checkpoint:\n  load: ~no-such-user/run\n")
    assert [line.split(": ")[1] for line in found] == [
        "data.corpus",
        "checkpoint.load",
        "model.hidden_size",
    ]
    found = problems(tmp_path, text + "optimizer:\n  epss: 1\n")
    assert [line.split(": ")[1] for line in found] == ["optimizer.epss", "data.corpus"]


def test_paths_become_absolute_from_the_file_or_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        (folder / "text.txt").write_text("words\n")
    path = write(here, MINIMAL.replace("standard-library", "text.txt"))
    monkeypatch.chdir(elsewhere)
    assert load_config(path).config.data.corpus == str(here / "text.txt")
    assert load_config(path, ["data.corpus=text.txt"]).config.data.corpus == str(
        elsewhere / "text.txt"
    )
    with pytest.raises(ConfigError, match="none does not exist; paths are relative to the working"):
        load_config(path, ["data.corpus=none"])


def test_an_override_does_not_go_through_a_value(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, MINIMAL, ["training.steps.count=7"])
    assert "training.steps is '2' (" in found
    assert "which has no 'count' in it" in found


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--nproc", "0"], {}, "command line: --nproc 0: use 1 or more"),
        ([], {"RANK": "0"}, "environment: WORLD_SIZE is not set"),
        (["parallel.order=tp-tp"], {}, "parallel.order"),
        (["--nproc", "3"], LAUNCHED, "which started 2 processes: leave --nproc out"),
    ],
)
def test_a_wrong_launch_is_one_line(
    arguments: list[str],
    environ: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, message = run_cli(["run", str(TINY), *arguments], capsys)
    assert code == 2
    assert expected in message
    assert len(message.strip().splitlines()) == 1


def test_what_fails_alike_on_every_rank_is_said_once_a_node() -> None:
    from types import SimpleNamespace

    from mt_train.cli import _as_rank
    from mt_train.data.corpus import OtherRankError
    from mt_train.session.saved import ResumeError

    def failing(error: Exception):
        def work() -> None:
            raise error

        return work

    first, second = SimpleNamespace(local_rank=0), SimpleNamespace(local_rank=1)
    assert _as_rank(failing(OtherRankError(is_config=True)), first) == 2
    assert _as_rank(failing(ConfigError([])), second) == 2
    assert _as_rank(failing(ResumeError()), second) == 1
    with pytest.raises(ConfigError):
        _as_rank(failing(ConfigError([])), first)
    with pytest.raises(OSError, match="disk"):  # this rank's own
        _as_rank(failing(OSError("disk")), second)


def test_a_file_that_is_no_tokenizer_is_blamed_on_its_line(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text("{}")
    text = MINIMAL.replace(
        "corpus: standard-library", "corpus: standard-library\n  tokenizer: words.json"
    )
    (found,) = problems(tmp_path, text)
    assert re.search(r"run.yaml:\d+: data.tokenizer: .*words.json", found)


@pytest.mark.parametrize(("speedup", "dtype"), [(0.3, "fp32"), (1.1, "fp32"), (2.3, "bf16")])
def test_a_quickstart_takes_bf16_where_products_are_clearly_faster(
    speedup: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mt_train import quickstart

    monkeypatch.setattr(quickstart.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(quickstart, "bf16_speedup", lambda: speedup)
    assert quickstart.load_quickstart(3).config.training.dtype == dtype


def test_a_quickstart_takes_changes(capsys: pytest.CaptureFixture[str]) -> None:
    from mt_train.quickstart import load_quickstart

    config = load_quickstart(3, 1, ["data.max_files=60", "training.dtype=fp32"]).config
    assert (config.data.max_files, config.training.dtype, config.training.steps) == (60, "fp32", 3)
    code, message = run_cli(["quickstart", "--steps", "3", "data.maxfiles=60"], capsys)
    assert code == 2
    assert "data.maxfiles: unknown key. Did you mean data.max_files?" in message


def test_what_a_quickstart_says_to_try_fits_its_model(tmp_path: Path) -> None:
    from mt_train.quickstart import load_quickstart, next_commands

    (tmp_path / "config.yaml").write_text(to_yaml(load_quickstart(None).config))
    run = next(command for command in next_commands(tmp_path) if command[:2] == ["mt-train", "run"])
    overrides = [word for word in run if "=" in word]
    assert "parallel.tp=2" in overrides
    load_config(Path(run[2]), overrides).check_world(int(run[run.index("--nproc") + 1]))


def test_the_speedup_of_bf16_is_that_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from mt_train.training.hardware import bf16_speedup

    clock, mm = [0.0], torch.Tensor.mm

    def timed(matrix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        clock[0] += 1.0 if matrix.dtype == torch.bfloat16 else 3.0
        return mm(matrix, other)

    monkeypatch.setattr("mt_train.training.hardware.time.thread_time", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "mm", timed)
    assert bf16_speedup(size=8) == 3.0


def test_the_processes_of_a_quickstart_share_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    code, message = run_cli(["quickstart", "--nproc", "3"], capsys)
    assert code == 2
    assert "--nproc: 3 processes cannot share 8 samples; use 1, 2, 4, 8" in message


T5 = Path(__file__).parents[1] / "examples/t5.yaml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "data={kind: text, corpus: standard-library}",
            "data.kind: text has nothing for the model",
        ),
        ("data.spans.density=0.6", "data.spans.density: 0.6 is too large"),
        ("data.spans.mean_length=0", "data.spans.mean_length: 0.0 is too small"),
        ("data.spans.decoder_length=9", "data.spans.decoder_length: 9 is too small for 3 spans of"),
        (
            "data.spans.sentinels=2",
            "data.spans.sentinels: 2 is too small for 3 spans in a sequence",
        ),
        ("model.vocab_size=600", "600 is below the tokenizer's and data.spans.sentinels together"),
        (
            "model.encoder_layers=6",
            "model.encoder_layers: 6 of 6 layers; the decoder has the others",
        ),
        ("model.decoder_start=-1", "model.decoder_start: -1 is too small"),
    ],
)
def test_spans_that_do_not_fit_the_model_are_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(T5, [override])
    assert expected in str(caught.value)


def test_spans_need_a_model_that_reads_them() -> None:
    with pytest.raises(ConfigError, match="spans, but the model has no encoder that would read"):
        load_config(T5.with_name("tiny.yaml"), ["data.spans={}"])


def test_ranks_must_share_the_sequences_of_the_decoder() -> None:
    options = ["parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true"]
    loaded = load_config(T5, [*options, "data.spans.decoder_length=20"])
    with pytest.raises(ConfigError, match=r"decoder_length: 20 is not divisible by 8.*use 24"):
        loaded.check_world(4)


def test_what_names_of_other_frameworks_lead_to_exists() -> None:
    keys = {key.name for section in sections() for key in section.keys}
    keys |= {f"model.moe.{item.name}" for item in dataclasses.fields(MoEConfig)}
    keys |= {"model.kernels.attention", "the"}  # the argument --out
    told = {re.split("[,: ]", each)[0] for each in other_names().values()}
    assert told <= keys
    assert len(other_names()) > 150
