"""The `mt-hf` command: models of Hugging Face transformers, into runs and out of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mt_files import UserError, did_you_mean, shorten

_USAGE_ERROR, _BROKEN_PIPE, _INTERRUPTED, _DIFFERENT = 2, 141, 130, 1


class CommandError(UserError):
    """What a command can't do."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run folder of a Hugging Face folder, for mt-infer and mt-train.

    Attributes:
        folder: With config.json and safetensors files.
        out: The run folder: new, or empty.
        vocab_multiple: Pad embedding and head to rows for a multiple of it, so that ranks can share
            them; 128, or 8 for less than 1024 tokens, where left out.
        eod: The token that ends a document, where it is not the folder's eos_token.
    """

    folder: Path
    out: Path
    vocab_multiple: int | None = None
    eod: str | None = None

    def run(self) -> int:
        """Run the command."""
        from mt_hf.writing.checkpoint import import_pretrained

        config = import_pretrained(
            self.folder, self.out, vocab_multiple=self.vocab_multiple, eod=self.eod
        )
        _say(f"{self.out}: {config.num_layers} layers, {config.num_parameters} parameters")
        return 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint of any layout as a Hugging Face folder.

    Attributes:
        checkpoint: A run folder, or one of its step folders.
        folder: The Hugging Face folder: new, or empty.
        like: A folder whose tokenizer, generation_config.json and further fields of config.json
            are carried over; where left out, the one that the run's weights came from.
        family: The family, where several have such a model.
        dtype: Of the tensors; where left out, that of `like`, or of the checkpoint.
        ema: Write the average of the weights over the steps.
        file_size: Largest file, in bytes of tensors.
    """

    checkpoint: Path
    folder: Path
    like: Path | None = None
    family: str | None = None
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    ema: bool = False
    file_size: int = 5_000_000_000

    def run(self) -> int:
        """Run the command."""
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
        _say(f"{self.folder}: written")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare the logits of a Hugging Face folder with those of transformers, in fp32.

    Ends with 0 where they agree, and with 1 where they don't.

    Attributes:
        folder: With config.json and safetensors files.
        tolerance: Largest difference, relative to the largest logit.
        tokens: Length of the sequence that is compared, of random tokens.
    """

    folder: Path
    tolerance: float = 1e-4
    tokens: int = 64

    def run(self) -> int:
        """Run the command."""
        if find_spec("transformers") is None:
            raise CommandError("comparing needs: pip install 'mt-hf[transformers]'")
        if self.tokens < 1 or self.tolerance <= 0:
            raise CommandError("--tokens is 1 or more, and --tolerance above 0")
        from mt_hf.commands.verification import compare

        found = compare(self.folder, length=self.tokens)
        agree = found.relative <= self.tolerance
        _say(
            f"{self.folder}: largest difference {found.difference:.3g} of logits up to "
            f"{found.largest:.3g}, the same best token at {found.same} of {found.positions} "
            f"positions: {'they agree' if agree else 'they differ'}"
        )
        return 0 if agree else _DIFFERENT


@dataclass(frozen=True, kw_only=True)
class Upcycle:
    """Make a run of a mixture of experts out of a dense one, with the same logits.

    Experts are copies of the feed-forwards, or of shards of them, behind new routers.

    Attributes:
        checkpoint: A run folder, such as `mt-hf import` makes, or one of its step folders.
        out: The run folder: new, or empty.
        num_experts: Of a layer.
        top_k: How many serve a token, a multiple of the granularity.
        granularity: How many shards of its width a feed-forward is cut into; each expert holds one.
        every: Layers whose number from 1 is a multiple of this get experts.
        aux_loss: Weight of the loss that keeps the load even, in training.
        seed: Of the routers.
        ema: Take the average of the weights over the steps.
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
        _say(f"{self.out}: {config.num_layers} layers, {config.num_parameters} parameters")
        return 0


COMMANDS = {"import": Import, "export": Export, "upcycle": Upcycle, "verify": Verify}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-hf`; ends with 2 and one message when something is wrong.

    Ctrl-C ends it with 130 and leaves nothing behind.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_BROKEN_PIPE) from None
    except KeyboardInterrupt:
        _say("mt-hf: interrupted; nothing was written", stream=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    except (UserError, OSError, ValueError, MemoryError) as error:
        text = "there is not enough memory" if isinstance(error, MemoryError) else str(error)
        _say(f"mt-hf: {text}", stream=sys.stderr)
        raise SystemExit(_USAGE_ERROR) from None
    raise SystemExit(code)


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        _say(f"mt-hf {version('mt-hf')}")
        return 0
    command = arguments[0] if arguments else ""
    if command and not command.startswith("-") and command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise CommandError(f"there is no command {shorten(command)}. {hint}")
    for name in ("tyro", "mt_ckpt", "mt_data"):
        if find_spec(name) is None:
            raise CommandError("the mt-hf command needs: pip install 'mt-hf[cli]'")
    import tyro

    parsed: Any = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="mt-hf",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    return parsed.run()


def _say(text: str, *, stream: Any = None) -> None:
    """Write a line; what a console can't show is escaped."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
