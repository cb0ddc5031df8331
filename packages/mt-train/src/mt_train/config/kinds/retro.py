"""Documents beside the neighbours of their chunks, for a model that retrieves (Retro)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mt_files import Checks, FileError, RowField

from mt_train.config.kinds.section import DataSection, HeldOutRows, Sources
from mt_train.config.limits import path_field, paths_field

if TYPE_CHECKING:
    from mt_data import GPTDataset, RowDataset
    from mt_model import ModelConfig
    from mt_retro import NeighboursRecord, RetroDataset

    from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RetroData(DataSection):
    """Documents that begin on a grid of chunks, each chunk with neighbours from a database.

    It needs `mt-train[retro]`. Held-out data is evaluated with its neighbours and without. A model
    that reads no neighbours learns the same rows, and its two losses are equal.

    Attributes:
        neighbours: Folders that `mt-retro query` made: one for each data set of `train` and
            `validation`, in any order, since each belongs to the data set of its digest. The rows
            have as many neighbours as all of the folders.
        database: Folder of the database with these neighbours.
        overlap: Shares between 0 and 1 in ascending order, such as `[0.125, 0.5]`: held-out labels
            are also evaluated in groups, by the share of their chunk that the neighbours repeat.
    """

    type_name: ClassVar[str] = "retro"
    needs_tokenizer: ClassVar[bool] = False

    neighbours: tuple[str, ...] = paths_field("")
    database: str | None = path_field("")
    overlap: tuple[float, ...] = ()

    def check(self, checks: Checks) -> None:
        """Check the neighbours, the database and the overlap, and that mt-retro is installed."""
        if find_spec("mt_retro") is None:
            checks.add("kind", "retro needs: pip install 'mt-train[retro]'")
        if self.corpus is not None:
            text = "is for text; build token files with mt-data, query their neighbours with "
            checks.add("corpus", text + "mt-retro, and name them in data.train")
            return
        if self.database is None:
            checks.add("database", "missing; name the folder that mt-retro build made")
        if not self.neighbours:
            checks.add("neighbours", "missing; name the folders that mt-retro query made")
        edges = (0.0, *self.overlap, 1.0)
        if any(low >= high for low, high in pairwise(edges)):
            text = f"{list(self.overlap)}; give shares between 0 and 1 in ascending order"
            checks.add("overlap", text)

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row."""
        from mt_retro import retro_fields

        return retro_fields()

    def sizes(self, sequence_length: int) -> Mapping[str, int]:
        """Return the number of tokens and chunks, and of neighbours with their tokens."""
        records = self._records()
        chunk = records[0].chunk
        return {
            "tokens": sequence_length,
            "chunks": sequence_length // chunk,
            "neighbours": min(record.neighbours for record in records),
            "neighbour_tokens": 2 * chunk,
        }

    def unit(self) -> int:
        """Return the number of tokens in a chunk, which no two ranks share."""
        return self._records()[0].chunk

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with chunks and their neighbours."""
        from mt_data import DataError

        yield from super().misfits(config, model)
        try:
            records = self._records()
        except (DataError, FileError) as error:
            yield "data.neighbours", str(error)
            return
        length, chunk = config.training.sequence_length, records[0].chunk
        for folder, record in zip(self.neighbours, records, strict=True):
            if record.chunk != chunk:
                text = f"{folder} is of chunks of {record.chunk} tokens, and {self.neighbours[0]} "
                yield "data.neighbours", f"{text}of {chunk}; use one database for all"
        if length % chunk:
            text = f"{length} is no multiple of {chunk}, the tokens in a chunk of data.neighbours"
            yield "training.sequence_length", f"{text}; use {-(-length // chunk) * chunk}"
        count, retro = min(record.neighbours for record in records), model.retro
        if retro is not None and (retro.chunk, retro.neighbours) != (chunk, count):
            text = f"has chunk {retro.chunk} and neighbours {retro.neighbours}, and the folders of "
            text += f"data.neighbours {chunk} and {count}; use these, or query with the model's"
            yield "model.retro", text

    def _records(self) -> list[NeighboursRecord]:
        from mt_retro import NeighboursRecord

        return [NeighboursRecord.read(folder) for folder in self.neighbours]

    def dataset(self, path: Path, sources: Sources) -> RetroDataset:
        """Open a data set with its neighbours.

        Raises:
            DataError: No folder has neighbours of this data set, or they come from another
                database.
        """
        return self._opened(replace(sources, train=(path,)))[0]

    def datasets(self, sources: Sources) -> list[GPTDataset | RowDataset]:
        """Open all paths of `train`, with one database."""
        return [*self._opened(sources)]

    def held_out(self, sources: Sources) -> HeldOutRows | None:
        """Open held-out rows, and the same rows without neighbours and by overlap."""
        from mt_data import JoinedRows, count_text_bytes

        if not sources.validation:
            return None
        found = self._opened(replace(sources, train=sources.validation, weights=()))
        edges = (0.0, *self.overlap, 1.0) if self.overlap else ()
        overlaps = [(f"overlap_{low:g}_to_{high:g}", (low, high)) for low, high in pairwise(edges)]
        variants = {
            name: JoinedRows([each.changed(overlap=overlap) for each in found])
            for name, overlap in overlaps
        }
        without = [("without_neighbours", None)]
        without += [(f"{name}_without_neighbours", overlap) for name, overlap in overlaps]
        variants |= {
            name: JoinedRows([each.changed(retrieves=False, overlap=of) for each in found])
            for name, of in without
        }
        indexed = [each.neighbours.chunks.dataset for each in found]
        tokenizer = sources.tokenizer
        return HeldOutRows(
            rows=JoinedRows(found),
            num_bytes=None
            if tokenizer is None
            else sum(count_text_bytes(each, tokenizer) for each in indexed),
            num_labels=sum(each.num_tokens for each in found),
            variants=variants,
        )

    def _opened(self, sources: Sources) -> list[RetroDataset]:
        from mt_data import IndexedDataset
        from mt_retro import Database, RetroDataset, neighbours_of

        assert self.database is not None, "checked"  # noqa: S101
        database = Database(self.database)
        count = self.sizes(sources.sequence_length)["neighbours"]
        return [
            RetroDataset(
                neighbours_of(IndexedDataset(path), self.neighbours, database),
                sequence_length=sources.sequence_length,
                num_neighbours=count,
                seed=sources.seed,
            )
            for path in sources.train
        ]
