import pytest
import slowness


def test_a_slower_machine_has_more_and_a_faster_one_no_less(monkeypatch):
    monkeypatch.setattr(slowness, "PROBE", "import time; time.sleep(0.3)")
    monkeypatch.setattr(slowness, "PROBE_SECONDS", 0.1)
    assert slowness.slowness() >= 3
    monkeypatch.setattr(slowness, "PROBE_SECONDS", 1000.0)
    assert slowness.slowness() == 1


def test_a_probe_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(slowness, "PROBE", "raise SystemExit(3)")
    with pytest.raises(SystemExit, match="probe"):
        slowness.slowness()
