"""Mix two token datasets 70 : 30; the small one goes round again. Needs numpy only.

Run: python blend_two_corpora.py
"""

import tempfile
from pathlib import Path

import mt_data
import numpy as np


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        datasets = []
        for name, documents, first in (("large", 200, 0), ("small", 10, 1000)):
            prefix = Path(folder, name)
            with mt_data.IndexedWriter(prefix, np.uint16) as writer:
                for number in range(documents):
                    writer.add_document(np.full(20 + number % 5, first + number))
            datasets.append(
                mt_data.GPTDataset(mt_data.IndexedDataset(prefix), sequence_length=16, seed=3)
            )
            print(f"{name}: {len(datasets[-1])} samples an epoch")

        blend = mt_data.BlendedDataset(datasets, [0.7, 0.3], num_samples=100)
        origins = [blend.origin(index) for index in range(len(blend))]
        print("first ten come from", [dataset for dataset, _ in origins[:10]])
        for number, dataset in enumerate(datasets):
            taken = sum(origin == number for origin, _ in origins)
            print(f"dataset {number}: {taken} samples, {taken / len(dataset):.1f} epochs")
        assert sum(origin == 1 for origin, _ in origins) == 30


if __name__ == "__main__":
    main()
