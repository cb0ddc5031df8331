"""Names that are imported at their first use."""

import gc
import sys

import pytest
from mt_files import import_failure, quick_imports


def test_a_library_that_refuses_to_be_imported_is_told_from_other_errors(tmp_path, monkeypatch):
    (tmp_path / "picky_shop.py").write_text("raise ValueError('bad setting: x\\nmore\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="bad setting") as refused:
        import picky_shop  # noqa: F401 # pyright: ignore[reportMissingImports]
    line = "picky_shop can't be imported: bad setting: x"
    assert import_failure(refused.value, "picky_shop") == line
    assert import_failure(refused.value, "another") is None
    assert import_failure(ValueError("of our own"), "picky_shop") is None


def test_a_name_imports_its_module_at_its_first_use_and_others_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "lazy_shop"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from mt_files import resolve_later\n"
        "from lazy_shop.door import sign as sign, hinge\n"
        "if TYPE_CHECKING:\n"
        "    from lazy_shop.till import price as price, count as count\n"
        "    from lazy_shop.shelf import Shelf as Shelf, plank\n"
        "__getattr__ = resolve_later(__name__)\n"
    )
    (package / "door.py").write_text("sign, hinge = 'open', 1\n")
    (package / "till.py").write_text("price, count = 3, 4\n")
    (package / "shelf.py").write_text("class Shelf: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_shop  # pyright: ignore[reportMissingImports]

    assert lazy_shop.__all__ == ["Shelf", "count", "price", "sign"]
    assert "lazy_shop.till" not in sys.modules
    assert (lazy_shop.price, lazy_shop.count) == (3, 4)
    assert "lazy_shop.till" in sys.modules
    assert "lazy_shop.shelf" not in sys.modules
    from lazy_shop import Shelf  # pyright: ignore[reportMissingImports]

    assert Shelf.__module__ == "lazy_shop.shelf"
    with pytest.raises(AttributeError, match="module 'lazy_shop' has no attribute 'plank'"):
        _ = lazy_shop.plank
    assert not hasattr(lazy_shop, "_till")


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_are_not_collected_and_the_collector_is_as_before(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with quick_imports():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if was else gc.disable)()
