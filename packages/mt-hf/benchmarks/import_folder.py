"""Reading a folder of Hugging Face against copying its tensors with safetensors.

    python packages/mt-hf/benchmarks/import_folder.py [--gigabytes 2] [--dtype bf16] [--rounds 5]

Makes a Llama of random weights in several files. `mt-hf import` is held to `load_file` and
`save_file` of safetensors, file by file, which end with the data synced to disk as ours do;
`from_pretrained` to `load_file` and a copy of each tensor in memory. Each way is a process of its
own, in turns; its time is that of the call, without imports, and its peak memory is less that of a
process that only imports. Pages of the files that are mapped count, as the system counts them. The
files were just written, so the system has them in memory. Prints ratios of speed, above 1 ours is
faster, and peaks over the bytes of the tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Torch is imported by the children alone: a child's peak begins at that of its parent.

SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32768}
SMOKE = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
FILE_SIZE = 500_000_000


def make_folder(folder: Path, asked: Path) -> None:
    """Write a folder as transformers does, as large as a file says."""
    import torch
    from safetensors.torch import save_file
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

    wanted = json.loads(asked.read_text())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[wanted["dtype"]]
    shape = SHAPE if wanted["bytes"] else SMOKE

    def model(layers: int) -> LlamaForCausalLM:
        config = LlamaConfig(**shape, **HEADS, num_hidden_layers=layers, dtype=dtype)
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    def count(layers: int) -> int:
        return dtype.itemsize * sum(param.numel() for param in model(layers).parameters())

    layers = max(1, round((wanted["bytes"] - count(0)) / (count(1) - count(0))))
    made = model(layers)
    files: list[dict[str, torch.Tensor]] = [{}]
    torch.manual_seed(0)
    for name, param in made.named_parameters():
        if sum(tensor.nbytes for tensor in files[-1].values()) > FILE_SIZE:
            files.append({})
        files[-1][name] = torch.empty(param.shape, dtype=dtype).uniform_(-0.02, 0.02)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    index = {"metadata": {"total_size": count(layers)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made.config.architectures = ["LlamaForCausalLM"]
    made.config.save_pretrained(folder)


def nothing(folder: Path, out: Path) -> None:
    """Do nothing."""
    del folder, out


def safetensors_copy(folder: Path, out: Path) -> None:
    """Copy all tensors into files of the same names."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for path in sorted(folder.glob("*.safetensors")):
        save_file(load_file(path), out / path.name)
    for path in (*out.iterdir(), out):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def safetensors_load(folder: Path, out: Path) -> None:
    """Copy all tensors into memory."""
    from safetensors.torch import load_file

    del out
    held: list[Any] = []
    for path in sorted(folder.glob("*.safetensors")):
        held += [tensor.clone() for tensor in load_file(path).values()]


def mt_import(folder: Path, out: Path) -> None:
    """What `mt-hf import` runs."""
    from mt_hf import import_pretrained

    import_pretrained(folder, out)


def mt_load(folder: Path, out: Path) -> None:
    """Make a model of the folder."""
    from mt_hf import from_pretrained

    del out
    from_pretrained(folder)


MAKE = "make the folder"
WAYS: dict[str, Callable[[Path, Path], None]] = {
    "import only": nothing,
    "safetensors, to disk": safetensors_copy,
    "mt-hf import": mt_import,
    "safetensors, to memory": safetensors_load,
    "from_pretrained": mt_load,
}
PAIRS = (
    ("mt-hf import", "safetensors, to disk"),
    ("from_pretrained", "safetensors, to memory"),
)


def here(way: str, folder: Path, out: Path) -> list[float]:
    """Take one way in this process; returns its seconds and the process's peak in bytes."""
    import mt_ckpt
    import mt_hf
    import mt_model
    import mt_tokenizer
    import safetensors.torch

    assert all((mt_ckpt, mt_tokenizer, mt_hf.import_pretrained, mt_model.GPT, safetensors.torch))
    started = time.perf_counter()
    {**WAYS, MAKE: make_folder}[way](folder, out)
    took = time.perf_counter() - started
    return [took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]


def in_child(way: str, folder: Path, out: Path) -> list[float]:
    """Take one way in a process of its own."""
    command = [sys.executable, __file__, "--child", way, str(folder), str(out)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return json.loads(done.stdout)


def measure(
    run: Callable[[str, Path, Path], list[float]], folder: Path, rounds: int
) -> dict[str, list[list[float]]]:
    """Take all ways in turns, the next one first in each round."""
    names, found = list(WAYS), {way: [] for way in WAYS}
    for turn in range(rounds):
        start = turn % len(names)
        for way in names[start:] + names[:start]:
            with tempfile.TemporaryDirectory(dir=folder.parent) as out:
                found[way].append(run(way, folder, Path(out) / "out"))
    return found


def main() -> None:
    """Run the comparison, print it and write what it found."""
    from mt_testing import environment, quartiles, shown, write_report

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny, in this process")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder, asked = Path(root) / "model", Path(root) / "asked.json"
        folder.mkdir()
        size = 0 if options.smoke else int(options.gigabytes * 1e9)
        asked.write_text(json.dumps({"bytes": size, "dtype": options.dtype}))
        run = here if options.smoke else in_child
        run(MAKE, folder, asked)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        files = len(list(folder.glob("*.safetensors")))
        found = measure(run, folder, options.rounds)
    empty = statistics.median(peak for _, peak in found["import only"])
    results: dict[str, dict[str, list[float]]] = {}
    print(f"{size / 1e9:.2f} GB of {options.dtype} in {files} files, {options.rounds} rounds")
    for ours, theirs in PAIRS:
        ratios = [b[0] / a[0] for a, b in zip(found[ours], found[theirs], strict=True)]
        results[f"{ours} / {theirs}, speed"] = quartiles(ratios)
        print(f"{ours} / {theirs}: speed {shown(quartiles(ratios))}")
    for way in (way for pair in PAIRS for way in pair):
        peaks = quartiles((peak - empty) / size for _, peak in found[way])
        results[f"{way}, peak memory / tensors"] = peaks
        print(f"{way}: peak memory {shown(peaks)} of the tensors' bytes")
    machine = environment("torch", "safetensors")
    write_report(
        options.out, {**machine, "bytes": size, "dtype": options.dtype, "results": results}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(here(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
    else:
        main()
