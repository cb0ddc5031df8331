"""The command `mt-infer export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro
from mt_files import quick_imports

from mt_infer.console import print_text, say

if TYPE_CHECKING:
    from mt_hf import TextFormat, TRTLLMType

    from mt_infer.loading import Run


@dataclass(kw_only=True)
class Export:
    """Write a model for another engine: a GGUF file for llama.cpp, or a TensorRT-LLM checkpoint."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run, a folder of Hugging Face, or a model of the hub in the
    local cache, such as Qwen/Qwen3-0.6B."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The file to make, for gguf, or the folder; it must not exist."""
    format: Literal["gguf", "trtllm"]
    """The format: gguf, a file with weights, tokenizer and chat template (needs mt-infer[gguf]); or
    trtllm, a folder with a file of weights for each rank, from which TensorRT-LLM builds engines.
    """
    type: Literal["f32", "bf16", "f16", "q8_0"] = "bf16"
    """Format of matrices; q8_0, for gguf, has 8 bits, and an fp16 scale for 32 weights."""
    tp: int = 1
    """For trtllm: number of ranks that share each layer."""
    pp: int = 1
    """For trtllm: number of stages with a part of the layers each."""
    splitting: str | None = None
    """For gguf: llama.cpp's name of the rule by which the tokenizer splits text, such as gpt-2, if
    it is not found."""
    step: int | None = None
    """The checkpoint of this step of a run; by default the latest."""
    download: bool = False
    """Download a model of the hub that is not in the cache."""
    ema: bool = False
    """Use the moving average of the weights, if training kept one (optimizer.ema)."""

    def run_command(self) -> int:
        """Write the model, print its size and return the exit status."""
        with quick_imports():
            from mt_infer.loading import check_ema, open_run

        _check_options(self)
        with open_run(self.run, self.step, download=self.download) as run:
            if self.ema:
                check_ema(run)
            made = _gguf(self, run) if self.format == "gguf" else _trtllm(self, run)
        print_text(f"{self.out}: {made}, {self.type}")
        return 0


def _check_options(command: Export) -> None:
    """Refuse options of the other format."""
    if command.format == "gguf" and (command.tp, command.pp) != (1, 1):
        raise ValueError("--tp and --pp are for --format trtllm; a GGUF file is for any number")
    if command.format == "trtllm" and command.type == "q8_0":
        raise ValueError("--type q8_0 is for --format gguf; use f32, bf16 or f16")
    if command.format == "trtllm" and command.splitting is not None:
        raise ValueError(
            "--splitting is for --format gguf; TensorRT-LLM reads the tokenizer itself"
        )


def _gguf(command: Export, run: Run) -> str:
    from mt_hf import export_gguf

    text = _text_of(run, command.splitting)
    made = export_gguf(run.source, command.out, text, kind=command.type, ema=command.ema)
    if made.context_length < run.config.max_sequence_length:
        say(
            f"the context is {made.context_length} tokens, the model's shortest attention window: "
            f"llama.cpp has no windows for {made.architecture}"
        )
    if not made.is_split_alike:
        say(
            "llama.cpp has no rule that splits text as this tokenizer does; by the file's rule it "
            "makes other tokens of some texts. Send it tokens, or name a rule with --splitting"
        )
    return f"{made.architecture}, {made.num_tensors} tensors"


def _trtllm(command: Export, run: Run) -> str:
    from mt_hf import export_trtllm

    kind = cast("TRTLLMType", command.type)
    how = {"tp": command.tp, "pp": command.pp, "ema": command.ema}
    made = export_trtllm(run.source, command.out, kind=kind, **how)
    if made.windows is not None:
        say(
            "config.json has no attention windows; give the engine max_attention_window "
            f"{list(made.windows)}"
        )
    return f"{made.architecture}, {made.ranks} ranks"


def _text_of(run: Run, splitting: str | None) -> TextFormat:
    """Return the tokenization of a model's text, from the files beside the model."""
    from mt_files import read_json
    from mt_hf import TextFormat
    from mt_tokenizer import read_template

    template, names = read_template(run.chat_folder)
    path, begins = run.hugging_face / "tokenizer_config.json", None
    if run.tokenizer.suffix == ".model" and path.exists():  # which does not say it itself
        adds = read_json(path, limit=1 << 26).get("add_bos_token")
        begins = names.get("bos_token") if adds else None
    return TextFormat(
        tokenizer=run.tokenizer,
        ends=run.ends,
        begins=begins,
        template=template,
        splitting=splitting,
    )
