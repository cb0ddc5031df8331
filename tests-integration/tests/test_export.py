"""Models for other engines: transformers and llama.cpp compute what mt computes of GGUF files.

llama.cpp is the wheel xllamacpp in an environment of its own, in the campaign.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from mt_hf import ExchangeError, TextFormat, export_gguf, import_pretrained, open_pretrained
from mt_hf.gguf.splitting import RULES
from mt_infer import Engine, Sampling
from mt_infer.cli import main as mt_infer_command
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from mt_tokenizer.engine import ModelEngine

NEW = 64
TEXTS = (
    "hello world 123 don't you SEE 4567 things?",
    "  two  spaces\n\n\tand lines\r\n ...!? é 中文 \U0001f600",
    "<|eod|> is text here; x=y+z",
)
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|model|>"
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0},
    "original_max_position_embeddings": 64,
}
GEMMA = {
    **{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
FULL, LOCAL = "full_attention", "sliding_attention"
ROPES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A small model: the name of its class in transformers, and what its config says."""

    family: str
    given: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "llama": Row(
        family="Llama",
        given={"head_dim": 24, "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": Row(family="Llama", given={"rope_scaling": YARN, "tie_word_embeddings": True}),
    "llama-linear": Row(
        family="Llama", given={"rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    ),
    "qwen2": Row(family="Qwen2"),
    "qwen3": Row(family="Qwen3", given={"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": Row(family="Mistral", given={"sliding_window": None}),
    "mixtral": Row(family="Mixtral", given={"num_local_experts": 4, "sliding_window": None}),
    "gemma2": Row(family="Gemma2", given=GEMMA),
    "gemma2-listed": Row(family="Gemma2", given={**GEMMA, "layer_types": [LOCAL, LOCAL, FULL]}),
    "gemma3": Row(
        family="Gemma3", given={**GEMMA, "num_hidden_layers": 7, "rope_parameters": ROPES}
    ),
    "gemma3-listed": Row(family="Gemma3", given={**GEMMA, "layer_types": [LOCAL, FULL, LOCAL]}),
    "gemma3-windows": Row(family="Gemma3", given={**GEMMA, "layer_types": [LOCAL] * 3}),
}
# One of each architecture; transformers reads no Mixtral from GGUF.
READ = ("llama", "llama-yarn", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([text for text in TEXTS for _ in range(3)], 280)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a row's model with random values, which is made once."""
    root = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        if not (root / name).exists():
            model_of(ROWS[name]).save_pretrained(root / name)
            tokenizer.save(root / name / "tokenizer.json")
            (root / name / "chat_template.jinja").write_text(TEMPLATE)
            ends = {"eos_token_id": [tokenizer.eod_id, 70]}
            (root / name / "generation_config.json").write_text(json.dumps(ends))
        return root / name

    return made


def model_of(row: Row) -> Any:
    text = "Text" if row.family == "Gemma3" else ""
    sizes = {
        **{"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{row.family}{text}Config")(**{**sizes, **row.given})
    model = getattr(transformers, f"{row.family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    center = 0.0 if row.family.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, param in model.named_parameters():
            values = torch.randn(param.shape, generator=generator)
            if name.endswith("norm.weight"):
                param.copy_(center + 0.2 * values)
            else:
                param.copy_(values * (0.2 if param.dim() < 2 else 1.5 * param.shape[-1] ** -0.5))
    return model


def exported(folder: Path, out: Path, *options: str) -> Path:
    with pytest.raises(SystemExit) as ended:
        mt_infer_command(["export", str(folder), str(out), "--format", "gguf", *options])
    assert ended.value.code == 0
    return out


def fields_of(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: each.contents() for name, each in GGUFReader(path).fields.items()}


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """The values of each tensor, read by the format's own library; each name once."""
    from gguf import GGUFReader, dequantize

    tensors = GGUFReader(path).tensors
    found = {each.name: dequantize(each.data, each.tensor_type) for each in tensors}
    assert len(found) == len(tensors)
    return found


@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same_weights(folder, tokenizer, tmp_path, name) -> None:
    source = folder(name)
    out = exported(source, tmp_path / "model.gguf", "--type", "f32")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    how = {"gguf_file": out.name, "config": expected.config}  # it reads no biases or widths itself
    how["config"].vocab_size = rows = tokenizer.vocab_size
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how)
    weights = found.state_dict()
    for key, value in expected.state_dict().items():
        value = value[:rows] if "embed" in key or "head" in key else value
        torch.testing.assert_close(weights[key], value, rtol=0, atol=2.5e-7, msg=key)
    wanted = {key for key in tensors_of(out) if key != "rope_freqs.weight"}
    tied = expected.config.tie_word_embeddings
    assert len(wanted) == len(expected.state_dict()) - tied


def test_experts_are_stacked(folder, tmp_path) -> None:
    source = folder("mixtral")
    found = tensors_of(exported(source, tmp_path / "model.gguf", "--type", "f32"))
    tensors = open_pretrained(source).tensors
    names = {"w1": "gate", "w2": "down", "w3": "up"}
    for layer in range(3):
        block = f"model.layers.{layer}.block_sparse_moe"
        for theirs, ours in names.items():
            experts = [tensors[f"{block}.experts.{n}.{theirs}.weight"].map() for n in range(4)]
            expected = torch.stack(experts).numpy()
            np.testing.assert_array_equal(found[f"blk.{layer}.ffn_{ours}_exps.weight"], expected)
        router = tensors[f"{block}.gate.weight"].map().numpy()
        np.testing.assert_array_equal(found[f"blk.{layer}.ffn_gate_inp.weight"], router)
    assert len(found) == 3 + 3 * (4 + 2 + 4)


def test_each_type_is_within_its_bound(folder, tmp_path) -> None:
    source, found = folder("qwen3"), {}
    for kind in ("f32", "bf16", "f16", "q8_0"):
        found[kind] = tensors_of(exported(source, tmp_path / f"{kind}.gguf", "--type", kind))
    for name, values in found["f32"].items():
        exact = torch.tensor(values)
        if values.ndim == 1:
            for other in found.values():
                np.testing.assert_array_equal(other[name], values)
            continue
        assert torch.equal(torch.tensor(found["bf16"][name]), exact.bfloat16().float())
        assert torch.equal(torch.tensor(found["f16"][name]), exact.half().float())
        blocks, rounded = values.reshape(-1, 32), found["q8_0"][name].reshape(-1, 32)
        largest = np.abs(blocks).max(1, keepdims=True)
        # Half a step, and the rounding of the step itself to fp16.
        assert (np.abs(blocks - rounded) <= largest * (0.5 / 127 + 2**-11)).all()
        assert (blocks != rounded).any()


def test_a_run_gives_the_files_of_the_folder_that_it_came_from(folder, tmp_path) -> None:
    source = folder("mixtral")
    import_pretrained(source, tmp_path / "run")
    first = exported(source, tmp_path / "first" / "model.gguf", "--type", "q8_0")
    second = exported(tmp_path / "run", tmp_path / "second" / "model.gguf", "--type", "q8_0")
    assert first.read_bytes() == second.read_bytes()
    for name, given in (("one", source), ("other", tmp_path / "run")):
        with pytest.raises(SystemExit) as ended:
            mt_infer_command(
                ["export", str(given), str(tmp_path / name), "--format", "trtllm", "--tp", "2"]
            )
        assert ended.value.code == 0
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["gguf", "--tp", "2"], "--tp and --pp are for --format trtllm"),
        (["trtllm", "--type", "q8_0"], "--type q8_0 is for --format gguf"),
        (["trtllm", "--splitting", "gpt-2"], "--splitting is for --format gguf"),
    ],
)
def test_options_of_the_other_format_are_refused(folder, tmp_path, capsys, options, reason) -> None:
    with pytest.raises(SystemExit) as ended:
        mt_infer_command(
            ["export", str(folder("qwen2")), str(tmp_path / "out"), "--format", *options]
        )
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_it_says_how_text_is_read_and_ends(folder, tokenizer, tmp_path) -> None:
    found = fields_of(exported(folder("llama"), tmp_path / "model.gguf"))
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.chat_template"] == TEMPLATE
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eod_id
    assert found["tokenizer.ggml.eot_token_id"] == 70
    assert found["tokenizer.ggml.add_bos_token"] is False
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == tokenizer.vocab_size < 288
    assert {tokens[number]: number for number in tokenizer.engine.vocabulary.values()} == (
        tokenizer.engine.vocabulary
    )
    assert kinds[tokenizer.eod_id] == 3


def test_attention_windows_that_llama_cpp_lacks_bound_the_context(folder, tmp_path, capsys) -> None:
    source = tmp_path / "source"
    model_of(Row(family="Mistral", given={"sliding_window": 40})).save_pretrained(source)
    load_tokenizer(folder("qwen2") / "tokenizer.json").save(source / "tokenizer.json")
    out = exported(source, tmp_path / "model.gguf")
    assert "the context is 40 tokens" in capsys.readouterr().err
    assert fields_of(out)["llama.context_length"] == 40


REFUSED = {
    "family": (Row(family="GPTNeoX"), "the family gpt_neox has no mapping to GGUF"),
    "biases": (Row(family="Qwen3", given={"attention_bias": True}), "qwen3 has none"),
    "activation": (Row(family="Llama", given={"hidden_act": "gelu"}), "llama has silu"),
    "dynamic": (
        Row(family="Llama", given={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        "llama has no rotary embedding with DynamicScaling",
    ),
    "caps": (
        Row(family="Gemma2", given={**GEMMA, "attn_logit_softcapping": None}),
        "gemma2 has both",
    ),
    "scale": (
        Row(family="Gemma2", given={**GEMMA, "query_pre_attn_scalar": 11}),
        "its scores have the factor",
    ),
    "head": (
        Row(family="Gemma2", given={**GEMMA, "tie_word_embeddings": False}),
        "no tensor for lm_head.weight",
    ),
    "windows": (
        Row(family="Gemma3", given={**GEMMA, "layer_types": [FULL, LOCAL, FULL]}),
        "do not follow each other at equal distances",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    tokenizer, tmp_path, name
) -> None:
    row, reason = REFUSED[name]
    model_of(row).save_pretrained(tmp_path / "source")
    source = open_pretrained(tmp_path / "source")
    with pytest.raises(ExchangeError, match=reason):
        export_gguf(source, tmp_path / "model.gguf", TextFormat(tokenizer=tokenizer))
    assert not list(tmp_path.glob("*model.gguf*"))


def test_other_ways_to_fail_are_named_and_leave_no_file(folder, tokenizer, tmp_path) -> None:
    source, out = open_pretrained(folder("qwen2")), tmp_path / "model.gguf"
    with pytest.raises(ExchangeError, match="4 tokens end a text"):
        export_gguf(source, out, TextFormat(tokenizer=tokenizer, ends=range(4)))
    out.write_text("mine")
    with pytest.raises(ExchangeError, match="exists"):
        export_gguf(source, out, TextFormat(tokenizer=tokenizer))
    assert out.read_text() == "mine"


def test_a_rule_for_splitting_that_llama_cpp_lacks_is_told(folder, tmp_path, capsys) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder("qwen2"), source)
    train_tokenizer(TEXTS, 270, pattern="code").save(source / "tokenizer.json")
    out = exported(source, tmp_path / "model.gguf")
    assert "makes other tokens of some texts" in capsys.readouterr().err
    assert fields_of(out)["tokenizer.ggml.pre"] == "llama-bpe"
    out = exported(source, tmp_path / "named.gguf", "--splitting", "gpt-2")
    assert capsys.readouterr().err == ""
    assert fields_of(out)["tokenizer.ggml.pre"] == "gpt-2"


def test_a_value_beyond_fp16_is_refused(folder, tokenizer, tmp_path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("qwen2"))
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = 7e4
    model.save_pretrained(tmp_path / "source")
    source, text = open_pretrained(tmp_path / "source"), TextFormat(tokenizer=tokenizer)
    with pytest.raises(ExchangeError, match=r"token_embd.weight has values beyond 65504"):
        export_gguf(source, tmp_path / "model.gguf", text, kind="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture(scope="module")
def llama_cpp() -> Callable[..., list[Any]]:
    """Return a function that asks llama.cpp's server of a file."""
    python = ["uv", "run", "--no-project", "--python", sys.executable, "--with", "xllamacpp"]
    try:
        tried = subprocess.run(
            [*python, "python", "-c", "import xllamacpp"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("uv is not installed")
    if tried.returncode:
        pytest.skip(f"xllamacpp can't be installed: {tried.stderr.strip()[-200:]}")
    script = Path(__file__).parents[1] / "llama_cpp.py"

    def ask(path: Path, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
        job = json.dumps([[str(path), requests]])
        done = subprocess.run(
            [*python, "python", str(script)],
            **{"input": job, "capture_output": True, "text": True, "check": False},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])[0]

    return ask


@pytest.mark.campaign
@pytest.mark.parametrize("name", ROWS)
def test_llama_cpp_writes_the_same_tokens(folder, llama_cpp, tmp_path, name) -> None:
    source, prompt = folder(name), [5, 77, 123, 200, 31, 9]
    out = exported(source, tmp_path / "model.gguf", "--type", "f32")
    with ParallelState(ParallelLayout(), device="cpu") as state:
        engine = Engine.from_folder(source, state=state)
        ours = engine.generate([prompt], Sampling(temperature=0, max_tokens=NEW))[0].tokens
    wanted = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "return_tokens": True}
    (theirs,) = llama_cpp(out, ("/completion", wanted))
    tokens = theirs["tokens"]
    if len(ours) < NEW:  # the last is the token at which the text ended
        assert theirs["stop_type"] == "eos"
    assert tokens[: len(ours)] == ours
    assert len(tokens) - len(ours) in (0, 1)


def sentencepiece_tokenizer() -> Tokenizer:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=content,
        **{"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "minloglevel": 9},
        **{"hard_vocab_limit": False, "character_coverage": 1.0},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    )
    return Tokenizer(ModelEngine(content.getvalue()), eod="</s>")


def json_tokenizer() -> Tokenizer:
    """The same as a tokenizer.json, which begins a prompt with a token, as Llama 2 does."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, processors

    found = sentencepiece_tokenizer()
    vocab, sign = found.engine.vocabulary, "\u2581"
    merges = [
        (piece[:cut], piece[cut:])
        for piece, number in sorted(vocab.items(), key=lambda each: each[1])
        if number > 258  # behind special tokens and bytes
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    engine = Library(models.BPE(vocab, merges, **how))
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend(sign), normalizers.Replace(" ", sign)]
    )
    steps = [decoders.Replace(sign, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return Tokenizer(engine, eod="</s>")


def byte_level_tokenizer(rules: tuple[str, ...]) -> Tokenizer:
    from tokenizers import pre_tokenizers

    if len(rules) == 1:
        return train_tokenizer(TEXTS * 3, 330, pattern=rules[0])
    trained = train_tokenizer(TEXTS * 3, 330)
    engine: Any = trained.engine
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    record = json.loads(trained.to_bytes())
    record["pre_tokenizer"] = json.loads(pre_tokenizers.Sequence([digits, split]).__getstate__())
    return Tokenizer(type(engine).from_bytes(json.dumps(record).encode()))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{name: partial(byte_level_tokenizer, rules) for rules, name in RULES.items()},
    "sentencepiece": sentencepiece_tokenizer,
    "sentencepiece's json": json_tokenizer,
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_makes_the_same_tokens_of_text(llama_cpp, tmp_path, name) -> None:
    made = TOKENIZERS[name]()
    row = Row(family="Llama", given={"vocab_size": made.vocab_size})
    model_of(row).save_pretrained(tmp_path / "source")
    source, out = open_pretrained(tmp_path / "source"), tmp_path / "model.gguf"
    export_gguf(source, out, TextFormat(tokenizer=made), kind="f32")
    texts = (*TEXTS, *drawn_texts(200))
    wanted = {"add_special": True, "parse_special": False}
    found = llama_cpp(out, *(("/tokenize", {"content": text, **wanted}) for text in texts))
    begin = [made.special_tokens["<s>"]] if name.endswith("json") else []
    for text, each in zip(texts, found, strict=True):
        assert each["tokens"] == begin + made.encode(text), text


def drawn_texts(count: int) -> list[str]:
    random, alphabet = (
        Random(0),
        "  \n\t'sdlv.,!?-_ABCabcdeftheing012345\u00e9\u00df\u4e2d\u03b1\u0301",
    )
    return ["".join(random.choices(alphabet, k=random.randrange(1, 40))) for _ in range(count)]


@pytest.mark.campaign
def test_llama_cpp_answers_as_the_published_model_does(
    published_model, llama_cpp, tmp_path, cli
) -> None:
    out = exported(published_model, tmp_path / "model.gguf", "--type", "f32")
    question, new = "Name three colours.", 32
    ask = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": new}
    (answer,) = llama_cpp(out, ("/v1/chat/completions", ask))
    command = [sys.executable, "-m", "mt_infer", "generate", published_model, "--chat", "--greedy"]
    done = cli(*command, "--prompt", question, "--max-tokens", new, timeout=600)
    assert done.returncode == 0, done.stderr
    assert answer["choices"][0]["message"]["content"].strip() == done.stdout.strip()
