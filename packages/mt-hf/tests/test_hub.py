"""An id of the Hugging Face hub where a folder is expected; no hub is reached."""

import shutil

import pytest
import torch
from family_row import ROWS
from mt_hf import ExchangeError, describe, find_folder, from_pretrained
from mt_hf.commands.cli import main
from mt_hf.reading import hub

LLAMA = next(row for row in ROWS if row.name == "llama")
COMMIT, OLD = "c0ffee" * 6 + "0000", "0123456789" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the hub's cache, empty."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def put(cache, name):
    """Lay a model down as huggingface_hub does: links to blobs, by revision."""
    own = cache / f"models--{name.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{COMMIT}", f"snapshots/{OLD}"):
        (own / part).mkdir(parents=True)
    LLAMA.build(0).save_pretrained(cache / "made")
    for index, path in enumerate(sorted((cache / "made").iterdir())):
        shutil.move(path, own / "blobs" / str(index))
        (own / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{index}")
    (own / "refs" / "main").write_text(COMMIT)
    return own / "snapshots" / COMMIT


def test_an_id_is_the_newest_revision_in_the_cache(cache):
    folder = put(cache, "acme/tiny-llama")
    assert find_folder("acme/tiny-llama") == folder
    assert describe("acme/tiny-llama") == describe(folder)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(
            from_pretrained("acme/tiny-llama")(tokens), from_pretrained(folder)(tokens)
        )


def test_commands_take_an_id(cache, tmp_path, capsys):
    put(cache, "acme/tiny-llama")
    for arguments in (
        ["import", "acme/tiny-llama", str(tmp_path / "run")],
        ["verify", "acme/tiny-llama"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0, capsys.readouterr().err


def test_a_folder_of_that_name_comes_first(cache, tmp_path):
    put(cache, "acme/tiny-llama")
    (tmp_path / "acme/tiny-llama").mkdir(parents=True)
    assert find_folder("acme/tiny-llama").resolve() == tmp_path / "acme/tiny-llama"


@pytest.mark.parametrize("spoiled", ["nothing", "no refs", "a link out", "a path", "no snapshot"])
def test_what_is_not_in_the_cache_is_one_line_that_says_how(cache, tmp_path, spoiled):
    if spoiled != "nothing":
        reference = put(cache, "acme/tiny-llama").parents[1] / "refs/main"
        reference.unlink()
        if spoiled == "a path":
            reference.write_text("../../..")
        elif spoiled == "no snapshot":
            reference.write_text("f" * 40)
        elif spoiled == "a link out":
            (tmp_path / "secret").write_text(COMMIT)
            reference.symlink_to(tmp_path / "secret")
    words = "leads out" if spoiled == "a link out" else "hf download acme/tiny-llama"
    with pytest.raises(ValueError if spoiled != "a link out" else Exception, match=words) as caught:
        describe("acme/tiny-llama")
    assert "\n" not in str(caught.value)


def test_it_says_what_to_install(cache, monkeypatch):
    put(cache, "acme/tiny-llama")
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ExchangeError, match="pip install huggingface_hub"):
        find_folder("acme/tiny-llama")


def test_a_download_is_asked_for(cache, monkeypatch, capsys, tmp_path):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(put(cache, name))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(SystemExit) as caught:
        main(["import", "acme/tiny-llama", str(tmp_path / "run"), "--download"])
    assert caught.value.code == 0, capsys.readouterr().err
    assert [name for name, _ in asked] == ["acme/tiny-llama"]
    assert {"config.json", "*.safetensors", "tokenizer.json"} <= set(asked[0][1])


def test_a_download_without_a_network_is_one_line(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ExchangeError, match=r"can't be downloaded .*hf download") as caught:
        find_folder("acme/tiny-llama", download=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../a/b", "/a/b", "acme/-x", "a b/c"])
def test_other_texts_are_paths(cache, name):
    with pytest.raises(ExchangeError, match="is not a folder"):
        find_folder(name)
