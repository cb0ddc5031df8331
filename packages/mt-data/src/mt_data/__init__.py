"""Token datasets: Megatron-compatible files, rows for every objective, blending, tokenizers."""

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_data.batch import BatchSampler, MicroBatch, Rows, count_labels
from mt_data.blend import BlendedDataset, BlendOrder
from mt_data.document import (
    Document,
    DocumentReader,
    read_documents,
    standard_library_sources,
)
from mt_data.encoder import Encoder
from mt_data.error import DataError, DataFileError, MissingExtraError
from mt_data.fast import fast_obstacle
from mt_data.gpt import PADDING, GPTDataset
from mt_data.index import token_dtype
from mt_data.indexed import IndexedDataset
from mt_data.permutation import Permutation
from mt_data.prefetch import Prefetcher
from mt_data.split import parse_split, split_files, split_ranges
from mt_data.tokenizer import Tokenizer, load_tokenizer
from mt_data.windows import SequentialWindows
from mt_data.writer import IndexedWriter

if TYPE_CHECKING:
    from mt_data.corpus import CorpusStats, build_corpus, count_text_bytes, dataset_tokenizer
    from mt_data.masked import MaskedDataset, MaskedVocabulary, Masking
    from mt_data.spans import SpanCorruption, SpanDataset, SpanVocabulary
    from mt_data.training import DEFAULT_SPECIAL, train_tokenizer

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
    "DocumentReader",
    "Encoder",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "MaskedDataset",
    "MaskedVocabulary",
    "Masking",
    "MicroBatch",
    "MissingExtraError",
    "Permutation",
    "Prefetcher",
    "Rows",
    "SequentialWindows",
    "SpanCorruption",
    "SpanDataset",
    "SpanVocabulary",
    "Tokenizer",
    "build_corpus",
    "count_labels",
    "count_text_bytes",
    "dataset_tokenizer",
    "fast_obstacle",
    "load_tokenizer",
    "parse_split",
    "read_documents",
    "split_files",
    "split_ranges",
    "standard_library_sources",
    "token_dtype",
    "train_tokenizer",
]

__getattr__ = resolve_later(
    __name__,
    corpus="CorpusStats build_corpus count_text_bytes dataset_tokenizer",
    masked="MaskedDataset MaskedVocabulary Masking",
    spans="SpanCorruption SpanDataset SpanVocabulary",
    training="DEFAULT_SPECIAL train_tokenizer",
)
