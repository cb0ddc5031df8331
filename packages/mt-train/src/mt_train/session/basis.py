"""Inputs of a run besides its configuration, built once and opened by every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mt_ckpt import RunFolder, clean
from mt_files import FolderLock, read_bytes, remove_temporaries, write_file
from mt_hf import ExchangeError, find_family, read_description
from mt_model import ModelConfig
from mt_parallel_state import DistributedEnv, ParallelState
from mt_tokenizer import Tokenizer, load_tokenizer

from mt_train.agreement import summed
from mt_train.config.loading import LoadedConfig, planned_vocab_size
from mt_train.data.corpus import (
    Corpus,
    OtherRankError,
    check_rows,
    check_tokenizer,
    prepare_corpus,
    verify_corpus,
)
from mt_train.parts.registry import wanted_parts
from mt_train.problem import ConfigError
from mt_train.session.exporting import exports_of, obstacle_of
from mt_train.session.saving import memory_copies
from mt_train.session.starting import Start, check_start, find_start
from mt_train.training.freezing import check_freezing
from mt_train.training.optimization import check_overrides

_TOKENIZER_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Inputs of a run besides its configuration.

    Attributes:
        corpus: Token files of the run.
        start: Starting point of the run.
        tokenizer: Tokenizer of the tokens; None for token files without one.
        model: Model for the tokenizer's vocabulary, or for the size in the section `model`.
    """

    corpus: Corpus
    start: Start
    tokenizer: Tokenizer | None
    model: ModelConfig


def prepare_on_all_ranks(
    loaded: LoadedConfig,
    out: Path,
    state: ParallelState,
    env: DistributedEnv,
    stack: ExitStack,
    held: ExitStack,
) -> Basis:
    """Take the run folder and make the tokens on rank 0, or on each node without a shared disk.

    Rank 0 chooses the checkpoint of another run to start from, since that run may be saving more.

    Args:
        loaded: The configuration.
        out: The run's folder.
        state: This rank's place in the layout.
        env: Its place in the job.
        stack: Holds the lock on the folder.
        held: Holds the checkpoint against removal.

    Raises:
        OtherRankError: The preparation failed on another rank, which raises the error itself.
    """
    first, next_ = env.rank == 0, env.rank != 0 and env.local_rank == 0
    made: list[Basis] = []

    def prepare(step: int | None) -> int:
        basis = _prepare_folder(loaded, out, held, step)
        made.append(basis)
        return 0 if basis.start.saved is None else basis.start.saved.step

    _agreed(state, lambda: _take_folder(loaded, out, stack), if_=first)
    copies = memory_copies(state, loaded.config, out)
    if copies is not None:
        copies.restore()
    step = _agreed(state, lambda: prepare(None), if_=first)
    _agreed(state, lambda: prepare(step), if_=next_)
    if made:
        return made[0]
    start = find_start(loaded, out, held, step=step)
    return _checked(loaded, prepare_corpus(loaded, out, tokenizer=start.tokenizer), start, out)


def _agreed(state: ParallelState, action: Callable[[], int | None], *, if_: bool) -> int:
    """Run `action` on the ranks with `if_`, and return the sum of its results on all ranks.

    Raises:
        OtherRankError: The action failed on another rank, which raises the error itself.
    """
    error, number = None, 0
    try:
        number = (action() or 0) if if_ else 0
    except Exception as caught:  # noqa: BLE001 - raised once the others were told
        error = caught
    is_config = isinstance(error, ConfigError)
    failed, of_config, total = summed(state, error is not None, is_config, number)
    if error is not None:
        raise error
    if failed:
        raise OtherRankError(is_config=of_config > 0)
    return int(total)


def _take_folder(loaded: LoadedConfig, out: Path, stack: ExitStack) -> None:
    """Lock the run folder for this process before anything in it changes."""
    out.mkdir(parents=True, exist_ok=True)
    stack.enter_context(FolderLock(out, purpose="training"))
    remove_temporaries(out)
    clean(loaded.config.checkpoint.folder(out))


def _prepare_folder(loaded: LoadedConfig, out: Path, held: ExitStack, step: int | None) -> Basis:
    """Make the tokens, check the run's start, and then keep the tokenizer in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    start = find_start(loaded, out, held, step=step)
    corpus = prepare_corpus(loaded, out, tokenizer=start.tokenizer)
    verify_corpus(loaded, corpus)
    basis = _checked(loaded, corpus, start, out)
    _keep_description(loaded, RunFolder(out))
    for name, content in loaded.config.data.files().items():
        write_file(out / name, content)
    if corpus.tokenizer is not None:
        tokenizer = read_bytes(corpus.tokenizer, limit=_TOKENIZER_BYTES)
        kept = RunFolder(out).tokenizer
        if not kept.is_file() or kept.is_symlink() or kept.read_bytes() != tokenizer:
            write_file(kept, tokenizer)
    return basis


def _checked(loaded: LoadedConfig, corpus: Corpus, start: Start, out: Path) -> Basis:
    """Check that data, model and start go together."""
    tokenizer = None
    if corpus.tokenizer is not None:
        tokenizer = load_tokenizer(corpus.tokenizer, eod=loaded.config.data.eod)
        check_tokenizer(loaded, corpus, tokenizer)
    check_rows(loaded, corpus)
    model = loaded.model(planned_vocab_size(loaded) if tokenizer is None else tokenizer.vocab_size)
    check_freezing(loaded, model)
    check_overrides(loaded, model)
    for part in wanted_parts(loaded.config):
        part.check(loaded, model, tokenizer)
    _check_export(loaded, model, start, out)
    digest = None if tokenizer is None else tokenizer.sha256
    check_start(start, loaded, model=model.to_dict(), tokenizer=digest)
    return Basis(corpus=corpus, start=start, tokenizer=tokenizer, model=model)


def _check_export(loaded: LoadedConfig, model: ModelConfig, start: Start, out: Path) -> None:
    """Refuse an impossible export at the end, before anything is trained."""
    folders, family = exports_of(loaded.config), loaded.config.export.family
    if not folders or start.progress.step >= loaded.config.training.steps:
        return
    for kind, folder in folders.items():
        problem = obstacle_of(folder, out, kind)
        if problem is not None:
            raise loaded.error(f"export.{kind}", f"{folder} {problem}")
    if family is None and loaded.config.model.from_ is not None:
        family = read_description(loaded.config.model.from_).family.name
    try:
        find_family(model, family)
    except ExchangeError as error:
        raise loaded.error("export.family", str(error)) from error


def _keep_description(loaded: LoadedConfig, run: RunFolder) -> None:
    """Keep the files beside a model's original weights, for an export."""
    folder = loaded.config.model.from_
    if folder is not None and not run.hugging_face.is_dir():
        run.hugging_face.mkdir()
        read_description(folder).copy_to(run.hugging_face)
