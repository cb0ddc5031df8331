"""A published model, SmolLM2-135M-Instruct: what transformers makes of it is what mt makes of it.

One test is CI's; the rest, which reads it on layouts, trains it and stores it in 4 bits, is long.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from mt_hf import export_checkpoint, import_pretrained
from mt_hf.commands.cli import main as mt_hf_command
from mt_infer import Engine, Sampling, load_run
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import ChatTemplate, load_tokenizer

PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 7 times 8?",
    "Explain gravity in one sentence.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "List the days of the week.",
    "Say yes.",
    "How do bees make honey?",
    "Give a synonym of 'happy'.",
    "What is Python used for?",
    "Finish this: once upon a time",
    "Is the sun a star?",
    "Which animal barks?",
    "What do plants need to grow?",
    "Sort these numbers: 3, 1, 2.",
    "Why is the sky blue?",
    "Write a polite refusal.",
    "Antwort auf Deutsch: Wie geht es dir?",
)
NEW = 32
TEXTS = ("textwrap.py", "shlex.py", "bisect.py", "heapq.py")  # of Python's library


def chat_rows(folder: Path, prompts: tuple[str, ...]) -> list[list[int]]:
    """Tokens of the prompts in the model's chat template, by transformers and by mt."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder / "tokenizer.json")
    how = {"add_generation_prompt": True, "return_dict": False}
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = [theirs.apply_chat_template(talk, **how) for talk in talks]
    with ChatTemplate.from_folder(folder, ours) as template:
        assert [ours.encode_chat(template.write(talk)) for talk in talks] == rows
    return rows


@torch.inference_mode()
def expected_answers(folder: Path, rows: list[list[int]], new: int) -> list[list[int]]:
    """What transformers' `generate` answers, without the token that ends an answer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end, answers = model.generation_config.eos_token_id, []
    for row in rows:
        given = torch.tensor([row])
        how = {"attention_mask": torch.ones_like(given), "do_sample": False}
        answer = model.generate(given, max_new_tokens=new, **how)[0, len(row) :].tolist()
        answers.append(answer[:-1] if answer[-1] == end else answer)
    return answers


def answers(
    folder: Path, rows: list[list[int]], new: int, *, tp: int = 1, pp: int = 1, kv: str = "full"
) -> list[list[int]] | None:
    """Answers of all prompts in one batch, in chunks; None on all ranks but the first."""
    with ParallelState(ParallelLayout(tp=tp, pp=pp), device="cpu") as state:
        engine = Engine.from_folder(folder, state=state, kv_cache_dtype=kv, max_batch_tokens=48)
        if state.rank > 0:
            engine.serve()
            return None
        with engine:
            found = engine.generate(rows, Sampling(temperature=0, max_tokens=new))
        return [each.tokens for each in found]


def test_it_verifies_answers_as_transformers_does_and_comes_back_the_same(
    published_model, tmp_path
) -> None:
    with pytest.raises(SystemExit) as verified:
        mt_hf_command(["verify", str(published_model), "--tokens", "32"])
    assert verified.value.code == 0
    rows = chat_rows(published_model, PROMPTS[:2])
    found = answers(published_model, rows, 12)
    assert found == expected_answers(published_model, rows, 12)
    assert all(found)
    import_pretrained(published_model, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(published_model, tmp_path / "out")


def assert_same_tensors(first: Path, second: Path) -> None:
    from safetensors.torch import load_file

    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def chats(published_model) -> tuple[list[list[int]], list[list[int]]]:
    rows = chat_rows(published_model, PROMPTS)
    return rows, expected_answers(published_model, rows, NEW)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [{}, {"tp": 3}, {"pp": 2}])
def test_greedy_answers_to_chat_prompts_are_transformers(
    published_model, chats, ranks, layout
) -> None:
    rows, expected = chats

    def body() -> list[list[int]] | None:
        return answers(published_model, rows, NEW, **layout)

    found, *_ = ranks(layout.get("tp", 1) * layout.get("pp", 1), body, timeout=1800)
    assert found == expected


@pytest.mark.campaign
def test_answers_of_a_batch_in_bf16_are_those_of_each_prompt_alone(published_model) -> None:
    rows = chat_rows(published_model, PROMPTS)
    how = {"dtype": torch.bfloat16, "max_batch_tokens": 48, "batch_invariant": True}
    engine = Engine.from_folder(published_model, **how)
    sampling = Sampling(temperature=0, max_tokens=NEW, logprobs=0, seed=0)
    together = engine.generate(rows, sampling)
    assert engine.stats()["prefix_tokens"] > 0  # the template's beginning, in the prefix cache
    for row, found in zip(rows, together, strict=True):
        assert engine.generate(row, sampling) == [found]


@pytest.mark.campaign
@pytest.mark.parametrize(("kv", "least"), [("int8", 0.5), ("fp8", 0.5)])
def test_a_cache_in_8_bits_keeps_the_beginning_of_answers(
    published_model, chats, record_property, kv, least
) -> None:
    rows, expected = chats
    found = answers(published_model, rows, NEW, kv=kv)
    equal = sum(map(equal_beginning, found, expected))
    record_property("equal_tokens", f"{equal} of {sum(map(len, expected))}")
    record_property("equal_answers", sum(map(list.__eq__, found, expected)))
    assert equal >= least * sum(map(len, expected))


def equal_beginning(first: list[int], second: list[int]) -> int:
    """The number of tokens before the first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.campaign
