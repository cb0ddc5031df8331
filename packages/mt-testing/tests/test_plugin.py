"""The pytest plugin, and what importing this package costs."""

import os
import subprocess
import sys


def test_plugin_and_package_import_no_torch():
    code = (
        "import sys, pytest; before = set(sys.modules); import mt_testing, mt_testing.plugin; "
        "new = {n for n in set(sys.modules) - before if n.startswith('mt_')}; "
        "print(len(new), {'torch', 'numpy', 'hypothesis', 'cloudpickle'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    count, _, heavy = output.strip().partition(" ")
    assert int(count) < 20
    assert heavy == "set()"


def test_every_public_name_resolves():
    import mt_testing

    for name in mt_testing.__all__:
        assert getattr(mt_testing, name) is not None
    assert set(dir(mt_testing)) == set(mt_testing.__all__)


CAMPAIGN = """
import pytest

def rows():
    print("drawn")
    return [1, 2, 3]

@pytest.mark.campaign
@pytest.mark.campaign_rows("row", rows, ids=str)
def test_row(row):
    assert row
"""


def collected(folder, *options):
    (folder / "test_it.py").write_text(CAMPAIGN)
    marks = ["-o", "markers=campaign: long", "-p", "no:cacheprovider"]
    plugin = ["-p", "mt_testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", *plugin, *marks, *options, str(folder)]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to import
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=alone).stdout


def test_rows_of_a_campaign_are_drawn_when_it_is_selected(tmp_path):
    without = collected(tmp_path, "-m", "not campaign")
    assert "drawn" not in without.replace("not-drawn", "")
    assert "1 deselected" in without
    for options in ([], ["-m", "campaign"]):
        shown = collected(tmp_path, *options)
        assert "drawn" in shown
        assert "3 passed" in shown
