"""The `mt-hf` command: conversion between folders of Hugging Face and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mt_files import UserError, run_command, say

if TYPE_CHECKING:
    from mt_model import StackConfig

_DIFFERENT = 1


class CommandError(UserError):
    """A command can't do its work."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Convert a Hugging Face folder, or a step of Megatron-LM, to a run folder.

    mt-infer and mt-train read it.

    Attributes:
        folder: A folder with config.json and safetensors files, a model of the Hugging Face hub in
            the local cache, such as Qwen/Qwen3-0.6B, or a step that Megatron-core's
            dist_checkpointing wrote, such as iter_0001000.
        out: The run folder: new, or empty.
        vocab_multiple: Multiple to which rows of embedding and head are padded, so that ranks can
            split them; by default 128, or 8 below 1024 tokens. Megatron's are padded already.
        eod: The token that ends a document, if it is not the folder's eos_token.
        download: Download a model of the hub that is not in the cache.
    """

    folder: Path
    out: Path
    vocab_multiple: int | None = None
    eod: str | None = None
    download: bool = False

    def run(self) -> int:
        """Run the command."""
        from mt_hf.megatron.importing import import_megatron, is_megatron
        from mt_hf.reading.hub import find_folder
        from mt_hf.writing.checkpoint import import_pretrained

        if is_megatron(self.folder):
            config: StackConfig = import_megatron(self.folder, self.out)
        else:
            folder = find_folder(self.folder, download=self.download)
            config = import_pretrained(
                folder, self.out, vocab_multiple=self.vocab_multiple, eod=self.eod
            )
        say(f"{self.out}: {config.num_layers} layers, {config.num_parameters} parameters")
        return 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint of any layout as a Hugging Face folder.

    Attributes:
        checkpoint: A run folder, or one of its step folders.
        folder: The Hugging Face folder: new, or empty.
        like: A folder whose tokenizer, generation_config.json and further fields of config.json
            are copied; by default the one from which the run's weights came.
        family: The family, if several have such a model.
        dtype: Dtype of the tensors; by default the dtype of `like`, or of the checkpoint.
        ema: Write the moving average of the weights.
        adapter: Write the adapters of a run with lora alone, for Hugging Face PEFT; without it they
            are added to the weights of their base.
        file_size: Largest size of a file's tensors, in bytes.
    """

    checkpoint: Path
    folder: Path
    like: Path | None = None
    family: str | None = None
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    ema: bool = False
    adapter: bool = False
    file_size: int = 5_000_000_000

    def run(self) -> int:
        """Run the command."""
        if self.adapter:
            return self._write_adapter()
        from mt_model import DTYPES

        from mt_hf.writing.checkpoint import export_checkpoint

        export_checkpoint(
            self.checkpoint,
            self.folder,
            like=self.like,
            family=self.family,
            dtype=None if self.dtype is None else DTYPES[self.dtype],
            ema=self.ema,
            file_size=self.file_size,
        )
        say(f"{self.folder}: written")
        return 0

    def _write_adapter(self) -> int:
        if self.like is not None or self.dtype is not None:
            raise CommandError(
                "--adapter writes adapters as they are; leave --like and --dtype out"
            )
        from mt_hf.writing.adapter import export_adapter

        export_adapter(self.checkpoint, self.folder, family=self.family, ema=self.ema)
        say(f"{self.folder}: written")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare our logits of a Hugging Face folder with transformers' logits, in fp32.

    The exit status is 0 if they agree, and 1 if they don't.

    Attributes:
        folder: A folder with config.json and safetensors files, or a model of the Hugging Face hub
            in the local cache, such as Qwen/Qwen3-0.6B.
        tolerance: Largest difference, relative to the largest logit.
        tokens: Number of random tokens in the compared sequence.
        download: Download a model of the hub that is not in the cache.
    """

    folder: Path
    tolerance: float = 1e-4
    tokens: int = 64
    download: bool = False

    def run(self) -> int:
        """Run the command."""
        if find_spec("transformers") is None:
            raise CommandError("comparing needs: pip install transformers")
        if self.tokens < 1 or self.tolerance <= 0:
            raise CommandError("--tokens is 1 or more, and --tolerance above 0")
        from mt_hf.commands.verification import compare
        from mt_hf.reading.hub import find_folder

        folder = find_folder(self.folder, download=self.download)
        found = compare(folder, length=self.tokens)
        agree = found.relative <= self.tolerance
        say(
            f"{self.folder}: largest difference {found.difference:.3g} of logits up to "
            f"{found.largest:.3g}, the same best token at {found.same} of {found.positions} "
            f"positions: {'they agree' if agree else 'they differ'}"
        )
        return 0 if agree else _DIFFERENT


@dataclass(frozen=True, kw_only=True)
class Upcycle:
    """Convert a dense run to a run of a mixture of experts with the same logits.

    Experts are copies of the feed-forwards, or of shards of them, with new routers.

    Attributes:
        checkpoint: A run folder, such as `mt-hf import` makes, or one of its step folders.
        out: The run folder: new, or empty.
        num_experts: Number of experts in a layer.
        top_k: Number of experts for each token, a multiple of the granularity.
        granularity: Number of shards into which a feed-forward is cut; each expert holds one.
        every: Layers whose number, from 1, is a multiple of this get experts.
        aux_loss: Weight of the load-balancing loss in training.
        seed: Seed of the routers.
        ema: Use the moving average of the weights.
    """

    checkpoint: Path
    out: Path
    num_experts: int = 8
    top_k: int = 2
    granularity: int = 1
    every: int = 1
    aux_loss: float = 0.01
    seed: int = 0
    ema: bool = False

    def run(self) -> int:
        """Run the command."""
        from mt_hf.commands.upcycling import Upcycling, upcycle_checkpoint

        how = Upcycling(**{each.name: getattr(self, each.name) for each in fields(Upcycling)})
        config = upcycle_checkpoint(self.checkpoint, self.out, how, ema=self.ema)
        say(f"{self.out}: {config.num_layers} layers, {config.num_parameters} parameters")
        return 0


COMMANDS = {"import": Import, "export": Export, "upcycle": Upcycle, "verify": Verify}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mt-hf`; weights that are not finite give 1, and `run_command` says the rest."""
    needs = ("mt_ckpt", "mt_tokenizer")
    run_command(
        "mt-hf", COMMANDS, arguments, description=__doc__, errors=(ValueError,), needs=needs
    )
