"""`mt-infer generate`: a mistake or a failure is one message with a documented exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys

import pytest
import torch
from mt_infer import Completion, Engine
from mt_infer.cli import main
from mt_infer.eval.__main__ import main as evaluate
from mt_tokenizer import train_tokenizer


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
    (run / "checkpoints/step_00000002/mt-manifest.json").write_text("{")


def spoil_tokenizer_into_another(run) -> None:
    """A tokenizer of the same size, whose text would be wrong."""
    train_tokenizer(["xyzzy xyzzy"], 260).save(run / "tokenizer.json")


def spoil_tokenizer_into_a_device(run) -> None:
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.json").symlink_to("/dev/zero")


def spoil_tokenizer_into_a_fifo(run) -> None:
    (run / "tokenizer.json").unlink()
    os.mkfifo(run / "tokenizer.json")


def spoil_latest_into_a_fifo(run) -> None:
    (run / "checkpoints/latest").unlink()
    os.mkfifo(run / "checkpoints/latest")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_tokenizer_into_a_folder, "tokenizer.json: is a folder; give"),
        (spoil_tokenizer_into_other_json, "tokenizer.json: is not a tokenizer.json"),
        (spoil_tokenizer_into_nothing, "tokenizer.json is missing; pass the --out folder"),
        (spoil_all_checkpoints, "checkpoints has no committed checkpoint; let the run save one"),
        (spoil_manifest, "mt-manifest.json"),
        (spoil_tokenizer_into_another, "is not the tokenizer with which the model was trained"),
        (spoil_tokenizer_into_a_device, "tokenizer.json: is a device, and a regular file"),
        (spoil_tokenizer_into_a_fifo, "tokenizer.json: is a FIFO, and a regular file"),
        (spoil_latest_into_a_fifo, "latest: is a FIFO, and a regular file"),
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


def completion(text: str) -> Completion:
    return Completion(tokens=[1, 2, 3], text=text, end="length", seed=0)


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
    monkeypatch.setattr(Engine, "generate", fails)
    code, out, err = generate(saved_run)
    assert (code, out) == (1, "")
    assert "out of memory: use --dtype bf16 or fewer --max-tokens, or more processes on s" in err


def test_an_interrupt_ends_quietly_with_its_code(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "generate", raised(KeyboardInterrupt()))
    assert generate(saved_run) == (130, "", "")


def test_what_is_no_user_error_keeps_its_traceback(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "generate", raised(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        generate(saved_run)


def test_characters_that_stdout_cannot_show_are_replaced(saved_run, generate, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "generate", lambda *args, **options: [completion("naïve 日")])
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
        assert generate(saved_run, "--max-tokens", 2) == (0, "", "")
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


def layers(count: int):
    def change(metadata: dict) -> None:
        metadata["model"]["layers"] *= count

    return change


def setting(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(metadata: dict) -> None:
        for key in keys:
            metadata = metadata[key]
        metadata[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            setting("model", {"layers": 5}),
            "its metadata holds no model that this version can build",
        ),
        (setting("model", "hidden_size", 10**30), "its metadata holds no model that this version"),
        (setting("model", "hidden_size", "16"), "its metadata holds no model that this version"),
        (setting("model", "hidden_size", 32), "its metadata describes a model of "),
        (setting("model", "max_sequence_length", 10**9), "its metadata holds no model that this"),
        (setting("model", None), "the metadata of step 2 is not that of an mt-train run"),
        (layers(4200), "its metadata holds no model that this version can build"),
        (layers(4000), "parameters, and "),
        (lambda metadata: metadata.pop("model"), "it lacks model; use a run of this version"),
        (lambda metadata: metadata.pop("tokenizer"), "it lacks tokenizer"),
        (setting("tokenizer", "sha256", "0" * 64), "is not the tokenizer with which the model was"),
        (setting("tokenizer", "eod", "nothing"), "'nothing' is not a special token of this"),
        (setting("step", 7), "step is 7, and the checkpoint's 2"),
    ],
)
def test_crafted_metadata_is_one_message_before_anything_is_built(
    run, forge, generate, monkeypatch, change, message
) -> None:
    monkeypatch.setattr("mt_infer.loading.GPT", raised(AssertionError("a model was built")))
    forge(change)
    code, out, err = generate(run)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 1500


def test_the_step_is_chosen(saved_run, generate) -> None:
    first, second = (generate(saved_run, "--greedy", "--step", step) for step in (1, 2))
    assert first[0] == second[0] == 0
    assert first[1] != second[1]
    assert generate(saved_run, "--greedy") == second
    code, out, err = generate(saved_run, "--step", 3)
    assert (code, out) == (1, "")
    assert "has no checkpoint of step 3 (there: 1, 2)" in err


def test_a_prompt_comes_from_standard_input(saved_run, generate, monkeypatch) -> None:
    for content, expected in ((b"to be", 0), (b"a\xff", 2), (b"x" * (1 << 24) + b"x", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        code, out, err = generate(saved_run, prompt="-")
        assert code == expected
        if code:
            assert err.startswith("mt-infer: standard input ")
        else:
            assert out == generate(saved_run)[1]


def test_a_full_context_is_said_and_no_failure(saved_run, generate) -> None:
    for seed in range(9):
        code, _, err = generate(saved_run, "--max-tokens", 500, "--seed", seed)
        assert code == 0
        if err:
            break
    assert "mt-infer: the model's context of 16 tokens is full after 1" in err
    assert err.endswith(" new tokens\n")


def test_what_begins_with_a_dash_is_a_prompt_too(saved_run, generate) -> None:
    assert generate(saved_run, prompt="--help me")[0] == 0


def test_a_grammar_bounds_the_continuation(saved_run, generate, tmp_path) -> None:
    schema, rules = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text('{"enum": [-12, "to"]}')
    rules.write_text('start: "be" ("," "to")~2')
    for option, value, form in (
        ("--regex", "(to|be){3}", "(to|be){3}"),
        ("--json-schema", schema, '-12|"to"'),
        ("--grammar", rules, "be,to,to"),
    ):
        code, out, err = generate(saved_run, option, value)
        assert (code, err) == (0, "")
        assert re.fullmatch(form, out.removesuffix("\n"))
    code, out, err = generate(saved_run, "--regex", "(to){9}", "--max-tokens", 3)
    assert (code, out) == (0, "tototo\n")
    assert "--max-tokens" in err


def test_a_bad_grammar_is_one_message_before_weights_are_read(
    saved_run, generate, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("mt_infer.engine.engine.Engine.from_run", None)
    schema = tmp_path / "schema.json"
    for options, number, words in (
        (("--regex", "("), 2, ["regex", "unclosed"]),
        (("--json-schema", schema), 1, ["schema.json"]),
        (("--json-schema", schema, "--regex", "a"), 2, ["--json-schema", "--regex"]),
    ):
        code, _, err = generate(saved_run, *options)
        assert code == number
        assert all(word in err for word in words)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, _, err = generate(saved_run, "--regex", "a")
    assert code == 1
    assert "mt-infer[grammar]" in err


def test_the_version_is_printed(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"mt-infer \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_wrong_command_suggests_the_right_one(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generat", "x"])
    assert stop.value.code == 2
    assert "'generat' is no command. Did you mean generate?" in capsys.readouterr().err


def test_messages_are_bounded(saved_run, generate) -> None:
    for options in (("--nproc", "9" * 10**5), ("--dtype", "x" * 10**5), ("--step", "y" * 10**5)):
        code, out, err = generate(saved_run, *options)
        assert (code, out) == (2, "")
        assert 0 < len(err) < 2100


@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "said"),
    [
        (["--version"], ">&-", 0, ""),
        (["bogus"], "2>&-", 2, ""),
        (["generate", "b\udcffd", "--prompt", "x"], "", 1, "b\\udcffd is not a folder"),
        (["generate", "RUN", "--prompt", "x"], ">&-", 1, "standard output is closed"),
        (["generate", "RUN", "--prompt", "to be"], "2>&- <&-", 0, ""),
    ],
)
def test_streams_that_are_closed_and_paths_that_are_no_text(
    saved_run, arguments, redirection, code, said
) -> None:
    words = [str(saved_run) if word == "RUN" else word for word in arguments]
    shell = f'exec "$0" -m mt_infer "$@" {redirection}'
    done = subprocess.run(
        ["/bin/bash", "-c", shell, sys.executable, *words],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    assert "Traceback" not in errors
    assert said in errors


def test_a_small_model_has_no_threads_that_wait_for_each_other(run, generate) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert generate(run)[0] == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_evaluation_without_its_extra_says_which(monkeypatch, capsys) -> None:
    monkeypatch.setattr("mt_infer.eval.__main__.find_spec", lambda _: None)
    assert evaluate() == 1
    assert capsys.readouterr().err == "mt-infer: evaluating needs: pip install 'mt-infer[eval]'\n"
