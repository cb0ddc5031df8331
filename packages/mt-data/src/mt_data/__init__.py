"""Token datasets: Megatron-compatible files, rows for every objective, blending, tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_data.corpus import CorpusStats as CorpusStats
    from mt_data.corpus import build_corpus as build_corpus
    from mt_data.corpus import count_text_bytes as count_text_bytes
    from mt_data.corpus import dataset_tokenizer as dataset_tokenizer
    from mt_data.datasets.batch import BatchSampler as BatchSampler
    from mt_data.datasets.batch import GatheredRow as GatheredRow
    from mt_data.datasets.batch import MicroBatch as MicroBatch
    from mt_data.datasets.batch import Rows as Rows
    from mt_data.datasets.batch import count_labels as count_labels
    from mt_data.datasets.blend import BlendedDataset as BlendedDataset
    from mt_data.datasets.blend import BlendOrder as BlendOrder
    from mt_data.datasets.blend import SplitOrder as SplitOrder
    from mt_data.datasets.chat import ChatDataset as ChatDataset
    from mt_data.datasets.chat import RenderedRows as RenderedRows
    from mt_data.datasets.chat import chat_fields as chat_fields
    from mt_data.datasets.fill_in_middle import FillInMiddleDataset as FillInMiddleDataset
    from mt_data.datasets.gpt import PADDING as PADDING
    from mt_data.datasets.gpt import GPTDataset as GPTDataset
    from mt_data.datasets.gpt import text_fields as text_fields
    from mt_data.datasets.masked import MaskedDataset as MaskedDataset
    from mt_data.datasets.masked import MaskedVocabulary as MaskedVocabulary
    from mt_data.datasets.masked import masked_fields as masked_fields
    from mt_data.datasets.masking import Masking as Masking
    from mt_data.datasets.middle import FillInMiddle as FillInMiddle
    from mt_data.datasets.mixture import MixedRows as MixedRows
    from mt_data.datasets.mixture import MixedSamples as MixedSamples
    from mt_data.datasets.mixture import Mixture as Mixture
    from mt_data.datasets.mixture import MixtureSource as MixtureSource
    from mt_data.datasets.mixture import mixed as mixed
    from mt_data.datasets.mixture import mixture_sources as mixture_sources
    from mt_data.datasets.packed_rows import PackedRows as PackedRows
    from mt_data.datasets.packed_rows import RowPacking as RowPacking
    from mt_data.datasets.packing import PackedOrder as PackedOrder
    from mt_data.datasets.packing import best_fit as best_fit
    from mt_data.datasets.pairs import PairDataset as PairDataset
    from mt_data.datasets.permutation import Permutation as Permutation
    from mt_data.datasets.prefetch import Prefetcher as Prefetcher
    from mt_data.datasets.row_dataset import InOrder as InOrder
    from mt_data.datasets.row_dataset import JoinedRows as JoinedRows
    from mt_data.datasets.row_dataset import RowDataset as RowDataset
    from mt_data.datasets.shards import ShardedDataset as ShardedDataset
    from mt_data.datasets.shards import ShardedRows as ShardedRows
    from mt_data.datasets.spans import SpanCorruption as SpanCorruption
    from mt_data.datasets.spans import SpanDataset as SpanDataset
    from mt_data.datasets.spans import SpanVocabulary as SpanVocabulary
    from mt_data.datasets.spans import span_fields as span_fields
    from mt_data.datasets.windows import SequentialWindows as SequentialWindows
    from mt_data.datasets.windows import TokenRanges as TokenRanges
    from mt_data.documents.chat import ChatReader as ChatReader
    from mt_data.documents.chat import ChatReport as ChatReport
    from mt_data.documents.chat import TooLong as TooLong
    from mt_data.documents.conversations import Conversation as Conversation
    from mt_data.documents.conversations import parse_conversation as parse_conversation
    from mt_data.documents.conversations import read_lines as read_lines
    from mt_data.documents.parts import Part as Part
    from mt_data.documents.reader import Document as Document
    from mt_data.documents.reader import read_documents as read_documents
    from mt_data.documents.reader import standard_library_sources as standard_library_sources
    from mt_data.documents.split import HeldOut as HeldOut
    from mt_data.documents.split import cut_document as cut_document
    from mt_data.documents.split import parse_split as parse_split
    from mt_data.documents.split import split_files as split_files
    from mt_data.documents.split import split_ranges as split_ranges
    from mt_data.error import DataError as DataError
    from mt_data.error import DataFileError as DataFileError
    from mt_data.jobs import Where as Where
    from mt_data.jobs import run_jobs as run_jobs
    from mt_data.merge import merge_datasets as merge_datasets
    from mt_data.shards import ShardPlan as ShardPlan
    from mt_data.shards import Shards as Shards
    from mt_data.shards import build_shards as build_shards
    from mt_data.shards import shard_prefix as shard_prefix
    from mt_data.storage.index import token_dtype as token_dtype
    from mt_data.storage.indexed import IndexedDataset as IndexedDataset
    from mt_data.storage.writer import IndexedWriter as IndexedWriter
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
