"""Opening and loading of mt-train runs and folders of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from mt_ckpt import (
    Manifest,
    RunFolder,
    SavedAdapters,
    SavedModel,
    SavedTokenizer,
    TensorShard,
    hold_checkpoint,
    inspect_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    open_arrays,
    param_shards,
)
from mt_files import UserError, object_url, require
from mt_hf import (
    Pretrained,
    find_folder,
    from_pretrained,
    is_hub_id,
    open_adapted,
    open_pretrained,
    read_end_tokens,
)
from mt_model import (
    GPT,
    Kernels,
    KernelSet,
    ModelConfig,
    load_installed_plugins,
    load_recorded_plugins,
    saved_buffers,
)
from mt_parallel_state import Group, ParallelState
from mt_schedule import split_layers
from mt_tokenizer import Tokenizer, TokenizerError, load_tokenizer
from torch import Tensor

from mt_infer.dtypes import dtype_of
from mt_infer.generation import Generator

if TYPE_CHECKING:
    from mt_multimodal import ImagePreprocessing

_WORLD = "tp-cp-dp-pp"
_WANTED = "pass the --out folder of an mt-train run, or a folder of Hugging Face"


class RunError(UserError):
    """The folder is not a usable run."""


_CHAT_TEMPLATE, _PREPROCESSOR = "chat_template.jinja", "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked folder, before any weight is read.

    Attributes:
        folder: The run folder, or the folder of Hugging Face.
        config: The model's config.
        own_tokenizer: The tokenizer of the model's training; None for a folder of Hugging Face
            without a tokenizer.
        num_tokens: Number of tokens of the vocabulary, without padding.
        ends: Ids of the tokens that end a text.
        source: The step directory, or the tensors of a folder of Hugging Face.
        step: Step of the step directory; None for a folder of Hugging Face.
    """

    folder: Path
    config: ModelConfig
    own_tokenizer: Tokenizer | None
    num_tokens: int
    ends: frozenset[int]
    source: Path | Pretrained
    step: int | None = None

    @property
    def hugging_face(self) -> Path:
        """The folder of Hugging Face: this folder, or the one that the run started from."""
        return self.folder if self.step is None else RunFolder(self.folder).hugging_face

    @property
    def chat_folder(self) -> Path:
        """The folder with the chat template: a run has its own if it learnt conversations."""
        is_own = self.step is not None and (self.folder / _CHAT_TEMPLATE).is_file()
        return self.folder if is_own else self.hugging_face

    @property
    def base_format(self) -> str | None:
        """Quantised format of the base of the run's adapters; None if it is not quantised."""
        saved = _saved_adapters(self.source) if isinstance(self.source, Path) else None
        return None if saved is None else saved.base_format

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            RunError: The folder has none.
        """
        if self.own_tokenizer is None:
            raise RunError(
                f"{self.folder} has no tokenizer; put its tokenizer.json or tokenizer.model there"
            )
        return self.own_tokenizer

    def pixels(self, image: Any) -> Tensor:
        """Return the model's pixel values of an image, given as a path or as a pillow image.

        Shape:
            Returns [C, H, W].

        Raises:
            RunError: No preprocessor_config.json came with the model.
            DataError: The image can't be decoded.
            MissingExtraError: mt-multimodal or pillow is not installed.
        """
        if self._preprocessing is None:
            raise RunError(
                f"{self.folder} has no preprocessor_config.json, which says how images become "
                "pixel values; put it there, or give pixel values"
            )
        return torch.from_numpy(self._preprocessing.pixels(image))

    @cached_property
    def _preprocessing(self) -> ImagePreprocessing | None:
        multimodal = require("mt_multimodal", "an image of a prompt")
        is_own = self.step is not None and (self.folder / _PREPROCESSOR).is_file()
        folder = self.folder if is_own else self.hugging_face
        return multimodal.read_image_preprocessing(folder)


@contextmanager
def open_run(
    folder: Path, step: int | None = None, *, download: bool = False, writes: bool = True
) -> Iterator[Run]:
    """Open and check a folder; concurrent training does not remove its checkpoint meanwhile.

    Args:
        folder: A run folder with `checkpoints/` and `tokenizer.json`, or a folder of Hugging Face
            with `config.json`, safetensors and a tokenizer, or the id of such a model in the local
            cache of the Hugging Face hub.
        step: Step of a run's checkpoint; None for the latest.
        download: Whether to download a model of the hub that is not in the cache.
        writes: Whether the model must predict the next token; one that sees tokens on both sides
            can embed texts.

    Raises:
        RunError: The folder is neither, has no committed checkpoint, or its parts don't fit.
        CheckpointError: The step does not exist, or its manifest is damaged.
        ExchangeError: The folder of Hugging Face is unsupported or damaged.
        TokenizerError: The tokenizer is invalid.
    """
    if (url := object_url(folder)) is not None:
        text = "copy the step into the folder `checkpoints` of its run, and name the run"
        raise RunError(f"{url} is in an object store; {text}")
    if not folder.is_dir() and not is_hub_id(str(folder)):
        raise RunError(f"{folder} is not a folder; {_WANTED}")
    folder = find_folder(folder, download=download)
    run = RunFolder(folder)
    if (folder / "config.json").exists() and not run.checkpoints.exists():
        yield _open_pretrained(folder, step, writes=writes)
        return
    if not run.tokenizer.exists():
        raise RunError(f"{run.tokenizer} is missing; {_WANTED}")
    if step is None and latest_checkpoint(run.checkpoints) is None:
        raise RunError(f"{run.checkpoints} has no committed checkpoint; let the run save one first")
    with hold_checkpoint(run.checkpoints, step) as path:
        manifest = inspect_checkpoint(path)
        saved = manifest.metadata_as(SavedModel)
        config = _model(saved, manifest, path, writes=writes)
        if saved.tokenizer is None:
            raise RunError(f"{path} came without a tokenizer; import it from a folder that has one")
        tokenizer = load_tokenizer(run.tokenizer, eod=saved.tokenizer.eod)
        _check_tokenizer(run, saved.tokenizer, tokenizer)
        _check_vocabulary(run.tokenizer, tokenizer, config)
        # Training ends documents with this token, besides those of the folder it started from.
        ends = {tokenizer.eod_id, *read_end_tokens(run.hugging_face)}
        found = {"config": config, "own_tokenizer": tokenizer, "ends": frozenset(ends)}
        found["num_tokens"] = config.vocab_size
        yield Run(folder=folder, source=path, step=manifest.step, **found)


def _open_pretrained(folder: Path, step: int | None, *, writes: bool) -> Run:
    """Check a folder of Hugging Face, in full or low precision."""
    if step is not None:
        raise RunError(f"{folder} is a folder of Hugging Face and has no steps; leave --step out")
    found = open_pretrained(folder)
    config = found.config
    if not isinstance(config, ModelConfig):
        raise RunError(f"{folder}: a {found.family.name} model writes no text; pass one that does")
    if writes:
        _check_writes(config, folder)
    tokenizer = None if found.tokenizer is None else _tokenizer_of(found.tokenizer, found, config)
    how = {"own_tokenizer": tokenizer, "num_tokens": config.vocab_size}
    padded = found.padded(config.usual_vocab_multiple)
    ends = read_end_tokens(folder) or ({tokenizer.eod_id} if tokenizer else ())
    how |= {"config": padded.config, "ends": frozenset(ends)}
    return Run(folder=folder, source=padded, **how)


def _tokenizer_of(path: Path, found: Pretrained, config: ModelConfig) -> Tokenizer:
    try:
        tokenizer = load_tokenizer(path, eod=found.eos_token)
    except TokenizerError as error:
        raise RunError(
            f"{error}; or name the token as eos_token in {found.folder / 'tokenizer_config.json'}"
        ) from error
    _check_vocabulary(path, tokenizer, config)
    return tokenizer


def _model(saved: SavedModel, manifest: Manifest, path: Path, *, writes: bool) -> ModelConfig:
    """Return the config in the metadata, checked against the stored arrays."""
    load_installed_plugins()
    load_recorded_plugins(saved.plugins)
    try:
        config = ModelConfig.from_dict(saved.model)
    except ValueError as error:
        problems = str(error).replace("\n", "; ")
        raise RunError(
            f"{path}: its metadata holds no model that this version can build: {problems}; use the "
            "version that trained it"
        ) from error
    if writes:
        _check_writes(config, path)
    prefix = f"{RunFolder.WEIGHTS}/"
    weights = [spec for name, spec in manifest.arrays.items() if name.startswith(prefix)]
    stored = sum(math.prod(spec.shape) for spec in weights)
    if saved.adapters is None and stored != config.num_parameters + config.num_buffers:
        raise RunError(
            f"{path}: its metadata describes a model of {config.num_parameters} parameters, and "
            f"{stored} are stored; use another step"
        )
    return config


def _check_writes(config: ModelConfig, path: Path) -> None:
    """Refuse a model that doesn't predict the next token."""
    writing = config.layers[config.encoder_layers :]
    if any(layer.mixer is not None and not layer.mixer.is_causal for layer in writing):
        raise RunError(
            f"{path}: its model sees tokens on both sides (causal: false), so it can't continue a "
            "text; use mt_model.GPT for its scores of hidden tokens"
        )


