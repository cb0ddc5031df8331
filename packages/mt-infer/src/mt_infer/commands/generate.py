"""The command `mt-infer generate`."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from mt_files import quick_imports

from mt_infer.commands.flags import flag_of, options_of
from mt_infer.console import print_text, say, told_once

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

    from mt_infer.commands.asking import Question
    from mt_infer.loading import Run
    from mt_infer.sampling import Sampling

_MAX_GRAMMAR_BYTES = 1 << 20
_MAX_ARGUMENT_BYTES = 100_000  # Linux takes 128 KiB


@dataclass(kw_only=True)
class Generate:
    """Continue a prompt with a run or a folder of Hugging Face, and print the continuation."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run, a folder of Hugging Face, or a model of the hub in the
    local cache, such as Qwen/Qwen3-0.6B."""
    prompt: str | None = None
    """The text to continue; - reads it from standard input."""
    chat: bool = False
    """The prompt is what a user says: it is written by the model's chat template, and the answer is
    what the model says; needs mt-infer[chat]."""
    chat_file: Path | None = None
    """A file with a conversation to answer, in place of a prompt; `--chat FILE.json` is the same.
    It has a JSON list of messages, or an object with messages and tools."""
    system: str | None = None
    """What the system says before the user, with --chat."""
    prompts: Path | None = None
    """A file of JSON lines to answer, each with a prompt, a text or a list of messages, or with
    messages and tools; needs --out."""
    out: Path | None = None
    """The file for the answers to --prompts, as JSON lines. The same command goes on with a file
    that has the first ones."""
    batch: int = 32
    """Largest number of prompts at once, with --prompts."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A file with an image, for one image token of the prompt; may be given several times. Without
    it images are the files beside the conversation of --chat that its parts name."""
    database: Path | None = None
    """A database of mt-retro: after each chunk of prompt and continuation, a model that reads
    neighbours (model.retro) reads the nearest passages there; needs mt-infer[retro]."""
    embedder: Path | None = None
    """The model by which --database was embedded (mt-infer embed); by default the built-in
    embedding of mt-retro."""
    passage: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that such a model reads beside each chunk, in place of a database; may be given
    several times."""
    step: int | None = None
    """The checkpoint of this step; by default the latest."""
    download: bool = False
    """Download a model of the hub that is not in the cache."""
    adapter: Path | None = None
    """A folder of Hugging Face PEFT with a LoRA adapter of the model."""
    ema: bool = False
    """Use the moving average of the weights, if training kept one (optimizer.ema)."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text that ends the continuation, which is cut before it; may be given several times."""
    json_schema: Path | None = None
    """A file with the JSON schema of the continuation; needs mt-infer[grammar]."""
    regex: str | None = None
    """A regular expression that the whole continuation matches; needs mt-infer[grammar]."""
    grammar: Path | None = None
    """A file with the grammar of the continuation, in llguidance's form of Lark; needs
    mt-infer[grammar]."""
    max_tokens: int = 128
    """Stop after this many tokens, or at the end of the model's context."""
    greedy: bool = False
    """Always take the most likely token (temperature 0)."""
    temperature: float | None = None
    """Divisor of the logits; by default 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Dtype of the computation; by default fp32 on a CPU and bf16 on a GPU."""
    kernels: Literal["auto", "fused", "reference"] = "auto"
    """Kernels of norms, gates, rope and attention: the fastest as measured (auto), those of
    mt-fusions, or plain torch."""
    kv_cache_dtype: Literal["auto", "full", "fp8", "int8"] = "auto"
    """Format of cached keys and values: fp8 or int8, with a scale for each head of each token, in
    half the bytes of bf16; full, as --dtype; auto, the format of a folder's scales, or full."""
    speculate: str | None = None
    """Who guesses tokens, of which a pass verifies several; the text stays the same: ngram, mtp, or
    the folder of a smaller model with the same tokenizer."""
    nproc: int | None = None
    """Number of processes to start, which share the model; by default --pp. Leave it out under
    torchrun or srun."""
    cuda_graphs: bool = False
    """Replay a CUDA graph for each token; on a CPU, run the same passes with a graph's checks."""
    pp: int = 1
    """Number of pipeline stages, each with a part of the layers; processes may share a stage."""
    ep: int = 1
    """Expert parallelism: number of parts of each layer's experts. It divides the processes of a
    stage; processes with the same part split each expert."""

    def run_command(self) -> int:
        """Print the continuation, and return the exit status."""
        with quick_imports():
            from mt_parallel_state import detect_env, launch, must_launch

            from mt_infer.commands.continuation import continuation
            from mt_infer.loading import open_run

        env = detect_env()
        with contextlib.ExitStack() as stack:
            with told_once(env):
                sampling = _check_options(self, env)
                run = stack.enter_context(open_run(self.run, self.step, download=self.download))
                self.download = False  # once, and not by each rank
                questions = _check_run(self, env, run, sampling)
            if must_launch(self.nproc or 1, env):
                return launch("mt_infer", _as_arguments(self, run.step), self.nproc or 1)
            completion = continuation(self, env, run, sampling, questions)
        if completion is not None and env.rank == 0:
            print_text(completion.text or "")
            if completion.end == "context":
                limit, new = run.config.max_sequence_length, len(completion.tokens)
                say(f"the model's context of {limit} tokens is full after {new} new tokens")
            if completion.end == "length" and sampling.grammar_field is not None:
                say(f"--max-tokens {self.max_tokens} ended the text before its grammar did")
        return 0


