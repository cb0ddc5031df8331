"""What a new user does in the first two weeks, with the commands as typed."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import time
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

MODEL = """\
model: {hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 64}
training: {steps: 6, global_batch_size: 8, micro_batch_size: 4, sequence_length: 32, dtype: fp32}
optimizer: {lr: 3e-3, warmup: 2}
evaluation: {max_windows: 8}
"""
ROOT = Path(__file__).parents[2]
WORDS = ("old", "new", "red", "blue", "house", "river", "walks", "sings", "slowly", "again")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    output: str
    errors: str


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A user's folder, and commands typed there."""

    folder: Path
    programs: Path

    def start(self, typed: str) -> subprocess.Popen[str]:
        """Start a command line as a shell would, without globbing: `data.glob=**/*.txt`."""
        program, *words = shlex.split(typed)
        found = self.programs / program  # one that has imported torch, if it is of ours
        command = [str(found), *words]
        if program == "torchrun":
            command = [str(self.programs / "python"), "-m", "torch.distributed.run", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, **pipes)

    def type(self, typed: str, *, code: int = 0) -> Said:
        """Run a command line to its end and demand its exit code."""
        with self.start(typed) as process:
            output, errors = process.communicate(timeout=150)
        assert process.returncode == code, f"$ {typed}\n{output}\n{errors}"
        assert "Traceback" not in errors, errors
        return Said(code=process.returncode, output=output, errors=errors)

    def wait_for_step(self, process: subprocess.Popen[str], run: str, step: int = 1) -> None:
        """Wait until a run has written a step to its metrics."""
        deadline = time.monotonic() + 100
        while max(self.losses(run), default=0) < step:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def losses(self, run: str) -> dict[int, float]:
        """Return the loss of every step in a run's metrics."""
        path = self.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def saved(self, run: str) -> list[int]:
        """Return the steps of a run's checkpoints."""
        folders = (self.folder / run / "checkpoints").glob("step_*")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)


@pytest.fixture
def shell(tmp_path, programs) -> Shell:
    (tmp_path / "my.yaml").write_text(MODEL)
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for number in range(10):
        (tmp_path / "texts" / "more" / f"{number}.txt").write_text(text(number))
    return Shell(folder=tmp_path, programs=programs.folder)


def text(seed: int) -> str:
    chance = random.Random(seed)
    return "\n".join(" ".join(chance.choices(WORDS, k=8)) for _ in range(40))


def as_jsonl(seeds: range) -> bytes:
    return "".join(json.dumps({"text": text(seed)}) + "\n" for seed in seeds).encode()


OWN = "data.corpus=texts data.glob=**/*.txt data.vocab_size=300 data.validation_fraction=0.2"


def test_own_folder_of_texts(shell) -> None:
    shell.type(f"mt-train run my.yaml {OWN} --out runs/mine")
    said = shell.type("mt-infer generate runs/mine --prompt 'old house' --max-tokens 8 --greedy")
    assert len(said.output.strip()) > 3
    assert shell.saved("runs/mine") == [6]


def test_compressed_lines_of_json(shell) -> None:
    (shell.folder / "notes.jsonl.gz").write_bytes(gzip.compress(as_jsonl(range(20))))
    built = shell.type("mt-data build notes.jsonl.gz --out data/notes --vocab-size 300")
    assert "20 documents" in built.output
    assert "<|eod|>" in built.output + built.errors
    shell.type("mt-data peek data/notes --count 1")
    data = "data.train=[data/notes] data.tokenizer=data/notes.tokenizer.json"
    shell.type(f"mt-train run my.yaml {data} --out runs/notes")
    assert max(shell.losses("runs/notes")) == 6


def test_parquet(shell) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [text(seed) for seed in range(20)], "id": list(range(20))})
    pyarrow.parquet.write_table(table, shell.folder / "notes.parquet", row_group_size=7)
    built = shell.type("mt-data build notes.parquet --out data/notes --vocab-size 300")
    assert "20 documents" in built.output
    data = "data.train=[data/notes] data.tokenizer=data/notes.tokenizer.json"
    shell.type(f"mt-train run my.yaml {data} --out runs/notes")


