"""Configurations that people really published are read, to their number of parameters."""

import json
import logging
import time
from pathlib import Path

import pytest
import torch
from mt_hf import known_families, read_description
from mt_hf.commands.verification import compare
from mt_testing import sample
from small_copy import small_config, write_small_model

CONFIGS = Path(__file__).with_name("published") / "configs.jsonl"
ROWS = [json.loads(line) for line in CONFIGS.read_text().splitlines()]
# Of these, config.json says that the head is tied where the folder's tensors say that it is not.
OWN_HEADS = ("google/flan-t5", "google/mt5")
SECONDS = 5


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        self.names += record.getMessage().rpartition("either: ")[2].split(", ")


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """The description of each model, and the fields that the log names as ignored."""
    found, said, start = {}, Said(), time.process_time()
    logging.getLogger("mt_hf").addHandler(said)
    for row in ROWS:
        said.names = []
        folder = tmp_path_factory.mktemp("published")
        for name in ("config", "generation_config"):
            if name in row:
                (folder / f"{name}.json").write_text(json.dumps(row[name]))
        found[row["model"]] = (read_description(folder), said.names)
    logging.getLogger("mt_hf").removeHandler(said)
    assert time.process_time() - start < SECONDS
    return found


def test_published_configurations_have_the_published_number_of_parameters(described):
    assert len(ROWS) == len(described) >= 60
    found = {model: each.config.num_parameters for model, (each, _) in described.items()}
    assert found == {row["model"]: row["parameters"] for row in ROWS}


def test_only_fields_that_mean_something_are_named(described):
    said = {model: sorted(names) for model, (_, names) in described.items()}
    assert said == {row["model"]: sorted(row["unread"]) for row in ROWS}


def test_published_configurations_are_of_every_family(described):
    assert {each.family.name for each, _ in described.values()} == set(known_families())


@pytest.mark.campaign
def test_the_numbers_are_those_of_transformers():
    import transformers

    wrong = {}
    for row in ROWS:
        given = {**row["config"], "quantization_config": None}
        kind = {"kimi_k2": "deepseek_v3"}.get(given["model_type"], given["model_type"])
        config = transformers.CONFIG_MAPPING[kind].from_dict(given)
        with torch.device("meta"):
            model = getattr(transformers, given["architectures"][0])(config)
        found = model.num_parameters()
        if row["model"].startswith(OWN_HEADS):
            found += model.lm_head.weight.numel()
        if found != row["parameters"]:
            wrong[row["model"]] = (found, row["parameters"])
    assert not wrong


@pytest.mark.parametrize(
    "row", sample([(row,) for row in ROWS], every=12, name=lambda row: row["model"])
)
def test_small_copies_have_the_logits_of_transformers(row, tmp_path):
    config = small_config(row["config"])
    assert write_small_model(config, tmp_path) < 5e6
    # As published, where transformers writes its own form of it.
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = compare(tmp_path, length=24)
    assert found.relative < 1e-4
    assert found.same == found.positions
