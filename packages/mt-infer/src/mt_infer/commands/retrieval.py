"""`mt-infer generate` with a model that reads neighbours (Retro)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from mt_files import to_plain
from mt_parallel_state import DistributedEnv, ParallelState

from mt_infer.commands.answers import AnswerFile
from mt_infer.commands.asking import Question
from mt_infer.commands.flags import flag_of
from mt_infer.completion import Completion
from mt_infer.console import say
from mt_infer.digests import run_digest
from mt_infer.embedding import load_embedder
from mt_infer.loading import Run, load_weights, same_run
from mt_infer.retrieval import Passages, Retrieve
from mt_infer.sampling import Sampling
from mt_infer.text import encode_prompt
from mt_infer.threads import use_threads

if TYPE_CHECKING:
    from mt_infer.commands.generate import Generate

_OTHER = ("adapter", "speculate", "image", "cuda_graphs", "json_schema", "regex", "grammar")


def check_retrieval(command: Generate, run: Run, processes: int) -> None:
    """Check the options of retrieval, and refuse options that don't fit a retrieving model.

    Raises:
        ValueError: An option does not fit the model or another one.
    """
    retro = run.config.retro
    asks = command.database is not None or bool(command.passage)
    if retro is None:
        if asks:
            raise ValueError(
                f"{run.folder} reads no neighbours, so --database and --passage do nothing; leave "
                "them out, or train a model with model.retro"
            )
        return
    if command.embedder is not None and command.database is None:
        raise ValueError("--embedder is for --database; name one, or leave it out")
    if command.database is not None and command.passage:
        raise ValueError("--database and --passage contradict each other: leave one out")
    given = [flag_of(name) for name in _OTHER if getattr(command, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: a model with model.retro is decoded without; leave it out"
        )
    if command.prompts is not None and processes > 1:
        raise ValueError(
            "--prompts for a model with model.retro runs in one process; use --nproc 1"
        )
    for passage in command.passage:
        encode_prompt(passage, run.tokenizer, run.config)
    if command.database is not None:
        database = _database(command, run)
        if command.embedder is None:
            _ = database.embedding  # refuses vectors of a model


def _database(command: Generate, run: Run) -> Any:
    if find_spec("mt_retro") is None:
        raise ValueError("--database needs: pip install 'mt-infer[retro]'")
    from mt_retro import Database

    assert command.database is not None, "the caller asks"  # noqa: S101
    assert run.config.retro is not None, "it is checked"  # noqa: S101
    database, chunk = Database(command.database), run.config.retro.chunk
    if database.chunk != chunk:
        raise ValueError(
            f"--database {command.database} has chunks of {database.chunk} tokens, and the model "
            f"reads chunks of {chunk}; build one with mt-retro build --chunk {chunk}"
        )
    if database.tokenizer not in (None, run.tokenizer.sha256):
        raise ValueError(
            f"--database {command.database} has the tokens of another tokenizer than the model's; "
            "build one of data that mt-data build --tokenizer wrote with the model's"
        )
    return database


def _retrieve(command: Generate, run: Run, device: torch.device) -> Retrieve | None:
    if command.passage:
        return Passages([run.tokenizer.encode(text) for text in command.passage])
    if command.database is None:
        return None
    from mt_retro import Retriever

    embed = None
    if command.embedder is not None:
        embed = load_embedder(command.embedder, source=run.tokenizer, device=device)
    return Retriever(_database(command, run), embed)


def retrieving_continuation(
    command: Generate,
    env: DistributedEnv,
    run: Run,
    state: ParallelState,
    sampling: Sampling,
    questions: list[Question],
    prompt: str | list[int],
) -> Completion | None:
    """Continue a prompt, or answer questions, with the neighbours of each finished chunk.

    All ranks call it, and each retrieves for itself.
    """
    how = {"dtype": command.dtype, "ema": command.ema, "kernels": command.kernels}
    with same_run(run, state) as agreed:
        generator = load_weights(agreed, state, **how)
    use_threads(generator.model)
    retrieve = _retrieve(command, run, state.device)
    kept = {"kv_cache_dtype": command.kv_cache_dtype}
    generator = replace(generator, **kept, retrieve=retrieve)
    if retrieve is None and env.rank == 0:
        say("the model reads no neighbours here; name where to find them with --database DB")
    if not questions:
        return generator.complete(prompt, sampling)
    assert command.out is not None, "it is checked"  # noqa: S101
    named = ("ema", "dtype", "kv_cache_dtype", "passage")
    settings: list[object] = [getattr(command, name) for name in named]
    settings.append(None if command.database is None else _database(command, run).digest)
    told = [run_digest(run), to_plain(sampling), settings]
    with closing(AnswerFile(command.out, questions, told)) as file:
        before = len(questions) - len(file.rest)
        file.complete(lambda tokens: generator.complete(tokens, sampling))
    told_before = f", {before} of them from before" if before else ""
    say(f"{len(questions)} answers in {command.out}{told_before}")
    return None