def test_two_data_sets_whose_weights_change_on_the_way(shell) -> None:
    (shell.folder / "a.jsonl").write_bytes(as_jsonl(range(10)))
    (shell.folder / "b.jsonl").write_bytes(as_jsonl(range(10, 20)))
    shell.type("mt-data build a.jsonl --out data/a --vocab-size 300")
    shell.type("mt-data build b.jsonl --out data/b --tokenizer data/a.tokenizer.json")
    data = "data.train=[data/a,data/b] data.tokenizer=data/a.tokenizer.json"
    shell.type(f"mt-train run my.yaml {data} data.weights=[0.5,0.5] --out runs/two")
    before = shell.losses("runs/two")
    more = "data.weights=[0.2,0.8] training.steps=9"
    said = shell.type(f"mt-train run my.yaml {data} {more} --out runs/two")
    assert "data.weights" in said.output + said.errors
    after = shell.losses("runs/two")
    assert {step: after[step] for step in before} == before
    assert max(after) == 9


def test_fine_tuning_on_other_data_and_length(shell) -> None:
    shell.type(f"mt-train run my.yaml {OWN} --out runs/base")
    (shell.folder / "mine.jsonl").write_bytes(as_jsonl(range(50, 60)))
    tokenizer = "runs/base/tokenizer.json"
    shell.type(f"mt-data build mine.jsonl --out data/mine --tokenizer {tokenizer}")
    tune = (
        f"mt-train run my.yaml data.train=[data/mine] data.tokenizer={tokenizer} "
        "training.sequence_length=64 training.global_batch_size=4 optimizer.lr=1e-4 "
        "checkpoint.load=runs/base --out runs/tuned"
    )
    refused = shell.type(tune, code=1)
    assert "checkpoint.load_mode" in refused.errors
    shell.type(f"{tune} checkpoint.load_mode=weights")
    tuned, base = shell.losses("runs/tuned"), shell.losses("runs/base")
    assert max(tuned) == 6
    assert tuned[1] < base[1] - 0.3  # it starts from what was learnt


def test_a_kill_without_a_word_about_checkpoints(shell) -> None:
    run = f"mt-train run my.yaml {OWN} training.steps=100000 --out runs/long"
    with shell.start(run) as process:
        shell.wait_for_step(process, "runs/long", 20)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 75
    (step,) = shell.saved("runs/long")
    assert step == max(shell.losses("runs/long"))
    shell.type(f"{run} training.steps={step + 2}")
    assert sorted(shell.losses("runs/long")) == list(range(1, step + 3))


def test_two_runs_in_one_folder(shell) -> None:
    run = f"mt-train run my.yaml {OWN} training.steps=100000 --out runs/one"
    with shell.start(run) as first:
        shell.wait_for_step(first, "runs/one")
        config = (shell.folder / "runs/one/config.yaml").read_text()
        second = shell.type(f"{run} optimizer.lr=1e-5", code=1)
        assert re.search(r"process \d+ on \S+ \(", second.errors)
        assert first.poll() is None
        assert (shell.folder / "runs/one/config.yaml").read_text() == config
        first.terminate()
        first.communicate(timeout=60)
    assert first.returncode == 75
    losses = shell.losses("runs/one")
    assert sorted(losses) == list(range(1, max(losses) + 1))


@pytest.mark.parametrize("nproc", [1, 2])
def test_ctrl_c_twice(shell, nproc) -> None:
    run = f"mt-train run my.yaml {OWN} training.steps=100000 --nproc {nproc} --out runs/mine"
    with shell.start(run) as process:
        shell.wait_for_step(process, "runs/mine", 3)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 75
    assert "Traceback" not in errors
    shell.type(f"{run} training.steps={max(shell.losses('runs/mine'), default=0) + 1}")


def test_going_on_with_another_batch_size(shell) -> None:
    run = f"mt-train run my.yaml {OWN} --out runs/mine"
    shell.type(run)
    said = shell.type(f"{run} training.global_batch_size=16 training.steps=8")
    assert "training.global_batch_size" in said.output + said.errors
    assert sorted(shell.losses("runs/mine")) == list(range(1, 9))


