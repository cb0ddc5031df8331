"""Token datasets: Megatron-compatible files, rows for every objective, blending, tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_data.datasets.batch import BatchSampler, MicroBatch, Rows, count_labels
from mt_data.datasets.blend import BlendedDataset, BlendOrder
from mt_data.datasets.gpt import PADDING, GPTDataset
from mt_data.datasets.permutation import Permutation
from mt_data.datasets.windows import SequentialWindows, TokenRanges
from mt_data.error import DataError, DataFileError
from mt_data.storage.index import token_dtype
from mt_data.storage.indexed import IndexedDataset

if TYPE_CHECKING:
    from mt_data.corpus import CorpusStats, build_corpus, count_text_bytes, dataset_tokenizer
    from mt_data.datasets.masked import MaskedDataset, MaskedVocabulary, Masking
    from mt_data.datasets.prefetch import Prefetcher
    from mt_data.datasets.spans import SpanCorruption, SpanDataset, SpanVocabulary
    from mt_data.documents.reader import Document, read_documents, standard_library_sources
    from mt_data.documents.split import parse_split, split_files, split_ranges
    from mt_data.storage.writer import IndexedWriter
    from mt_data.tokenizers.encoder import Encoder
    from mt_data.tokenizers.tokenizer import Tokenizer, load_tokenizer
    from mt_data.tokenizers.training import DEFAULT_SPECIAL, train_tokenizer

__all__ = [
    "DEFAULT_SPECIAL",
    "PADDING",
    "BatchSampler",
    "BlendOrder",
    "BlendedDataset",
    "CorpusStats",
    "DataError",
    "DataFileError",
    "Document",
    "Encoder",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "MaskedDataset",
    "MaskedVocabulary",
    "Masking",
    "MicroBatch",
    "Permutation",
    "Prefetcher",
    "Rows",
    "SequentialWindows",
    "SpanCorruption",
    "SpanDataset",
    "SpanVocabulary",
    "TokenRanges",
    "Tokenizer",
    "build_corpus",
    "count_labels",
    "count_text_bytes",
    "dataset_tokenizer",
    "load_tokenizer",
    "parse_split",
    "read_documents",
    "split_files",
    "split_ranges",
    "standard_library_sources",
    "token_dtype",
    "train_tokenizer",
]

# Resolved at first use, so that an import stays light.
__getattr__ = resolve_later(__name__)
