"""The pytest plugin, and what importing this package costs."""

import subprocess
import sys


def test_plugin_and_package_import_no_torch():
    code = (
        "import sys, pytest; before = set(sys.modules); import mt_testing, mt_testing.plugin; "
        "new = set(sys.modules) - before; "
        "print(len(new), {'torch', 'numpy', 'hypothesis', 'cloudpickle'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    count, _, heavy = output.strip().partition(" ")
    assert int(count) < 10
    assert heavy == "set()"


def test_every_public_name_resolves():
    import mt_testing

    assert set(mt_testing.__all__) == set(" ".join(mt_testing._HOMES.values()).split())
    for name in mt_testing.__all__:
        assert getattr(mt_testing, name) is not None
    assert set(dir(mt_testing)) == set(mt_testing.__all__)
