"""The command `mt-infer embed`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from mt_files import quick_imports

from mt_infer.commands.flags import flag_of, options_of
from mt_infer.console import say, told_once

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

    from mt_infer.loading import Run


@dataclass(kw_only=True)
class Embed:
    """Write a model's vectors of a dataset's chunks, for `mt-retro build --embeddings`.

    A vector is the mean of the last layer's features. A killed command goes on where it was, and
    any number of processes writes the same bits. Needs mt-infer[retro].
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run or a folder of Hugging Face, such as a BERT."""
    data: str
    """The dataset, without ending."""
    out: Path
    """The folder of the vectors."""
    chunk: int = 64
    """Number of tokens in a chunk."""
    tokenizer: Path | None = None
    """The tokenizer of the dataset, if the model has another one; the text is encoded anew."""
    step: int | None = None
    """The checkpoint of this step of a run; by default the latest."""
    download: bool = False
    """Download a model of the hub that is not in the cache."""
    ema: bool = False
    """Use the moving average of the weights, if training kept one (optimizer.ema)."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the computation; by default fp32."""
    nproc: int = 1
    """Number of processes to start, each with the whole model on one thread and a share of the
    chunks. Leave it out under torchrun or srun."""

    def run_command(self) -> int:
        """Write the vectors, and return the exit status."""
        with quick_imports():
            from mt_parallel_state import detect_env, launch, must_launch

            from mt_infer.loading import open_run

        if find_spec("mt_retro") is None:
            raise ValueError("embed needs: pip install 'mt-infer[retro]'")
        env = detect_env()
        with told_once(env):
            if self.nproc < 1 or self.chunk < 1:
                raise ValueError(f"--nproc {self.nproc} --chunk {self.chunk}: use 1 or more")
            opened = open_run(self.run, self.step, download=self.download, writes=False)
        with opened as run:
            self.download, self.step = False, run.step
            if must_launch(self.nproc, env):
                return launch("mt_infer", _as_arguments(self), self.nproc)
            self._write(run, env)
        return 0

    def _write(self, run: Run, env: DistributedEnv) -> None:
        import torch.distributed as dist
        from mt_data import IndexedDataset, Part
        from mt_files import Progress
        from mt_parallel_state import ParallelLayout, ParallelState, joined
        from mt_retro import Chunks, Vectors, embed_chunks
        from mt_tokenizer import load_tokenizer

        from mt_infer.embedding import embedder_of
        from mt_infer.loading import same_run

        with told_once(env):
            source = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
            chunks = Chunks(IndexedDataset(self.data), self.chunk)
            own = source or run.own_tokenizer
            if own is not None and chunks.tokenizer not in (None, own.sha256):
                raise ValueError(
                    f"{self.data} has the tokens of another tokenizer; name it with --tokenizer "
                    f"{self.data}.tokenizer.json"
                )
        layout = ParallelLayout(dp=env.world_size)
        with joined(env) as device, ParallelState(layout, rank=env.rank, device=device) as state:
            with same_run(run, state) as agreed:
                how = {"source": source, "dtype": self.dtype, "ema": self.ema}
                embed = embedder_of(agreed, state, **how)
            part = Part(number=env.rank + 1, count=env.world_size)
            progress = Progress(shown=None if env.rank == 0 else False)
            try:
                embed_chunks(chunks, self.out, embed, part=part, progress=progress)
            finally:
                progress.clear()
            if env.world_size > 1:
                dist.barrier()  # the last one joins the parts
        if env.rank == 0:
            say(f"{self.out}: {len(Vectors(self.out))} vectors of {embed.dim} values")
            say(f"embedded by {embed.name}")


def _as_arguments(command: Embed) -> list[str]:
    names, switches = options_of(Embed)
    given = {name: getattr(command, name) for name in names}
    options = [f"{flag_of(name)}={value}" for name, value in given.items() if value is not None]
    switches = [flag_of(name) for name in switches if getattr(command, name)]
    return ["embed", *options, *switches, "--", str(command.run)]
