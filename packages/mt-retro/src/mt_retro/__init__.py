"""Retrieval over token datasets: chunks, embeddings, exact and faiss search, stored neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_retro.building import build_database as build_database
    from mt_retro.chunks import Chunks as Chunks
    from mt_retro.database import Database as Database
    from mt_retro.exact import exact_neighbours as exact_neighbours
    from mt_retro.ngrams import NGramEmbedding as NGramEmbedding
    from mt_retro.overlap import overlaps as overlaps
    from mt_retro.query import Neighbours as Neighbours
    from mt_retro.query import NeighboursRecord as NeighboursRecord
    from mt_retro.query import find_neighbours as find_neighbours
    from mt_retro.query import neighbours_of as neighbours_of
    from mt_retro.retriever import Retrieved as Retrieved
    from mt_retro.retriever import Retriever as Retriever
    from mt_retro.rows import RetroDataset as RetroDataset
    from mt_retro.rows import retro_fields as retro_fields
    from mt_retro.vectors import NamedEmbedding as NamedEmbedding
    from mt_retro.vectors import Vectors as Vectors
    from mt_retro.vectors import embed_chunks as embed_chunks
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