def _check_asked(command: Generate) -> None:
    """Check that there is exactly one prompt, one conversation or one file of them."""
    if sum(each is not None for each in (command.prompt, command.chat_file, command.prompts)) != 1:
        raise ValueError(
            "give one of --prompt, a conversation as --chat FILE.json, and --prompts FILE"
        )
    if (command.prompts is None) != (command.out is None):
        raise ValueError("--prompts FILE needs --out FILE for the answers, and --out needs it")
    if command.prompts is not None and (command.image or command.cuda_graphs):
        raise ValueError("--prompts does not go with --image and --cuda-graphs: leave these out")
    if command.batch < 1:
        raise ValueError(f"--batch {command.batch}: use 1 or more")
    if command.chat_file is not None and (command.chat or command.system is not None):
        raise ValueError(
            "--chat FILE.json has the whole conversation; leave --chat and --system out"
        )
    if command.system is not None and not command.chat:
        raise ValueError("--system is said in a conversation; add --chat, or leave it out")
    if (command.chat or command.chat_file) and command.cuda_graphs:
        raise ValueError("--chat does not go with --cuda-graphs: leave one out")


def _check_options(command: Generate, env: DistributedEnv) -> Sampling:
    """Check the options, and replace the prompt `-` by the text of standard input."""
    from mt_parallel_state import must_launch

    from mt_infer.sampling import Sampling

    if command.max_tokens < 1:
        raise ValueError(f"--max-tokens {command.max_tokens}: use 1 or more")
    if "" in command.stop:
        raise ValueError("--stop '': every text has it; name a text of one character or more")
    _check_asked(command)
    if command.greedy and command.temperature not in (None, 0.0):
        raise ValueError(
            f"--greedy and --temperature {command.temperature} contradict each other: leave one out"
        )
    if command.pp < 1:
        raise ValueError(f"--pp {command.pp}: use 1 or more")
    if command.nproc is None:
        command.nproc = command.pp if env.world_size == 1 else 1
    launches = must_launch(command.nproc, env)
    if max(command.nproc, env.world_size) % command.pp:
        raise ValueError(
            f"--pp {command.pp} does not divide {max(command.nproc, env.world_size)} processes; "
            "start a multiple of it"
        )
    shared = max(command.nproc, env.world_size) // command.pp
    if command.ep < 1 or shared % command.ep:
        raise ValueError(
            f"--ep {command.ep} does not divide the {shared} processes that share a stage; start "
            "a multiple of it"
        )
    temperature = 1.0 if command.temperature is None else command.temperature
    sampling = Sampling(
        temperature=0.0 if command.greedy else temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
        stop=command.stop,
        max_tokens=command.max_tokens,
        **_grammar(command),
    )
    if command.prompt == "-":
        command.prompt = _read_prompt(env)
    if launches and len(os.fsencode(command.prompt or "")) > _MAX_ARGUMENT_BYTES:
        raise ValueError(
            f"a prompt of more than {_MAX_ARGUMENT_BYTES} bytes can't be passed to the processes "
            "of --nproc; leave --nproc out, or start them with torchrun"
        )
    return sampling


