"""`--nproc`: errors are printed once, before any process is started."""

from __future__ import annotations

import io

import pytest
import torch
from mt_infer import Completion


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Calls of the launcher, which starts nothing."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("mt_parallel_state.launch", lambda *call: calls.append(call) or 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return calls


def test_processes_are_started_with_the_same_arguments(saved_run, generate, launched) -> None:
    assert generate(saved_run, "--nproc", 2) == (7, "", "")
    ((module, arguments, nproc),) = launched
    assert (module, nproc) == ("mt_infer", 2)
    assert arguments == [
        *("generate", "--prompt=to be", "--batch=32", "--step=2", "--max-tokens=128"),
        *(
            "--top-k=0",
            "--top-p=1.0",
            "--seed=0",
            "--kernels=auto",
            "--kv-cache-dtype=auto",
            "--nproc=2",
            "--pp=1",
            "--ep=1",
            "--",
            str(saved_run),
        ),
    ]


def test_the_processes_get_the_step_that_was_chosen_and_the_prompt_that_was_read(
    saved_run, generate, launched, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("to bé".encode())))
    options = ("--nproc", 2, "--step", 1, "--greedy")
    assert generate(saved_run, *options, prompt="-") == (7, "", "")
    assert launched[0][1][1:4] == ["--prompt=to bé", "--batch=32", "--step=1"]
    assert "--greedy" in launched[0][1]


def test_a_prompt_too_long_for_a_command_line_says_so(saved_run, generate, launched) -> None:
    code, out, err = generate(saved_run, "--nproc", 2, prompt="x" * 100_001)
    assert (code, out, launched) == (2, "", [])
    assert "can't be passed to the processes of --nproc; leave --nproc out" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", 3), "3 processes can't share this model: num_heads=4 does not divide by"),
        (("--nproc", 0), "--nproc 0: use 1 or more"),
        (("--pp", 0), "--pp 0: use 1 or more"),
        (("--pp", 2), "--pp 2: the model has 1 layers to share"),
        (("--pp", 2, "--nproc", 3), "--pp 2 does not divide 3 processes; start a multiple"),
        (("--nproc", 2, "--max-tokens", 0), "--max-tokens 0: use 1 or more"),
        (("--nproc", 2, "--temperature", -1), "Sampling.temperature: -1.0 is too small"),
        (("--nproc", 2, "--top-k", -1), "Sampling.top_k: -1 is too small"),
        (("--greedy", "--temperature", 0.5), "--greedy and --temperature 0.5 contradict each oth"),
        (("--nprocs", 2), "'--nprocs' is no option. Did you mean --nproc?"),
        (("--" + "x" * 10**5, 2), "'--xxx"),
    ],
)
def test_a_wrong_option_is_one_message(saved_run, generate, launched, options, message) -> None:
    code, out, err = generate(saved_run, *options)
    assert (code, out, launched) == (2, "", [])
    assert err.startswith(f"mt-infer: {message}")
    assert err.count("\n") == 1


def test_a_prompt_too_long_is_one_message(saved_run, generate, launched) -> None:
    code, out, err = generate(saved_run, "--nproc", 2, prompt="x" * 16)
    assert (code, out, launched) == (2, "", [])
    assert err == (
        "mt-infer: the prompt has 16 tokens, the model's context 16; shorten it to at most 15 "
        "tokens\n"
    )


def test_a_rank_that_no_launcher_ends_says_what_is_wrong_with_it(
    saved_run, generate, monkeypatch
) -> None:
    """After a wait, in which the launcher ends it if the first rank of the node says the same."""
    waits: list[float] = []
    monkeypatch.setattr("mt_infer.console.time.sleep", waits.append)
    for rank in (0, 1):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        for name, value in {**variables, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        code, out, err = generate(saved_run / "nowhere")
        assert (code, out, err.count("\n"), len(waits)) == (1, "", 1, rank)


def test_a_missing_folder_is_one_message(tmp_path, generate, launched) -> None:
    code, out, err = generate(tmp_path / "nowhere", "--nproc", 2)
    assert (code, out, launched) == (1, "", [])
    wanted = "pass the --out folder of an mt-train run, or a folder of Hugging Face"
    assert err.endswith(f"nowhere is not a folder; {wanted}\n")
    assert err.count("\n") == 1


def test_a_tokenizer_that_is_none_is_one_message(run, generate, launched) -> None:
    (run / "tokenizer.json").write_text("{}")
    code, out, err = generate(run, "--nproc", 2)
    assert (code, out, launched) == (1, "", [])
    assert "is not a tokenizer.json" in err
    assert err.count("\n") == 1


def test_more_processes_than_gpus_are_refused(saved_run, generate, launched, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, out, err = generate(saved_run, "--nproc", 2)
    assert (code, out, launched) == (2, "", [])
    assert "--nproc 2 needs a GPU for each process, and this machine shows 1; " in err


@pytest.mark.parametrize(("world", "nproc"), [(2, 4), (4, 2)])
def test_another_number_than_the_launchers_is_refused(
    saved_run, generate, launched, monkeypatch, world, nproc
) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world}
    for name, value in {**variables, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    code, out, err = generate(saved_run, "--nproc", nproc)
    assert (code, out, launched) == (2, "", [])
    assert err == (
        f"mt-infer: --nproc {nproc} under torchrun, which started {world} processes: leave --nproc "
        f"out, or let torchrun start {nproc}\n"
    )


@pytest.mark.parametrize("options", [(), ("--nproc", 2)])
def test_the_launchers_number_is_taken(saved_run, generate, launched, monkeypatch, options) -> None:
    variables = {"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
    places = {"SLURM_TASKS_PER_NODE": 2, "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": 1}
    for name, value in {**variables, **places}.items():
        monkeypatch.setenv(name, str(value))
    text = Completion(tokens=[1], text="text", end="length", seed=0)
    monkeypatch.setattr("mt_infer.commands.continuation.continuation", lambda *call: text)
    assert generate(saved_run, *options) == (0, "text\n", "")
    assert launched == []
