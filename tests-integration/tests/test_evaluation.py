"""lm-eval's scores of a folder are the same by the engine and by transformers."""

import json
import os
import shutil
import subprocess
import zlib

import pytest
import torch
from mt_hf import save_pretrained
from mt_infer.eval.scorer import EvalOptions, Scorer, windows
from mt_infer.loading import open_run
from mt_model import GPT, gpt
from mt_tokenizer import load_tokenizer, train_tokenizer

CONTEXT = 48
ROOM = 0.0001
TEXTS = ["to be, or not to be", "that is the question", "a" * 150, "whether 'tis nobler " * 9, "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of Hugging Face with a tokenizer, which both programs read."""
    path = tmp_path_factory.mktemp("evaluated") / "model"
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4}
    config = gpt(vocab_size=264, **sizes, max_sequence_length=CONTEXT, init_std=0.3)
    save_pretrained(GPT(config, seed=3), path)
    tokenizer = train_tokenizer(["to be or not to be"], 264)
    tokenizer.save(path / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


@pytest.fixture(scope="module")
def scorer(folder):
    with open_run(folder) as run:
        return Scorer.from_run(run, EvalOptions(max_batch=4))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def expected(model, context, rest):
    """Logprob of a continuation by transformers, and whether its tokens are the most likely."""
    text = (context + rest)[-CONTEXT - 1 :]
    scores = model(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)[-len(rest) :]
    chosen = scores.gather(1, torch.tensor(rest)[:, None])
    return float(chosen.sum()), scores.argmax(-1).tolist() == rest


def test_scores_of_continuations_equal_those_of_transformers(scorer, tokenizer, theirs):
    eod = tokenizer.eod_id
    texts = [tokenizer.encode(each) for each in TEXTS]
    pairs = [(a, b[:CONTEXT]) for a in texts for b in texts]
    pairs += [([eod], [eod]), (texts[0], [eod, 5, eod]), (texts[3], texts[3][: CONTEXT - 1])]
    with torch.inference_mode():
        likely = theirs(torch.tensor([texts[0]])).logits[0, -1].argmax().item()
    pairs.append((texts[0], [likely]))
    found = scorer.score(pairs)
    assert found[-1][1]
    for pair, (score, is_greedy) in zip(pairs, found, strict=True):
        wanted = expected(theirs, *pair)
        assert score == pytest.approx(wanted[0], abs=ROOM)
        assert is_greedy == wanted[1]


@pytest.mark.parametrize("length", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT + 5])
def test_windows_have_each_token_once_and_as_much_before_it_as_there_is_room(length):
    tokens = list(range(100, 100 + length))
    cut = list(windows(tokens, 7, CONTEXT))
    assert [token for _, rest in cut for token in rest] == tokens
    for context, rest in cut:
        assert context
        assert len(context) + len(rest) - 1 <= CONTEXT
        assert (context[0] == 7) == (rest[0] == 100)
        if context[0] != 7:
            assert len(context) + len(rest) - 1 == CONTEXT


def test_scores_of_long_texts_equal_those_of_transformers(scorer, tokenizer, theirs):
    texts = [tokenizer.encode(each) for each in TEXTS]
    assert max(map(len, texts)) > 2 * CONTEXT
    found = scorer.score_texts(texts, tokenizer.eod_id)
    for text, score in zip(texts, found, strict=True):
        cut = windows(text, tokenizer.eod_id, CONTEXT)
        assert score == pytest.approx(sum(expected(theirs, *pair)[0] for pair in cut), abs=ROOM)


@torch.inference_mode()
def test_continuations_equal_those_of_transformers(scorer, tokenizer, theirs):
    prompts = [tokenizer.encode(each) for each in TEXTS]
    given = {"do_sample": False, "max_gen_toks": 12, "until": ["q", ""], "temperature": 0.0}
    found = scorer.generate(prompts, [given] * len(prompts))
    for prompt, text in zip(prompts, found, strict=True):
        cut = torch.tensor([prompt[-(CONTEXT - 12) :]])
        how = {"attention_mask": torch.ones_like(cut), "do_sample": False, "max_new_tokens": 12}
        made = theirs.generate(cut, **how, pad_token_id=tokenizer.eod_id)[0, cut.shape[1] :]
        assert text == tokenizer.decode(made.numpy(), skip_special=True).split("q")[0]
    for wrong, message in (({"num_beams": 4}, "num_beams"), ({"max_gen_toks": 99}, "no room")):
        with pytest.raises(ValueError, match=message):
            scorer.generate(prompts[:1], [{**given, **wrong}])


TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["be", " not", " the question"]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "to"
generation_kwargs: {until: ["q"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.campaign
def test_lm_eval_gives_the_same_scores(folder, tmp_path):
    rows = [{"question": text, "answer": n % 3} for n, text in enumerate(TEXTS)]
    data = tmp_path / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    for name, text in TASKS.items():
        head = f"task: mine_{name}\n{source}test_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(head + text)
    found = {}
    for model, where in (("mt", f"folder={folder}"), ("hf", f"pretrained={folder},dtype=float32")):
        out = tmp_path / model
        tool = [shutil.which("uv") or "uv", "run", "--with", "lm-eval==0.4.13"]
        program = [*tool, "python", "-m", "mt_infer.eval", "--model", model, "--model_args", where]
        tasks = ",".join(f"mine_{name}" for name in TASKS)
        how = ["--tasks", tasks, "--include_path", str(tmp_path), "--output_path", str(out)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        subprocess.run(
            [*program, *how, "--device", "cpu", "--log_samples"],
            env={**os.environ, **offline},
            check=True,
        )
        for path in out.rglob("samples_*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            task = next(name for name in TASKS if f"mine_{name}" in path.name)
            found[model, task] = [line["filtered_resps"] for line in lines]
    for task in TASKS:
        ours, theirs = found["mt", task], found["hf", task]
        assert len(ours) == len(TEXTS)
        assert list(flat(ours)) == pytest.approx(list(flat(theirs)), abs=ROOM)


def flat(value):
    """Yield the numbers in nested lists of texts, and a number for any other text."""
    for each in value:
        if isinstance(each, list):
            yield from flat(each)
            continue
        try:
            yield float(each)
        except ValueError:
            yield float(zlib.crc32(each.encode()))
