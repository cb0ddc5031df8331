"""The protocol of a trainer's parts."""

from pathlib import Path
from typing import ClassVar

import mt_train
import torch
from mt_train.parts import registry
from mt_train.parts.part import TrainerPart


class Watch(TrainerPart):
    """A part that counts its steps on every rank, and notes the called hooks."""

    called: ClassVar[list[str]] = []

    def parameters_ready(self, buffer):
        self.called.append("parameters_ready")

    def lines(self):
        yield "a watch is here"

    def begin_step(self, step):
        self.called.append(f"begin_step {step}")

    def own_numbers(self):
        return torch.ones(2, dtype=torch.float64)

    def end_passes(self):
        self.called.append("end_passes")

    def record(self, sums, so_far):
        return {"watched": sum(sums) * so_far["step"]}

    def notes(self, record):
        yield f"watched {record['watched']}"


def test_a_new_part_is_a_class_and_a_line_of_the_list(tiny, tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setattr(registry, "PARTS", (*registry.PARTS, Watch))
    tiny.run(tmp_path / "run", "training.steps=2")
    assert Watch.called == [
        "parameters_ready",
        *("begin_step 0", "end_passes"),
        *("begin_step 1", "end_passes"),
    ]
    assert [row["watched"] for row in rows(tmp_path / "run") if "loss" in row] == [2.0, 4.0]
    said = capsys.readouterr().out
    assert "a watch is here" in said
    assert "watched 4.0" in said


def test_distillation_is_known_to_four_files():
    source = Path(mt_train.__file__).parent
    files = [path for path in source.rglob("*.py") if "distillation" in path.read_text().lower()]
    assert sorted(str(path.relative_to(source)) for path in files) == [
        "config/distillation_section.py",
        "config/run_config.py",
        "parts/distillation.py",
        "parts/registry.py",
    ]
