"""The order in which documents are read and samples are drawn, epoch after epoch.

A *stream* is a list of documents read one after the other. Samples are cut from it every
`sequence_length` tokens; each has one token more than it advances, so that the last input has a
label, and neighbouring samples overlap by that token.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Thread

import numpy as np
from mt_files import FileError
from numpy.typing import NDArray

from mt_data.datasets.permutation import Permutation
from mt_data.datasets.shared_order import OrderFolder
from mt_data.datasets.stream import Stream
from mt_data.error import DataError, DataFileError

OVERLAP = 1
FINAL_EPOCH_SHARE = 0.8
EPOCHS_IN_MEMORY = 2
_AHEAD_FROM = 1 << 13  # documents from which the order takes longer than a thread to start


def sample_count(tokens: int, sequence_length: int, *, keep_tail: bool) -> int:
    """Return the number of samples in a stream, in exact integer arithmetic."""
    room = max(0, tokens - OVERLAP)
    return -(-room // sequence_length) if keep_tail else room // sequence_length


def _epoch_samples(tokens: int, sequence_length: int, *, keep_tail: bool) -> int:
    if count := sample_count(tokens, sequence_length, keep_tail=keep_tail):
        return count
    raise DataError(
        f"{tokens} tokens do not hold one sample of sequence_length + 1 = {sequence_length + 1}; "
        "use a longer corpus or a shorter sequence_length (training.sequence_length in a run's "
        "YAML file), or in Python keep_tail=True, which pads the incomplete sample"
    )


class StableOrder:
    """An order in which each epoch is shuffled independently, by the key (seed, epoch).

    Sample i is number i mod n of epoch i div n, where n is the number of samples in an epoch.
    Nothing depends on the total number of samples, so a longer run sees the same beginning. Unless
    the tail is kept, up to `sequence_length` tokens at the end of an epoch's stream are left out of
    that epoch (different ones in each epoch, as the documents are shuffled).

    With a folder, the stream of an epoch is a file there, which the processes of a node share (see
    `OrderFolder`). From the middle of an epoch on a thread makes the stream of the next one, unless
    that takes no time.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        sequence_length: int,
        seed: int,
        *,
        keep_tail: bool,
        folder: OrderFolder | None = None,
    ) -> None:
        self._lengths, self._sequence_length, self._seed = lengths, sequence_length, seed
        tokens = int(lengths.sum(dtype=np.int64))
        self.num_samples = _epoch_samples(tokens, sequence_length, keep_tail=keep_tail)
        self._epochs: dict[int, tuple[Stream, Permutation]] = {}
        self._folder, self._ahead = folder, -1
        self._ready: dict[int, Stream] = {}  # by the thread, for the next epoch

    def find(self, index: int) -> tuple[Stream, int]:
        """Return the stream of sample `index` (any index >= 0), and the sample's first token."""
        epoch, rank = divmod(index, self.num_samples)
        stream, shuffle = self._epochs.get(epoch) or self._build(epoch)
        is_late = 2 * rank >= self.num_samples and self._ahead <= epoch
        if is_late and (self._folder is not None or len(self._lengths) >= _AHEAD_FROM):
            self._ahead = epoch + 1
            Thread(target=self._prepare, args=(epoch + 1,), daemon=True).start()
        return stream, shuffle(rank) * self._sequence_length

    def _build(self, epoch: int) -> tuple[Stream, Permutation]:
        stream = self._ready.pop(epoch, None) or self._stream(epoch)
        built = stream, Permutation(self.num_samples, self._seed, epoch, "samples")
        # A batch may span two epochs, but never three, so two are kept.
        kept = list(self._epochs.items())[1 - EPOCHS_IN_MEMORY :]
        self._epochs = dict([*kept, (epoch, built)])
        return built

    def _prepare(self, epoch: int) -> None:
        """Make and map the stream of an epoch; an error is raised by the call that needs it."""
        with suppress(DataFileError, FileError, OSError):
            self._ready = {epoch: self._stream(epoch)}

    def _stream(self, epoch: int) -> Stream:
        def make() -> Stream:
            shuffle = Permutation(len(self._lengths), self._seed, epoch, "documents")
            return Stream.shuffled(self._lengths, shuffle)

        return make() if self._folder is None else self._folder.stream(epoch, make)


class MegatronOrder:
    """Megatron-LM's order: all epochs are joined into one stream and shuffled together.

    One `numpy.random.RandomState(seed)` shuffles first the documents, then the samples. The total
    number of samples decides the number of epochs and so the whole order: a longer run has a
    different beginning. Use it to reproduce a Megatron run.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        sequence_length: int,
        seed: int,
        *,
        keep_tail: bool,
        num_samples: int | None,
    ) -> None:
        tokens = int(lengths.sum(dtype=np.int64))
        wanted = 0 if num_samples is None else num_samples * sequence_length + OVERLAP
        if tokens == 0:
            raise DataError("there are no tokens to draw samples from")
        epochs = max(1, -(-wanted // tokens))
        split = self._split(tokens, sequence_length, epochs, num_samples)
        random = np.random.RandomState(seed)
        parts = [epochs] if split is None else [epochs - 1, 1]
        once = np.arange(len(lengths), dtype=np.int32)
        self.document_order = _shuffled(random, [np.tile(once, part) for part in parts])
        self._stream = Stream.of(self.document_order, lengths)
        self._sequence_length = sequence_length
        count = _epoch_samples(epochs * tokens, sequence_length, keep_tail=keep_tail)
        self.num_samples = count
        samples = np.arange(count, dtype=np.uint32 if count < 2**32 - 2 else np.int64)
        self.shuffle = _shuffled(random, np.split(samples, [] if split is None else [split]))

    @staticmethod
    def _split(
        tokens: int, sequence_length: int, epochs: int, num_samples: int | None
    ) -> int | None:
        """Return the first sample of a last epoch that Megatron shuffles separately, else None.

        Megatron does so if only a small part of the epoch is used.
        """
        if epochs == 1 or num_samples is None:
            return None
        before = ((epochs - 1) * tokens - OVERLAP) // sequence_length
        each = (tokens - OVERLAP) // sequence_length
        return before if num_samples - before < int(FINAL_EPOCH_SHARE * each) else None

    def find(self, index: int) -> tuple[Stream, int]:
        """Return the stream and the first token of a sample; past the end, samples repeat."""
        return self._stream, int(self.shuffle[index % self.num_samples]) * self._sequence_length


def _shuffled(random: np.random.RandomState, parts: list[NDArray]) -> NDArray:
    """Shuffle each part separately, one after the other, and join them."""
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)