def _grammar(command: Generate) -> dict[str, Any]:
    """Return the grammar of an option as a field of `Sampling`; empty without one."""
    from mt_files import read_text

    named = {name: getattr(command, name) for name in ("json_schema", "regex", "grammar")}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        flags = " and ".join(map(flag_of, given))
        raise ValueError(f"{flags} contradict each other: leave all but one out")
    return {
        name: read_text(value, limit=_MAX_GRAMMAR_BYTES) if isinstance(value, Path) else value
        for name, value in given.items()
    }


def _read_prompt(env: DistributedEnv) -> str:
    from mt_infer.commands.asking import MAX_PROMPT_BYTES

    if env.world_size > 1:
        raise ValueError(
            f"--prompt - under {env.launcher}: its processes can't share standard input; give the "
            "text itself"
        )
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise ValueError(f"standard input has more than {MAX_PROMPT_BYTES} bytes; shorten it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not UTF-8: {error.reason}, byte {error.start}"
        ) from error


def _check_run(
    command: Generate, env: DistributedEnv, run: Run, sampling: Sampling
) -> list[Question]:
    """Check the options against the run, before weights are read and processes started.

    Returns:
        The lines of `--prompts`.
    """
    from mt_model import validate_split

    from mt_infer.choosing.grammar import Grammars
    from mt_infer.commands.continuation import prompt_tokens, questions_of
    from mt_infer.commands.retrieval import check_retrieval
    from mt_infer.loading import check_ema, check_kv_cache

    processes = max(command.nproc or 1, env.world_size)
    check_retrieval(command, run, processes)
    if command.ema:
        check_ema(run)
    if command.cuda_graphs and run.config.encoder_layers:
        raise ValueError("--cuda-graphs: a model with an encoder runs without them; leave it out")
    try:
        validate_split(run.config, processes // command.pp)
        etp = processes // command.pp // command.ep
        run.config.check_experts(ep=command.ep, etp=etp)
    except ValueError as error:
        raise ValueError(f"{processes} processes can't share this model: {error}") from error
    if command.pp > run.config.num_layers:
        raise ValueError(
            f"--pp {command.pp}: the model has {run.config.num_layers} layers to share"
        )
    if command.adapter is not None and (command.cuda_graphs or run.config.encoder_layers):
        raise ValueError(
            "--adapter does not go with --cuda-graphs or an encoder; merge it into the model"
        )
    if command.speculate is not None and command.cuda_graphs:
        raise ValueError("--speculate does not go with --cuda-graphs; leave one of them out")
    if command.kv_cache_dtype in ("fp8", "int8"):
        check_kv_cache(run, command.kv_cache_dtype)
    Grammars(run.tokenizer).of(sampling, run.ends)
    questions = questions_of(command, run)
    if not questions:
        prompt_tokens(command, run)
    return questions


def _as_arguments(command: Generate, step: int | None) -> list[str]:
    """Return the command line of a rank, with the chosen step and the text of the prompt."""
    command.step = step
    names, switches = options_of(Generate)
    given = {name: getattr(command, name) for name in names}
    repeated = [
        f"--{name}={each}" for name in ("stop", "image", "passage") for each in given.pop(name)
    ]
    options = [f"{flag_of(name)}={value}" for name, value in given.items() if value is not None]
    switches = [flag_of(name) for name in switches if getattr(command, name)]
    return ["generate", *repeated, *options, *switches, "--", str(command.run)]
