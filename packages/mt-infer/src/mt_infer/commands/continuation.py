"""The result of `mt-infer generate`: one continuation, or the answers to a file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from mt_files import read_json, shorten, to_plain
from mt_parallel_state import DistributedEnv, ParallelLayout, ParallelState, joined

from mt_infer.commands.answers import AnswerFile
from mt_infer.commands.asking import (
    MAX_PROMPT_BYTES,
    Asker,
    Question,
    checked_talk,
    read_questions,
    user_says,
)
from mt_infer.commands.retrieval import retrieving_continuation
from mt_infer.completion import Completion
from mt_infer.console import keep_quiet, say
from mt_infer.digests import run_digest
from mt_infer.engine.engine import Engine
from mt_infer.engine.options import EngineOptions
from mt_infer.images import place_images
from mt_infer.loading import Run, load_weights, same_run
from mt_infer.sampling import Sampling
from mt_infer.text import PromptError, check_prompt, encode_prompt
from mt_infer.threads import use_threads

if TYPE_CHECKING:
    from pathlib import Path

    from mt_infer.commands.generate import Generate


def continuation(
    command: Generate,
    env: DistributedEnv,
    run: Run,
    sampling: Sampling,
    questions: Sequence[Question],
) -> Completion | None:
    """Answer the questions, or return the completion of the prompt on the first rank.

    The other ranks follow the first one.
    """
    if run.base_format is not None and env.rank == 0:
        say(f"the adapters are added to their base, dequantised from {run.base_format}")
    tp = env.world_size // command.pp
    layout = ParallelLayout(tp=tp, pp=command.pp, ep=command.ep, etp=tp // command.ep)
    how = {"dtype": command.dtype, "ema": command.ema, "kernels": command.kernels}
    with joined(env) as device, ParallelState(layout, rank=env.rank, device=device) as state:
        if run.config.retro is not None:
            prompt = "" if questions else _prompt(command, run)
            return retrieving_continuation(command, env, run, state, sampling, [*questions], prompt)
        # Graphs are for one prompt at a time.
        if command.cuda_graphs:
            with same_run(run, state) as agreed:
                generator = load_weights(agreed, state, **how)
            kept = {"kv_cache_dtype": command.kv_cache_dtype, "cuda_graphs": command.cuda_graphs}
            told = say if env.local_rank == 0 else keep_quiet
            use_threads(generator.model)
            generator = replace(generator, **kept, on_eager=told)
            return generator.complete(str(command.prompt), sampling)
        if questions and env.rank == 0:
            _answer(command, run, state, sampling, questions)
            return None
        engine = _engine(command, run, state, questions)
        if env.rank > 0:
            engine.serve()
            return None
        with engine:
            name = _adapter(command, engine)
            images = [list(command.image)]
            return engine.generate(_prompt(command, run), sampling, images, adapter=name)[0]


def _answer(
    command: Generate,
    run: Run,
    state: ParallelState,
    sampling: Sampling,
    questions: Sequence[Question],
) -> None:
    """Write the answers to all unanswered questions."""
    assert command.out is not None, "it is checked"  # noqa: S101
    named = ("adapter", "ema", "dtype", "kv_cache_dtype")
    options = [getattr(command, name) for name in named]
    settings = [run_digest(run), to_plain(sampling), options]
    with closing(AnswerFile(command.out, questions, settings)) as file:
        before = len(questions) - len(file.rest)
        with _engine(command, run, state, questions) as engine:
            file.answer(engine, sampling, adapter=_adapter(command, engine))
    told = f", {before} of them from before" if before else ""
    say(f"{len(questions)} answers in {command.out}{told}")


def _engine(
    command: Generate, run: Run, state: ParallelState, questions: Sequence[Question]
) -> Engine:
    """Load the engine for all questions, or for one prompt if there are none; all ranks call it."""
    given = [len(each.tokens) for each in questions] or [len(prompt_tokens(command, run))]
    most = min(len(given), command.batch)
    longest = sorted(given, reverse=True)[:most]
    options = EngineOptions(
        blocks=sum(_blocks(command, run, each, EngineOptions.block_size) for each in longest),
        max_batch=most,
        kv_cache_dtype=command.kv_cache_dtype,
        prefix_cache=bool(questions),
        speculate=command.speculate,
        batch_invariant=None if questions else False,  # nothing runs beside one prompt
    )
    how = {"dtype": command.dtype, "ema": command.ema, "kernels": command.kernels}
    with same_run(run, state) as agreed:
        engine = Engine.from_run(agreed, state, options, **how)
    use_threads(engine.model)
    return engine


def _adapter(command: Generate, engine: Engine) -> str | None:
    """Load the adapter, and return its name."""
    name = None if command.adapter is None else str(command.adapter)
    if name is not None:
        engine.load_adapter(name, name)
    return name


def _blocks(command: Generate, run: Run, given: int, size: int) -> int:
    """Return the number of blocks for a prompt of some tokens and its answer."""
    source = 0
    if run.config.encoder_layers:
        given, source = 1, given
    length = min(given + command.max_tokens, run.config.max_sequence_length)
    return -(-length // size) - (-source // size)


def prompt_tokens(command: Generate, run: Run) -> list[int]:
    """Return the tokens of the prompt and its images."""
    prompt = _prompt(command, run)
    is_text = isinstance(prompt, str)
    tokens = encode_prompt(prompt, run.tokenizer, run.config) if is_text else prompt
    tokens, _ = place_images(tokens, command.image, run.config, run.pixels)
    check_prompt(tokens, run.config)
    return tokens


def _prompt(command: Generate, run: Run) -> str | list[int]:
    """Return the prompt; with --chat it is rendered by the chat template.

    Without --image the conversation names the images.
    """
    if command.chat_file is None and not command.chat:
        return str(command.prompt)

    if command.chat_file is None:
        messages, tools = user_says(str(command.prompt), command.system), None
    else:
        found = read_json(command.chat_file, limit=MAX_PROMPT_BYTES)
        found = found if isinstance(found, dict) else {"messages": found}
        messages, tools = checked_talk(found, str(command.chat_file))
    with closing(Asker(run)) as asker:
        tokens, named = asker.of_talk(messages, tools)
    if command.chat_file is not None and not command.image:
        command.image = _named_images(command.chat_file, named)
    return tokens


def _named_images(file: Path, names: Sequence[str | None]) -> tuple[Path, ...]:
    """Return the files of the images that a conversation names, in the folder of its file."""
    given = [name for name in names if name is not None]
    if not given:
        return ()
    if len(given) < len(names):
        text = "names some of its images, and some not; name all, or give all as --image FILE"
        raise PromptError(f"{file}: {text}")
    folder = file.resolve().parent
    paths = tuple((folder / name).resolve() for name in given)
    for name, path in zip(given, paths, strict=True):
        if "://" in name or name.startswith("data:") or not path.is_relative_to(folder):
            text = f"the image {shorten(name)} is no file beside {file}; name one, or use --image"
            raise PromptError(text)
    return paths


def questions_of(command: Generate, run: Run) -> list[Question]:
    """Return the lines of `--prompts`; empty without the option."""
    if command.prompts is None:
        return []
    return read_questions(command.prompts, run, chat=command.chat, system=command.system)
