"""Lets the tests import modules that lie beside them, in every import mode of pytest."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a family's drawn model, and the model of transformers."""
    made = {}

    def save(row, index):
        if (row.model, index) not in made:
            folder = tmp_path_factory.mktemp(row.model) / "model"
            model = row.build(index)
            model.save_pretrained(folder)
            made[row.model, index] = folder, model
        return made[row.model, index]

    return save
