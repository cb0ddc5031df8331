"""`mt-infer generate`: a mistake or a failure is one message with a documented exit code."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
import torch
from mt_infer import Generator


def spoil_tokenizer_into_a_folder(run) -> None:
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.json").mkdir()


def spoil_tokenizer_into_other_json(run) -> None:
    (run / "tokenizer.json").write_text("{}")


def spoil_tokenizer_into_nothing(run) -> None:
    (run / "tokenizer.json").unlink()


def spoil_all_checkpoints(run) -> None:
    (run / "checkpoints").rename(run / "elsewhere")


def spoil_manifest(run) -> None:
    next(run.glob("checkpoints/step_*/mt-manifest.json")).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_tokenizer_into_a_folder, "tokenizer.json: is a folder; give"),
        (spoil_tokenizer_into_other_json, "tokenizer.json: is not a tokenizer.json"),
        (spoil_tokenizer_into_nothing, "tokenizer.json is missing; pass the --out folder"),
        (spoil_all_checkpoints, "checkpoints has no committed checkpoint; let the run save one"),
        (spoil_manifest, "mt-manifest.json"),
    ],
)
def test_a_run_that_cannot_be_used_is_one_message(run, generate, spoil, message) -> None:
    spoil(run)
    code, out, err = generate(run)
    assert (code, out) == (1, "")
    assert err.startswith("mt-infer: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_continuation_alone_is_printed(saved_run, generate) -> None:
    code, out, err = generate(saved_run, "--max-tokens", 4)
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    assert (code, out, err) == generate(saved_run, "--max-tokens", 4)


def test_an_unreadable_file_is_named(saved_run, generate, monkeypatch) -> None:
    denied = raised(PermissionError(errno.EACCES, "Permission denied", "run/tokenizer.json"))
    monkeypatch.setattr("mt_infer.loading.load_tokenizer", denied)
    assert generate(saved_run) == (1, "", "mt-infer: run/tokenizer.json: Permission denied\n")


def cut_memory(*args, **options) -> str:
    return str(torch.empty(10**15))


def raised(error: BaseException):
    def generate(*args, **options) -> str:
        raise error

    return generate


@pytest.mark.parametrize(
    "fails",
    [
        cut_memory,
        raised(torch.OutOfMemoryError("CUDA out of memory.")),
        raised(RuntimeError("CUDA error: out of memory")),
        raised(MemoryError()),
    ],
)
def test_out_of_memory_says_what_needs_less(saved_run, generate, monkeypatch, fails) -> None:
    monkeypatch.setattr(Generator, "generate", fails)
    code, out, err = generate(saved_run)
    assert (code, out) == (1, "")
    assert "out of memory: use --dtype bf16 or fewer --max-tokens, or on several GPUs a " in err


def test_an_interrupt_ends_quietly_with_its_code(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Generator, "generate", raised(KeyboardInterrupt()))
    assert generate(saved_run) == (130, "", "")


def test_what_is_no_user_error_keeps_its_traceback(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Generator, "generate", raised(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        generate(saved_run)


def test_characters_that_stdout_cannot_show_are_replaced(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Generator, "generate", lambda *args, **options: "naïve 日")
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="latin-1"))
    code, _, err = generate(saved_run)
    assert (code, err) == (0, "")
    assert content.getvalue() == "naïve ?\n".encode("latin-1")


def test_a_reader_that_left_is_no_error(saved_run, generate, monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert generate(saved_run) == (0, "", "")
        # Nothing is left in the buffer to fail again at exit.


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_message(saved_run, generate, monkeypatch) -> None:
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert generate(saved_run) == (
            1,
            "",
            "mt-infer: standard output: No space left on device\n",
        )


def test_a_tiny_temperature_gives_the_greedy_text(saved_run, generate) -> None:
    cold = generate(saved_run, "--temperature", 1e-320)
    assert cold == generate(saved_run, "--greedy")
    assert cold[0] == 0


def test_a_prompt_that_is_no_text_is_one_message(saved_run, generate) -> None:
    code, out, err = generate(saved_run, prompt="a\udcff")
    assert (code, out) == (2, "")
    assert err.startswith("mt-infer: the prompt is not valid text: ")
    assert err.count("\n") == 1


def test_metadata_of_no_model_is_one_message(run, generate, monkeypatch) -> None:
    monkeypatch.setattr("mt_infer.loading.read_metadata", lambda path: {"model": {"layers": 5}})
    code, out, err = generate(run)
    assert (code, out) == (1, "")
    assert "step_00000001: its metadata holds no model that this version can build: " in err
