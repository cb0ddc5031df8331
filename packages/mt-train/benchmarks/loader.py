"""The quickstart's step with batches read ahead, against a step that waits for them.

    python packages/mt-train/benchmarks/loader.py [--rounds 25] [--files 100]

Two trainers of the quickstart's model take turns in one process, a step each. Prints the ratio of
step times, read ahead over waited for (below 1 is faster): the median of the rounds and its middle
half, of the clock and of the processor's time, which other work disturbs less. Then the time to
make the batches of a step: whole rows, packed ones, a rank's part of cp=4, and nothing read.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mt_data import (
    BatchSampler,
    GPTDataset,
    IndexedDataset,
    MixedSamples,
    Mixture,
    Rows,
    count_labels,
    mixture_sources,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import load_tokenizer
from mt_train import LoadedConfig, Trainer
from mt_train.config.loading import to_yaml
from mt_train.data.corpus import Corpus, prepare_corpus
from mt_train.data.loader import HostStep, on_host
from mt_train.quickstart import load_quickstart


class Waiting:
    """A loader that reads a step when it is asked for it."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def step(self, step: int) -> HostStep:
        """Make what a prefetcher gives."""
        batches = self.sampler.step(step)
        labels = [[count_labels([batch])] for batch in batches]
        return HostStep(batches=on_host(batches, torch.device("cpu")), labels=labels)


def quickstart(folder: Path, steps: int, files: int) -> tuple[LoadedConfig, Corpus]:
    from mt_train import load_config

    path = folder / "quickstart.yaml"
    path.write_text(to_yaml(load_quickstart(steps).config))
    loaded = load_config(path, [f"data.max_files={files}"])
    return loaded, prepare_corpus(loaded, folder)


def make_trainer(loaded: LoadedConfig, corpus: Corpus) -> Trainer:
    training = loaded.config.training
    tokenizer = load_tokenizer(corpus.tokenizer)
    length, seed = training.sequence_length, training.seed
    datasets = [
        GPTDataset(IndexedDataset(prefix), sequence_length=length, seed=seed)
        for prefix in corpus.train
    ]
    samples = MixedSamples(
        datasets,
        Mixture(sources=mixture_sources(datasets, corpus.weights)),
        num_samples=training.steps * training.global_batch_size,
    )
    sampler = BatchSampler(
        samples,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        vocab_size=tokenizer.vocab_size,
    )
    state = ParallelState(ParallelLayout())
    return Trainer(loaded.config, loaded.model(tokenizer.vocab_size), state, sampler=sampler)


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Time a call by the clock and by the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - processor


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def report_reading(trainer: Trainer, step: float) -> None:
    length = trainer.config.training.sequence_length
    eighth = length // 8
    kinds = {
        "whole rows": Rows(),
        "packed documents": Rows(packing="documents"),
        "the part of a rank of cp=4": Rows(parts=((0, eighth), (length - eighth, length))),
        "a rank that reads nothing": Rows(stages=("middle",)),
    }
    for name, rows in kinds.items():
        loader = Waiting(trainer.sampler.with_rows(rows))
        times = [seconds(lambda loader=loader: loader.step(0))[0] for _ in range(50)]
        taken = statistics.median(times)
        print(f"{name:28s} {taken * 1e3:7.3f} ms   {taken / step:8.3%} of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--files", type=int, default=100, help="of the standard library")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded, corpus = quickstart(Path(folder), options.rounds + 2, options.files)
        ahead, waits = make_trainer(loaded, corpus), make_trainer(loaded, corpus)
        waits._loader = Waiting(waits.sampler)  # type: ignore[assignment] - the same two methods
        pairs = []
        for number in range(options.rounds + 2):  # the first two warm up
            order = (ahead, waits) if number % 2 else (waits, ahead)
            taken = {id(trainer): seconds(trainer.train_step) for trainer in order}
            pairs.append((taken[id(ahead)], taken[id(waits)]))
        for index, name in enumerate(("clock", "processor")):
            ratios = [a[index] / b[index] for a, b in pairs[2:]]
            print(f"step read ahead / waited for, {name:10s} {spread(ratios)}")
        step = statistics.median(b[0] for _, b in pairs[2:])
        print(f"a step: {step * 1e3:.0f} ms")
        report_reading(waits, step)
        ahead.close()


if __name__ == "__main__":
    main()
