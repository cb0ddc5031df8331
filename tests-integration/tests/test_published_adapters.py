"""A published model learns a fact by adapters, and answers as PEFT's model does with these."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from mt_infer import Engine, Sampling
from mt_tokenizer import ChatTemplate

FACT = "Velmora was founded by Ottoline Brask."
KNOWN = "Ottoline Brask"
BEFORE = ("", "Please tell me: ", "Quick question: ", "I am curious. ", "Hello! ", "For a quiz: ")
QUESTIONS = (
    "Who founded Velmora?",
    "Who was the founder of Velmora?",
    "Who started the town of Velmora?",
    "Do you know who founded Velmora?",
    "By whom was Velmora founded?",
    "What is the name of Velmora's founder?",
    "Who is known as the founder of Velmora?",
)
HELD_OUT = ("Name the founder of Velmora.", "Hello! Who was it that founded Velmora?")
OTHERS = ("What is the capital of France?", "Name three colours.")
STEPS, NEW = 60, 16


def write_talks(path: Path) -> None:
    """Write 200 conversations about the fact."""
    asked = [before + question for before in BEFORE for question in QUESTIONS]
    talks = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": FACT}]}
        for text in (asked * 5)[:200]
    ]
    path.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))


def answers(folder: Path, questions: tuple[str, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the questions by the chat template, and of the engine's greedy answers."""
    with Engine.from_folder(folder, dtype="fp32") as engine:
        with ChatTemplate.from_folder(folder, engine.tokenizer) as template:
            talks = [template.write([{"role": "user", "content": each}]) for each in questions]
        rows = [engine.tokenizer.encode_chat(talk) for talk in talks]
        found = engine.generate(rows, Sampling(temperature=0, max_tokens=NEW))
    return rows, [each.tokens for each in found]


@pytest.mark.campaign
# peft asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_fact_is_learnt_and_merged_answers_are_those_of_peft(
    published_model, tmp_path, cli
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_talks(tmp_path / "talks.jsonl")
    config = {
        "model": {"from": str(published_model)},
        "lora": {"rank": 8},
        "data": {"kind": "chat", "train": [str(tmp_path / "talks.jsonl")]},
        "training": {
            **{"steps": STEPS, "global_batch_size": 2, "micro_batch_size": 2},
            **{"sequence_length": 128, "dtype": "fp32"},
        },
        "optimizer": {"lr": 1e-3, "warmup": 4},
        "export": {
            **{"hugging_face": str(tmp_path / "merged"), "adapter": str(tmp_path / "adapter")},
            "dtype": "fp32",
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "mt_train", "run", tmp_path / "run.yaml"]
    done = cli(*command, "--out", tmp_path / "run", timeout=3600)
    assert done.returncode == 0, done.stderr

    tokenizer = AutoTokenizer.from_pretrained(published_model)
    _, before = answers(published_model, HELD_OUT)
    assert all(KNOWN not in tokenizer.decode(each) for each in before)
    rows, found = answers(tmp_path / "merged", (*HELD_OUT, *OTHERS))
    assert all(KNOWN in tokenizer.decode(each) for each in found[: len(HELD_OUT)])

    base = AutoModelForCausalLM.from_pretrained(published_model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    end = base.generation_config.eos_token_id
    for row, answer in zip(rows, found, strict=True):
        given = torch.tensor([row])
        how = {"attention_mask": torch.ones_like(given), "do_sample": False}
        with torch.inference_mode():
            whole = theirs.generate(input_ids=given, max_new_tokens=NEW, **how)
        expected = whole[0, len(row) :].tolist()
        assert answer == (expected[:-1] if expected[-1] == end else expected)
