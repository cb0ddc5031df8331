"""The command `mt-infer replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from mt_files import quick_imports

from mt_infer.console import print_text

if TYPE_CHECKING:
    from mt_infer.engine.engine import Engine
    from mt_infer.receipts import Answered, Receipt

_NEAR = 1e-3  # tolerance of logprobs, for another machine or layout


@dataclass(kw_only=True)
class Replay:
    """Make a server's answer again from its receipt, or print the differences."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """A file with the answer, which was asked for with "receipt": true, or with the receipt."""
    model: Path
    """The --out folder of the mt-train run, or the folder of Hugging Face, that was served."""

    def run_command(self) -> int:
        """Print the differences, and return 0 if tokens and logprobs are the same."""
        with quick_imports():
            from mt_infer.receipts import answered, read_receipt, versions

        receipt = read_receipt(self.file)
        with ExitStack() as stack:
            engine = self._opened(receipt, stack)
            tokenizer = engine.tokenizer
            now = {
                "weights": engine.digest,
                "tokenizer": None if tokenizer is None else tokenizer.sha256,
                **versions(),
            }
            then = {"weights": receipt.weights, "tokenizer": receipt.tokenizer, **receipt.versions}
            for name in now:
                if now[name] != then.get(name):
                    print_text(f"{name}: {then.get(name)} then, {now[name]} now")
            how = [
                replace(receipt.sampling, seed=each.seed)
                for each in receipt.answers[:: receipt.sampling.n]
            ]
            found = answered(engine.generate([list(each) for each in receipt.prompts], how))
        problems = list(_differences(receipt.answers, found))
        for problem in problems:
            print_text(problem)
        if problems or now["weights"] != receipt.weights:
            return 1
        count = sum(len(each.tokens) for each in found)
        same = "bit for bit" if found == receipt.answers else f"to {_NEAR} in logprobs"
        print_text(f"the same {count} tokens, {same}")
        return 0

    def _opened(self, receipt: Receipt, stack: ExitStack) -> Engine:
        """Return an engine with the dtype, kernels and step of a receipt."""
        from mt_model import DTYPES, Kernels
        from mt_parallel_state import ParallelLayout, ParallelState, detect_env, joined

        from mt_infer.engine.engine import Engine
        from mt_infer.engine.options import EngineOptions
        from mt_infer.loading import open_run

        run = stack.enter_context(open_run(self.model, receipt.step))
        device = stack.enter_context(joined(detect_env()))
        state = stack.enter_context(ParallelState(ParallelLayout(), device=device))
        kernels = dict(receipt.kernels)
        kept = kernels.pop("kv_cache", "auto")
        dtypes = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
        if receipt.dtype not in dtypes:
            raise ValueError(f"dtype {receipt.dtype!r} of the receipt: use {', '.join(dtypes)}")
        options = EngineOptions(
            kv_cache_dtype="auto" if kept == "own scales" else kept,
            prefix_cache=False,
            batch_invariant=None if kernels.get("attention") == "invariant" else False,
        )
        how = {"dtype": dtypes[receipt.dtype], "kernels": Kernels(**kernels)}
        return stack.enter_context(Engine.from_run(run, state, options, **how))


def _differences(then: tuple[Answered, ...], now: tuple[Answered, ...]) -> Iterator[str]:
    for index, (old, new) in enumerate(zip(then, now, strict=True)):
        if old.tokens != new.tokens or old.end != new.end:
            pairs = enumerate(zip(old.tokens, new.tokens, strict=False))
            shorter = min(len(old.tokens), len(new.tokens))
            first = next((place for place, pair in pairs if len(set(pair)) > 1), shorter)
            yield f"answer {index}: other tokens from number {first} on"
            continue
        far = max((abs(a - b) for a, b in zip(old.logprobs, new.logprobs, strict=True)), default=0)
        if far > _NEAR:
            yield f"answer {index}: the same tokens, with logprobs that differ by up to {far:.3g}"