def test_the_command_ends_where_transformers_ends(published_model, chats, cli) -> None:
    from transformers import AutoTokenizer

    rows, expected = chats
    tokenizer = AutoTokenizer.from_pretrained(published_model)
    short = [number for number, answer in enumerate(expected) if len(answer) < NEW][:3]
    assert short
    for number in short:
        prompt = tokenizer.decode(rows[number])
        command = [sys.executable, "-m", "mt_infer", "generate", published_model, "--greedy"]
        done = cli(*command, "--prompt", prompt, "--max-tokens", NEW, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout == tokenizer.decode(expected[number]) + "\n"


def held_out() -> str:
    import textwrap

    folder = Path(textwrap.__file__).parent
    return "\n".join((folder / name).read_text()[:3000] for name in TEXTS)


@torch.inference_mode()
def bits_per_byte(folder: Path, *, length: int = 256) -> float:
    """The cost of a text in windows, each of which starts anew."""
    with ParallelState(ParallelLayout(), device="cpu") as state:
        generator = load_run(folder, state)
        tokens = torch.tensor(generator.tokenizer.encode(held_out()))
        tokens = tokens[: len(tokens) // length * length].view(-1, length)
        scored = generator.tokenizer.token_bytes[tokens[:, 1:].flatten().numpy()].sum()
        total = 0.0
        for row in tokens:
            logits = generator.model.logits(row[None])[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return total / float(scored) / 0.6931471805599453


@pytest.mark.campaign
def test_fine_tuning_lowers_a_held_out_loss(
    published_model, tmp_path, cli, record_property
) -> None:
    from mt_data import build_corpus, read_documents, standard_library_sources

    tokenizer = load_tokenizer(published_model / "tokenizer.json", eod="<|im_end|>")
    sources = [path for path in standard_library_sources() if path.name not in TEXTS][:40]
    build_corpus(read_documents(sources), tmp_path / "train", tokenizer)
    config = {
        "model": {"from": str(published_model)},
        "data": {"train": [str(tmp_path / "train")]},
        "training": {
            **{"steps": 20, "global_batch_size": 4, "micro_batch_size": 2},
            **{"sequence_length": 128, "dtype": "fp32"},
        },
        "optimizer": {"lr": 1e-4, "warmup": 4},
        "export": {"hugging_face": str(tmp_path / "out")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "mt_train", "run", tmp_path / "run.yaml"]
    done = cli(*command, "--out", tmp_path / "run", timeout=1800)
    assert done.returncode == 0, done.stderr
    before, after = bits_per_byte(published_model), bits_per_byte(tmp_path / "out")
    record_property("bits_per_byte", f"{before:.4f} before, {after:.4f} after")
    assert after < before - 0.02


@pytest.mark.campaign
def test_calibrated_int4_costs_fewer_bits_than_rounding(
    published_model, tmp_path, cli, record_property
) -> None:
    from mt_data import standard_library_sources

    sources = [path for path in standard_library_sources() if path.name not in TEXTS][40:60]
    (tmp_path / "text.txt").write_text("\n".join(path.read_text() for path in sources))
    found = {"full": bits_per_byte(published_model)}
    for recipe in ("int4-rtn", "int4-gptq", "int4-rtn-asym", "int4-awq"):
        command = [sys.executable, "-m", "mt_infer", "quantize", published_model, tmp_path / recipe]
        text = ["--calibration", tmp_path / "text.txt", "--samples", 24, "--length", 256]
        done = cli(*command, "--recipe", recipe, *text, timeout=1800)
        assert done.returncode == 0, done.stderr
        assert "groups that divide the layers' inputs: 64 inputs" in done.stderr
        found[recipe] = bits_per_byte(tmp_path / recipe)
    record_property("bits_per_byte", json.dumps(found))
    assert found["full"] < found["int4-gptq"] < found["int4-rtn"]
    assert found["full"] < found["int4-awq"] < found["int4-rtn-asym"]
