"""Building and joining databases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mt_data import DataError, IndexedDataset, Part
from mt_files import Progress, remove_temporaries

from mt_retro.approximate import EXACT, FaissIndex, choose_index
from mt_retro.chunks import Chunks, check_tokenizers, data_digest
from mt_retro.database import INDEX, Database, DatabaseRecord, SourceRecord
from mt_retro.ngrams import NGramEmbedding
from mt_retro.stored import RECORD, path_from, write_record
from mt_retro.vectors import JoinedVectors, NamedEmbedding, Vectors, embed_chunks
from mt_retro.work import alone, check_empty

Given = str | os.PathLike[str]


@dataclass(kw_only=True, eq=False)
class _Source:
    """A dataset of the new database.

    Attributes:
        chunks: Its chunks.
        data: Its digest.
        vectors: The vectors of its chunks; None if they do not exist yet.
    """

    chunks: Chunks
    data: str
    vectors: Vectors | None

    def embedding(self, made: str) -> str:
        """Return the name of the embedding: `made` for new vectors."""
        return made if self.vectors is None else self.vectors.record.embedding

    def folder_in(self, folder: Path) -> Path:
        """Return the folder for new vectors of this dataset."""
        return folder / f"vectors-{self.data[:16]}"


def build_database(
    inputs: Sequence[Given],
    out: Given,
    *,
    chunk: int = 64,
    embedding: NamedEmbedding | Sequence[Vectors] | None = None,
    index: str = EXACT,
    part: Part | None = None,
    progress: Progress | None = None,
) -> Database | None:
    """Build a database of datasets, or join databases.

    The results of an earlier call with the same arguments are kept. The parts may be made by
    several processes that share the file system; the last one joins them.

    Args:
        inputs: Prefixes of datasets, and folders of databases whose datasets to include.
        out: The new folder.
        chunk: Number of tokens in a chunk.
        embedding: Function from chunks to vectors, or the vectors of datasets; by default, and for
            datasets without vectors, the built-in function.
        index: `exact`, a factory string of faiss, or `auto`, which chooses by size.
        part: Share of the vectors to make; by default all.
        progress: Where to show the progress.

    Returns:
        The database; None if vectors of other parts are missing.

    Raises:
        DataError: The inputs don't fit together, there are too few chunks for the index, or the
            folder holds something else.
    """
    folder, progress = Path(out), progress or Progress(shown=False)
    given: Sequence[Vectors] = embedding if isinstance(embedding, Sequence) else ()
    embed = NGramEmbedding() if embedding is None or isinstance(embedding, Sequence) else embedding
    sources = _sources(inputs, given, chunk)
    _check(sources, chunk, embed.name)
    factory = choose_index(index, sum(len(source.chunks) for source in sources))
    if (folder / RECORD).exists():
        return _same(Database(folder), sources, (chunk, embed.name, factory))
    check_empty(folder, {RECORD, INDEX, *(source.folder_in(folder).name for source in sources)})
    for source in sources:
        place = source.folder_in(folder)
        if source.vectors is not None:
            source.vectors.verify()
        elif embed_chunks(source.chunks, place, embed, part=part, progress=progress):
            source.vectors = Vectors(place)
    vectors = [source.vectors for source in sources if source.vectors is not None]
    if len(vectors) < len(sources):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if not (folder / RECORD).exists():
            remove_temporaries(folder)
            _finish(folder, sources, JoinedVectors(vectors), factory, progress)
    return Database(folder)


def _sources(inputs: Sequence[Given], vectors: Sequence[Vectors], chunk: int) -> list[_Source]:
    given = {each.record.data: each for each in vectors}
    sources: list[_Source] = []
    for path in inputs:
        if os.path.isdir(path):
            database = Database(path)
            for chunks, part in zip(database.sources, database.vectors.parts, strict=True):
                sources.append(_Source(chunks=chunks, data=part.record.data, vectors=part))
        else:
            chunks = Chunks(IndexedDataset(path), chunk)
            data = data_digest(chunks.dataset)
            sources.append(_Source(chunks=chunks, data=data, vectors=given.pop(data, None)))
    if given:
        unused = next(iter(given.values()))
        text = f"are of {unused.data_path}, which is none of the datasets, or has changed"
        raise DataError(f"{unused.folder}: these vectors {text}")
    return sources


def _check(sources: Sequence[_Source], chunk: int, embedding: str) -> None:
    if not sources:
        raise DataError("a database needs a dataset, or another database")
    check_tokenizers(source.chunks for source in sources)
    seen: dict[str, _Source] = {}
    for source in sources:
        prefix = source.chunks.dataset.prefix
        if (other := seen.setdefault(source.data, source)) is not source:
            text = f"and {other.chunks.dataset.prefix} are one dataset; give it once"
            raise DataError(f"{prefix} {text}")
        mine, first = (each.embedding(embedding) for each in (source, sources[0]))
        if mine != first:
            text = f"have vectors of {mine} and of {first}; use one embedding for all"
            raise DataError(f"{prefix} and {sources[0].chunks.dataset.prefix} {text}")
        size = source.chunks.size if source.vectors is None else source.vectors.record.chunk
        if size != chunk:
            text = f"{prefix} has vectors of chunks of {size} tokens, and --chunk is {chunk}"
            raise DataError(f"{text}; give the same")


def _same(database: Database, sources: Sequence[_Source], wanted: tuple[int, str, str]) -> Database:
    """Return the database of a folder, if it was built with the same arguments."""
    record = database.record
    found = [source.data for source in record.sources]
    name = sources[0].embedding(wanted[1])
    index = EXACT if record.index is None else record.index.factory
    if found != [source.data for source in sources] or (
        (record.chunk, record.embedding, index) != (wanted[0], name, wanted[2])
    ):
        text = "is a database of other datasets, or of other chunks, vectors or index"
        raise DataError(f"{database.folder} {text}; name a new folder")
    return database


def _finish(
    folder: Path,
    sources: Sequence[_Source],
    vectors: JoinedVectors,
    factory: str,
    progress: Progress,
) -> None:
    record = DatabaseRecord(
        kind="database",
        chunk=sources[0].chunks.size,
        embedding=vectors.parts[0].record.embedding,
        dim=vectors.dim,
        sources=tuple(
            SourceRecord(
                data=source.data,
                data_path=path_from(folder, source.chunks.dataset.prefix),
                vectors=part.digest,
                vectors_path=path_from(folder, part.folder),
                chunks=len(part),
            )
            for source, part in zip(sources, vectors.parts, strict=True)
        ),
        index=None
        if factory == EXACT
        else FaissIndex.trained(factory, vectors, progress).write(folder / INDEX),
    )
    write_record(folder / RECORD, record)
