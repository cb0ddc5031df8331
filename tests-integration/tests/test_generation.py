"""mt-infer continues what mt-train saved, the same at every layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PROMPT = "import os\n"


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    return tiny.train(
        tmp_path_factory.mktemp("run"),
        "training.steps=60",
        "training.sequence_length=64",
        "training.dtype=bf16",
    )


@pytest.fixture(scope="module")
def generate(cli):
    def call(run: Path, *options: object) -> str:
        result = cli(
            sys.executable, "-m", "mt_infer", "generate", run, "--prompt", PROMPT, *options
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return call


def without_cache(run: Path, max_tokens: int) -> str:
    """Greedy by recomputing the whole sequence for every token."""
    import torch
    from mt_infer import load_run
    from mt_parallel_state import ParallelLayout, ParallelState

    with torch.inference_mode(), ParallelState(ParallelLayout(), device="cpu") as state:
        generator = load_run(run, state)
        tokens = generator.tokenizer.encode(PROMPT)
        start = len(tokens)
        while len(tokens) < start + max_tokens:
            logits = generator.model.logits(torch.tensor([tokens]))[0, -1]
            token = int(logits[: generator.tokenizer.vocab_size].argmax())
            if token == generator.tokenizer.eod_id:
                break
            tokens.append(token)
        return generator.tokenizer.decode(tokens[start:])


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_other_kernels_generate_the_same_text(run, generate, kernels) -> None:
    options = "--max-tokens", 20, "--greedy", "--dtype", "fp64"
    assert generate(run, *options, "--kernels", kernels, "--nproc", 2) == generate(run, *options)


def test_the_average_of_weights_generates_where_training_kept_one(
    run, tiny, generate, tmp_path, cli, arrays
) -> None:
    import numpy as np
    from mt_infer import load_run
    from mt_parallel_state import ParallelLayout, ParallelState

    kept = tiny.train(tmp_path / "kept", "optimizer.ema=0.999", "model.tied=false")
    with ParallelState(ParallelLayout(), device="cpu") as state:
        for ema, prefix in ((True, "ema/"), (False, "model/")):
            params = dict(load_run(kept, state, ema=ema).model.named_parameters())
            stored = arrays(kept, prefix=prefix)
            assert {prefix + name for name in params} == set(stored)
            for name, param in params.items():
                np.testing.assert_array_equal(param.detach().numpy(), stored[prefix + name])
    text = generate(kept, "--max-tokens", 20, "--greedy", "--ema")
    assert generate(kept, "--max-tokens", 20, "--greedy", "--ema", "--nproc", 2) == text
    command = [sys.executable, "-m", "mt_infer", "generate", run, "--prompt", PROMPT, "--ema"]
    result = cli(*command)
    assert result.returncode == 1
    assert "has no average of the weights; train with optimizer.ema, or leave" in result.stderr


def test_greedy_is_the_same_at_tp_1_and_2_at_pp_2_and_without_a_cache(run, generate) -> None:
    alone = generate(run, "--max-tokens", 40, "--greedy")
    assert alone == generate(run, "--max-tokens", 40, "--greedy", "--nproc", 2)
    assert alone == without_cache(run, 40) + "\n"
    assert alone == generate(run, "--max-tokens", 40, "--greedy", "--pp", 2)
    assert len(alone) > 10


def test_sampling_repeats_with_its_seed_on_two_ranks_and_on_four(run, generate) -> None:
    options = ("--max-tokens", 30, "--temperature", 0.9, "--top-k", 50, "--top-p", 0.95)
    first = generate(run, *options, "--seed", 3)
    assert first == generate(run, *options, "--seed", 3, "--nproc", 2)
    assert first == generate(run, *options, "--seed", 3, "--nproc", 4, "--pp", 2)
    assert first != generate(run, *options, "--seed", 4)


@pytest.mark.parametrize(
    ("folder", "expected"), [("nowhere", "is not a folder"), (".", "tokenizer.json is missing")]
)
def test_a_folder_that_is_no_run_is_one_message(folder, expected, tmp_path, cli) -> None:
    result = cli(sys.executable, "-m", "mt_infer", "generate", tmp_path / folder, "--prompt", "x")
    assert result.returncode == 1
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_prompt_longer_than_the_context_says_how_long_it_may_be(run, cli) -> None:
    result = cli(sys.executable, "-m", "mt_infer", "generate", run, "--prompt", "word " * 200)
    assert result.returncode == 2
    assert "the model's context 64" in result.stderr


def test_a_tokenizer_of_another_run_is_refused(run, cli, tmp_path) -> None:
    import shutil

    from mt_tokenizer import train_tokenizer

    copy = shutil.copytree(run, tmp_path / "run")
    train_tokenizer(["other words"], 400).save(copy / "tokenizer.json")
    result = cli(sys.executable, "-m", "mt_infer", "generate", copy, "--prompt", "x")
    assert result.returncode == 1
    assert "is not the tokenizer with which the model was trained" in result.stderr