def test_generating_from_a_chosen_step(shell) -> None:
    shell.type(f"mt-train run my.yaml {OWN} checkpoint.every=3 checkpoint.keep=5 --out runs/mine")
    assert shell.saved("runs/mine") == [3, 6]
    generate = "mt-infer generate runs/mine --prompt 'old house' --max-tokens 16 --seed 1"
    early, late = (shell.type(f"{generate} --step {step}").output for step in (3, 6))
    assert late == shell.type(generate).output
    assert early != late
    missing = shell.type(f"{generate} --step 4", code=1)
    assert "3, 6" in missing.errors


def test_token_files_of_megatron_without_a_tokenizer(shell) -> None:
    write_tokens(shell.folder / "tokens", documents=40, vocab_size=500)
    data = "data.train=[tokens] data.split=90,10,0 data.order=megatron"
    refused = shell.type(f"mt-train run my.yaml {data} --out runs/ids", code=2)
    assert "data.tokenizer: missing" in refused.errors
    assert "model.vocab_size" in refused.errors
    shell.type(f"mt-train run my.yaml {data} model.vocab_size=512 --out runs/ids")
    rows = (shell.folder / "runs/ids/metrics.jsonl").read_text().splitlines()
    assert "val_loss" in rows[-1]
    assert "bits_per_byte" not in rows[-1]
    said = shell.type("mt-infer generate runs/ids --prompt a", code=1)
    assert "tokenizer" in said.errors


def test_an_exported_run_goes_on_and_replaces_only_its_own_export(shell) -> None:
    write_tokens(shell.folder / "tokens", documents=20, vocab_size=200)
    typed = "mt-train run my.yaml data.train=[tokens] model.vocab_size=256 export.hugging_face=hf"
    shell.type(f"{typed} --out runs/ids training.steps=2")
    before = (shell.folder / "hf/model.safetensors").read_bytes()
    memory = shell.type(f"{typed.replace('run', 'memory', 1)}")
    assert "fits in 24, 40, 80, 141 and 192 GB" in memory.output
    shell.type(f"{typed} --out runs/ids training.steps=3")
    assert (shell.folder / "hf/model.safetensors").read_bytes() != before
    (shell.folder / "hf/notes.txt").write_text("mine")
    refused = shell.type(f"{typed} --out runs/ids training.steps=4", code=2)
    assert "export.hugging_face" in refused.errors


@pytest.mark.campaign  # mt-train has the verdict of a table, in less time
def test_a_memory_verdict_names_a_change_that_helps(shell) -> None:
    (shell.folder / "large.yaml").write_text(
        "model: {preset: llama3.2-1b}\ndata: {corpus: texts, glob: '**/*.txt'}\n"
        "training: {steps: 1, global_batch_size: 1, micro_batch_size: 1, sequence_length: 4096}\n"
    )
    said = shell.type("mt-train memory large.yaml").output.splitlines()
    assert "not in 24" in said[-2]
    advice = re.search(r"For 24 GB: (training\.recompute=\w+) needs ([\d.]+) GiB", said[-1])
    followed = shell.type(f"mt-train memory large.yaml {advice[1]}").output
    assert f"The largest rank needs {advice[2]} GiB: fits in 24" in followed


