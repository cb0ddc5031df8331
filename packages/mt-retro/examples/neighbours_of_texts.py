"""Find for each chunk of some texts the nearest chunk of others. Needs numpy only.

Run: python neighbours_of_texts.py
"""

import tempfile
from pathlib import Path

import mt_data
import mt_retro
import numpy as np

WORDS = 400


def main() -> None:
    draw = np.random.default_rng(0)
    topics = draw.integers(0, 100_000, (20, 30))  # each has words of its own
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for prefix, documents in (("library", 200), ("texts", 20)):
            with mt_data.IndexedWriter(folder / prefix, np.int32) as writer:
                for number in range(documents):
                    words = draw.choice(topics[number % 20], WORDS)
                    writer.add_document(words)
        database = mt_retro.build_database([folder / "library"], folder / "db")
        print(f"{len(database)} chunks, embedded by {database.record.embedding}")

        texts = mt_data.IndexedDataset(folder / "texts")
        found = mt_retro.find_neighbours(database, texts, folder / "near", neighbours=2)
        right = total = 0
        for document in range(texts.num_documents):
            for row in found.ids(document):
                _, other, _ = database.place(int(row[0]))
                right += other % 20 == document
                total += 1
        print(f"{right} of {total} nearest chunks are on the same topic")
        assert right == total


if __name__ == "__main__":
    main()
