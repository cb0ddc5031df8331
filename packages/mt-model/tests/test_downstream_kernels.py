"""A kernel of another package serves under its name in a model, and a model chooses once."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from mt_kernels import Registry
from mt_model import GPT, Kernels, gpt

SIZES = {"vocab_size": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
MODULE = """
from mt_kernels import Candidate

calls = []

def norm(x, weight, eps, *, zero_centered, rounds_first):
    calls.append(x.shape)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

mine = Candidate("mine", norm, lambda x, weight: "no weight" if weight is None else None)
"""


@pytest.fixture
def downstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package with an entry point, as a folder on the path."""
    (tmp_path / "norms_of_others.py").write_text(MODULE)
    info = tmp_path / "norms_of_others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: norms-of-others\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mt.kernels]\nrms_norm.mine = norms_of_others:mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import norms_of_others  # pyright: ignore[reportMissingImports]

    yield norms_of_others
    del sys.modules["norms_of_others"]


def test_a_kernel_of_another_package_serves_under_its_name(downstream, capsys) -> None:
    tokens = torch.arange(6)[None]
    plain = GPT(gpt(**SIZES), dtype=torch.float64, seed=1)
    model = GPT(gpt(**SIZES), kernels=Kernels(norm="mine"), dtype=torch.float64, seed=1)
    assert not downstream.calls
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-12, atol=1e-12)
    assert len(downstream.calls) == 5  # two in each layer, and one behind the last
    for choice in model.chosen_kernels():
        print(choice)
    said = capsys.readouterr().out.splitlines()
    assert "rms_norm: mine (asked for)" in said
    assert any(line.startswith("rope: torch (the first that serves; not fused: ") for line in said)


def test_an_unknown_kernel_is_refused_with_the_known_ones(downstream) -> None:
    known = "auto, fused, cpu, torch, reference, mine"
    with pytest.raises(ValueError, match=rf"norm: 'nobody' is not one of {known}"):
        Kernels(norm="nobody")


def test_kernels_are_chosen_once_in_ten_steps_and_a_hundred_tokens(monkeypatch) -> None:
    searches: Counter[str] = Counter()
    find = Registry.find

    def counted(self, *args):
        searches[self.operation] += 1
        return find(self, *args)

    model = GPT(gpt(**SIZES, max_sequence_length=128), seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Registry, "find", counted)
    tokens = torch.arange(12)[None] % 16
    for _ in range(10):
        optimizer.zero_grad()
        model(tokens, labels=tokens)["lm"].backward()
        optimizer.step()
    # Five norms; in each of two layers two additions, a gate, and attention from the projection on.
    once = {"rms_norm": 5, "residual": 2, "gated": 2, "attention": 2}
    assert {name: searches[name] for name in once} == once
    searches.clear()
    cache = model.eval().new_cache(batch_size=1, max_length=112)
    with torch.inference_mode():
        model.logits(tokens, cache=cache)
        for _ in range(100):
            model.logits(tokens[:, :1], cache=cache)
    # Heads are turned and attend apart from now on, and each place in a model finds that once.
    assert searches == {"rope": 2, "attention": 2}
