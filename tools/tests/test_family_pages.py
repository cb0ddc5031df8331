"""The pages of the families say what the code says."""

import pytest
from family_pages import COMMAND, FOLDER, ROOT, pages


@pytest.fixture(scope="module")
def made():
    return pages()


def test_pages_are_what_the_code_says(made):
    written = {path.name: path.read_text() for path in (ROOT / FOLDER).glob("*.md")}
    stale = [name for name in sorted({*made, *written}) if made.get(name) != written.get(name)]
    assert not stale, f"run: {COMMAND}"


def test_a_page_shows_what_is_read_and_what_is_refused(made):
    assert "| `head_dim` | an integer or null | `256` |" in made["gemma2.md"]
    assert "'?' is not known; known are silu" in made["llama.md"]
    assert "the rope_type '?' is not known. Known: default, linear" in made["llama.md"]
    assert "Mamba2Config needs whole sequences; use cp=1" in made["nemotron_h.md"]
    assert "| `llama3-8b` | 8,030,261,248 | 32 | 4096 |" in made["llama.md"]
    assert "$ mt-infer generate" in made["mamba2.md"]


def test_an_encoder_of_images_neither_trains_nor_generates(made):
    assert "mt-train does not train it: a folder is of the family 'vit'" in made["vit.md"]
    assert "mt-infer" not in made["vit.md"]