@pytest.mark.parametrize("layers", [2, pytest.param(30, marks=pytest.mark.campaign)])
def test_a_published_model_is_tuned_and_exported(shell, published_model, layers) -> None:
    page = (ROOT / "docs/published-model.md").read_text()
    (shell.folder / "tuned.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    shutil.copytree(ROOT / "docs/decisions", shell.folder / "docs")
    folder, small = shell.folder / "models/smollm2", ""
    folder.parent.mkdir()
    if layers == 30:
        folder.symlink_to(published_model)
    else:  # its first layers, with fewer and shorter sequences
        cut(published_model, folder, layers)
        small = "training.steps=2 training.global_batch_size=2 training.sequence_length=32"
    shell.type(f"mt-train run tuned.yaml --out runs/tuned {small}")
    losses = list(shell.losses("runs/tuned").values())
    assert len(losses) == (2 if small else 20)
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        exported = shell.folder / "models/tuned" / name
        assert exported.read_bytes() == (published_model / name).read_bytes()
    prompt = "--prompt 'The capital of France is' --max-tokens 6 --greedy"
    said = shell.type(f"mt-infer generate models/tuned {prompt}").output
    assert said.strip()
    if not small:
        assert sum(losses[-5:]) < sum(losses[:5])
        assert "Paris" in said


def cut(folder: Path, out: Path, layers: int) -> None:
    """Copy a folder with its first layers only."""
    from safetensors.torch import load_file

    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    number = re.compile(r"model\.layers\.(\d+)\.")
    kept = {n: t for n, t in tensors.items() if not (m := number.match(n)) or int(m[1]) < layers}
    save_tensors(kept, out)
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


@pytest.mark.campaign  # docs/mt-train.md has these commands
def test_an_own_mixer_trains_on_two_ranks_resumes_and_generates(shell, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(shell.folder / "home"))  # where plugins that ran are noted
    for name in ("my_mixer.py", "my_mixer.yaml"):
        shutil.copy(ROOT / "packages/mt-train/examples" / name, shell.folder)
    run = f"mt-train run my_mixer.yaml {OWN} parallel.tp=2 --nproc 2 --out runs/mine"
    shell.type(f"{run} training.steps=2")
    assert "continuing from" in shell.type(f"{run} training.steps=3").output
    assert sorted(shell.losses("runs/mine")) == [1, 2, 3]
    shell.type("mt-infer generate runs/mine --prompt 'old house' --max-tokens 4 --greedy")
    memory = shell.type(f"mt-train memory my_mixer.yaml {OWN} parallel.tp=2")
    assert "mixer.up" in memory.output
    with (shell.folder / "my_mixer.py").open("a") as file:
        file.write("# changed\n")
    refused = shell.type("mt-infer generate runs/mine --prompt 'old house'", code=1)
    assert "my_mixer.py has changed" in refused.errors


def test_where_a_step_goes(shell) -> None:
    shell.type(f"mt-train run my.yaml {OWN} 'training.profile={{steps: [2, 3]}}' --out runs/mine")
    said = shell.type("mt-train profile runs/mine/profile/rank_0_steps_2_to_3.json")
    assert said.output.startswith("2 steps, ")
    for section in ("forward", "backward", "optimizer", "aten::"):
        assert section in said.output
    wrong = shell.type("mt-train profile runs/mine/config.yaml", code=1)
    assert "config.yaml" in wrong.errors


def test_torchrun_starts_a_killed_rank_again(shell, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{shell.programs}{os.pathsep}{os.environ['PATH']}")
    run = f"mt-train run my.yaml {OWN} parallel.tp=2 training.steps=20 checkpoint.every=2"
    start = "torchrun --no-python --standalone --max-restarts 1 --nproc-per-node 2"
    with shell.start(f"{start} {run} --out runs/mine") as process:
        shell.wait_for_step(process, "runs/mine", 4)
        os.kill(json.loads((shell.folder / "runs/mine/.lock").read_text())["pid"], signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "continuing from" in output
    assert sorted(shell.losses("runs/mine")) == list(range(1, 21))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, programs) -> Path:
    """The folder of Hugging Face of a run of a few steps."""
    shell = Shell(folder=tmp_path_factory.mktemp("exported"), programs=programs.folder)
    (shell.folder / "my.yaml").write_text(MODEL)
    (shell.folder / "texts").mkdir()
    (shell.folder / "texts/0.txt").write_text(text(0))
    shell.type(f"mt-train run my.yaml {OWN} export.hugging_face=hf")
    return shell.folder / "hf"


def test_an_id_of_the_hub_without_a_network(shell, exported, monkeypatch) -> None:
    shutil.copytree(exported, shell.folder / "hf")
    monkeypatch.setenv("HF_HUB_CACHE", str(shell.folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    generate = "mt-infer generate acme/tiny --prompt 'old house' --max-tokens 4 --greedy"
    train = f"mt-train run my.yaml {OWN} 'model={{from: acme/tiny}}' training.steps=2"
    tokens = "data.tokenizer=hf/tokenizer.json training.steps=2"
    taught = f"mt-train run my.yaml {OWN} {tokens} distillation.teacher=acme/tiny --out runs/taught"
    imported = "mt-hf import acme/tiny runs/tiny"
    for typed, code in ((generate, 1), (imported, 2), (train, 2), (taught, 2)):
        said = shell.type(typed, code=code)
        assert "hf download acme/tiny" in said.errors
        assert said.errors.count("\n") == 1
    own = shell.folder / "cache/models--acme--tiny"
    shutil.copytree(exported, own / "snapshots/0123abc")
    (own / "refs").mkdir()
    (own / "refs/main").write_text("0123abc")
    assert len(shell.type(generate).output.strip()) > 3
    for typed in (train, taught, imported):
        shell.type(typed)


def test_a_folder_with_nan_is_named_by_tensor_and_file(shell, exported) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(exported, shell.folder / "hf")
    path = shell.folder / "hf/model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 3] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    for typed, code in (
        ("mt-infer generate hf --prompt 'old house'", 1),
        ("mt-hf import hf runs/hf", 1),
        ("mt-infer quantize hf low --recipe int8", 1),
        (f"mt-train run my.yaml {OWN} 'model={{from: hf}}'", 1),
    ):
        said = shell.type(typed, code=code)
        assert name in said.errors
        assert "model.safetensors" in said.errors


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_a_folder_that_another_tool_quantised(shell, exported, tool) -> None:
    write = {"compressed-tensors": packed_int4, "modelopt": modelopt_fp8}[tool]
    tensors = write_low(exported, shell.folder / "low", write)
    generate = "--prompt 'old house' --max-tokens 8 --greedy"
    said = shell.type(f"mt-infer generate low {generate}")
    if tool == "compressed-tensors":  # rounds weights alone, so a plain model has the same values
        assert said.output == shell.type(f"mt-infer generate low-plain {generate}").output
    assert len(said.output.strip()) > 3
    tune = "training.steps=2 export.hugging_face=tuned --out runs/tuned"
    shell.type(f"mt-train run my.yaml {OWN} 'model={{from: low}}' {tune}")
    assert "quantization_config" not in (shell.folder / "tuned/config.json").read_text()
    lost = next(name for name in tensors if name.endswith("o_proj.weight_scale"))
    save_tensors({n: t for n, t in tensors.items() if n != lost}, shell.folder / "low")
    damaged = shell.type(f"mt-infer generate low {generate}", code=1).errors
    assert all(word in damaged for word in lost.rsplit(".", 1))


def save_tensors(tensors, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_low(folder: Path, out: Path, write):
    """Write a quantised copy of a folder, and `out-plain` with the same values; no code of ours."""
    from safetensors.torch import load_file

    plain, low = load_file(folder / "model.safetensors"), {}
    for name, weight in plain.items():
        if name.endswith("_proj.weight"):
            made, config, plain[name] = write(weight)
            low |= {name.removesuffix("weight") + part: value for part, value in made.items()}
        else:
            low[name] = weight
    for target, tensors in ((out, low), (Path(f"{out}-plain"), plain)):
        shutil.copytree(folder, target)
        save_tensors(tensors, target)
    described = json.loads((out / "config.json").read_text())
    described["quantization_config"] = {**config, "ignore": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(described))
    return low


def packed_int4(weight):
    """Round to 4 bits in groups of 16 inputs, eight codes in an int32, as llm-compressor writes."""
    import torch

    groups = weight.unflatten(1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    places = 4 * torch.arange(8)
    packed = ((codes.flatten(1).long() + 8).unflatten(1, (-1, 8)) << places).sum(-1)
    parts = {
        "weight_packed": packed.to(torch.uint32).view(torch.int32),
        "weight_scale": scale.squeeze(-1).contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    rule = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": rule, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return parts, config | {"config_groups": {"group_0": group}}, (codes * scale).flatten(1)


def modelopt_fp8(weight):
    """Round to FP8 with one scale, and one for the inputs, as NVIDIA's ModelOpt writes."""
    import torch

    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.05)}
    return parts, {"quant_method": "modelopt", "quant_algo": "FP8"}, codes.float() * scale


def write_tokens(prefix: Path, *, documents: int, vocab_size: int) -> None:
    """Write a `.bin/.idx` pair by the table of Megatron-LM's format, without our own writer."""
    chance = random.Random(0)
    lengths = [chance.randrange(40, 90) for _ in range(documents)]
    tokens = array("H", (chance.randrange(vocab_size) for _ in range(sum(lengths))))
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1)
    starts = [2 * start for start in accumulate(lengths[:-1], initial=0)]
    body = array("i", lengths).tobytes() + array("q", starts).tobytes()
    prefix.with_suffix(".idx").write_bytes(
        header + body + array("q", range(documents + 1)).tobytes()
    )