def _check_tokenizer(run: RunFolder, saved: SavedTokenizer, tokenizer: Tokenizer) -> None:
    expected = saved.sha256
    if tokenizer.sha256 != expected:
        raise RunError(
            f"{run.tokenizer} is not the tokenizer with which the model was trained: its sha256 is "
            f"{tokenizer.sha256[:12]}..., the checkpoint's {expected[:12]}...; put that one there"
        )


def _check_vocabulary(path: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise RunError(
            f"{path} has {tokenizer.vocab_size} tokens, and the model's vocabulary "
            f"{config.vocab_size}; use the tokenizer with which it was trained"
        )


@contextmanager
def same_run(run: Run, state: ParallelState) -> Iterator[Run]:
    """Yield the run at the first rank's step, so that a save can't make ranks differ.

    Collective: a broadcast.
    """
    group = state.group(_WORLD)
    if group is None or run.step is None:
        yield run
        return
    chosen = torch.tensor(run.step)
    dist.broadcast(chosen, group=group, group_src=0)
    if int(chosen) == run.step:
        yield run
        return
    with open_run(run.folder, int(chosen), writes=False) as other:  # it is checked
        yield other


def load_run(
    folder: Path,
    state: ParallelState,
    *,
    step: int | None = None,
    dtype: str | torch.dtype | None = None,
    ema: bool = False,
    kernels: KernelSet | Kernels = "auto",
) -> Generator:
    """Load a checkpoint of a run, or a folder of Hugging Face, on this rank's layout.

    Args:
        folder: A run folder with `checkpoints/` and `tokenizer.json`, or a folder of Hugging Face,
            whose quantised layers stay quantised.
        state: This rank's place in a layout of tensor, pipeline and expert parallelism.
        step: Step of a run's checkpoint; None for the latest that the first rank sees.
        dtype: `fp64`, `fp32`, `bf16`, `fp16` or torch's own; by default fp32 on a CPU and bf16
            on a GPU.
        ema: Whether to use the moving average of the weights (`optimizer.ema` of mt-train).
        kernels: Kernels of the model: one word for all operations, or mt-model's `Kernels`.

    Raises:
        KernelError: The named kernel does not serve.
        RunError: The folder is neither, has no committed checkpoint, its parts don't fit, or the
            run kept no average, or weights are not finite.
        CheckpointError: The step does not exist, or is damaged.
        ExchangeError: The folder of Hugging Face is unsupported or damaged.
        TokenizerError: The tokenizer is invalid.
    """
    with open_run(folder, step) as own, same_run(own, state) as run:
        return load_weights(run, state, dtype=dtype, ema=ema, kernels=kernels)


def check_ema(run: Run) -> None:
    """Raise RunError unless the checkpoint has an average of the weights."""
    path = run.source if isinstance(run.source, Path) else None
    arrays = {} if path is None else inspect_checkpoint(path).arrays
    if not any(name.startswith(f"{RunFolder.EMA}/") for name in arrays):
        raise RunError(
            f"{path or run.folder} has no average of the weights; train with optimizer.ema, or "
            "leave --ema out"
        )


def check_kv_cache(run: Run, kept: str) -> None:
    """Raise ValueError unless the model keeps keys and values, for `--kv-cache-dtype`."""
    if not any(mixer.token_cache for mixer in run.config.mixers.values()):
        raise ValueError(
            f"--kv-cache-dtype {kept}: no layer of this model keeps keys and values; leave it out"
        )


def load_weights(
    run: Run,
    state: ParallelState,
    *,
    dtype: str | torch.dtype | None = None,
    ema: bool = False,
    kernels: KernelSet | Kernels = "auto",
) -> Generator:
    """Build an opened run's model on this rank's layout and fill it; see `load_run`."""
    how = {"tokenizer": run.tokenizer, "ends": run.ends, "stages": state.group("pp")}
    model = built_model(run, state, dtype=dtype, ema=ema, kernels=kernels)
    return Generator(model=model, config=model.config, **how)


def built_model(
    run: Run,
    state: ParallelState,
    *,
    dtype: str | torch.dtype | None = None,
    ema: bool = False,
    kernels: KernelSet | Kernels = "auto",
    mtp: bool = False,
) -> GPT:
    """Build an opened run's model on this rank's layout and fill it.

    Args:
        run: The run.
        state: This rank's place in the layout.
        dtype: See `load_run`, as for `ema` and `kernels`.
        ema: Whether to use the moving average of the weights.
        kernels: Kernels of the model.
        mtp: Whether to read the modules that predict further tokens, too.
    """
    if ema:
        check_ema(run)
    chosen = dtype_of(state, dtype)
    layers = split_layers(run.config.num_layers, state.size("pp"))[state.index("pp")]
    config = run.config if mtp else replace(run.config, mtp=None)
    how: dict[str, Any] = {"layers": layers, "kernels": kernels, "dtype": chosen}
    if isinstance(run.source, Path):
        model = cast("GPT", config.build(state, **how, seed=None))
        fill_weights(model, run, state, group=state.group(_WORLD), ema=ema)
    else:
        multiple = config.vocab_multiple
        model = from_pretrained(run.folder, state=state, vocab_multiple=multiple, **how)
        model = cast("GPT", model)
    return model.eval()


def fill_weights(
    model: GPT, run: Run, state: ParallelState, *, group: Group, ema: bool = False
) -> None:
    """Read the weights of a run's checkpoint into a model; all ranks of the group call it."""
    if not isinstance(run.source, Path):
        raise RunError(f"{run.folder} is a folder of Hugging Face and has no steps")
    if _saved_adapters(run.source) is not None:
        _fill_adapted(model, run.source, state, ema=ema)
        return
    # Stored weights are the optimizer's fp32 or fp64 masters; training casts them down too.
    named, stored = list(model.named_parameters()), inspect_checkpoint(run.source).arrays
    wanted, other = RunFolder.WEIGHTS, RunFolder.EMA
    if ema:
        wanted, other = other, wanted
    place, buffers = (state.layout, state.rank), saved_buffers([model])
    averaged = {name: param for name, param in named if not ema or f"{wanted}/{name}" in stored}
    shards = param_shards(averaged.items(), *place, prefix=wanted)
    # Frozen parameters and buffers have no average.
    others = {name: param for name, param in named if name not in averaged}
    shards += param_shards(others.items(), *place, prefix=RunFolder.WEIGHTS)
    shards += param_shards(buffers.items(), *place, prefix=RunFolder.WEIGHTS, params=buffers)
    unused = (f"{prefix}/" for prefix in (RunFolder.OPTIMIZER, RunFolder.SCALING, other))
    ignore = tuple(unused) if model.config.mtp else (*unused, f"{wanted}/mtp.")
    load_checkpoint(run.source, shards, group=group, ignore=ignore, cast=True)
    _check_finite(run.source, shards)


def _saved_adapters(path: Path) -> SavedAdapters | None:
    return inspect_checkpoint(path).metadata_as(SavedModel).adapters


def _fill_adapted(model: GPT, path: Path, state: ParallelState, *, ema: bool) -> None:
    """Read the base of a run's adapters with the adapters added; each rank reads its part."""
    with open_arrays(path) as arrays:
        saved = arrays.manifest.metadata_as(SavedModel)
        with open_adapted(arrays, saved, ema=ema) as adapted:
            prefix, place = RunFolder.WEIGHTS, (state.layout, state.rank)
            shards = param_shards(model.named_parameters(), *place, prefix=prefix)
            for shard in shards:
                name = shard.name.removeprefix(f"{prefix}/")
                adapted.fill(name, shard.tensor, shard.offsets)
            for name, buffer in saved_buffers([model]).items():
                adapted.fill(name, buffer)
    _check_finite(path, shards)


def _check_finite(path: Path, shards: Sequence[TensorShard]) -> None:
    for shard in shards:
        if shard.tensor.numel() and not all(map(torch.isfinite, shard.tensor.aminmax())):
            kind = str(shard.tensor.dtype).removeprefix("torch.")
            raise RunError(
                f"{path}: array {shard.name} has values that are not finite in {kind}; use "
                "another --step, or a wider --dtype"
            )
