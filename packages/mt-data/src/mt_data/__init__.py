"""Token datasets: Megatron-compatible files, GPT samples, blending, tokenizers."""

from mt_data.batch import BatchSampler, MicroBatch, Rows, count_labels
from mt_data.blend import BlendedDataset, BlendOrder
from mt_data.corpus import CorpusStats, build_corpus, count_text_bytes, dataset_tokenizer
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
from mt_data.training import train_tokenizer
from mt_data.windows import SequentialWindows
from mt_data.writer import IndexedWriter

__all__ = [
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
    "MicroBatch",
    "MissingExtraError",
    "Permutation",
    "Prefetcher",
    "Rows",
    "SequentialWindows",
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
