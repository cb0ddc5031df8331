"""The pytest plugin, and what importing this package costs."""

import subprocess
import sys

pytest_plugins = ["pytester"]


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

    assert set(mt_testing.__all__) == set(mt_testing._HOMES)
    for name in mt_testing.__all__:
        assert getattr(mt_testing, name) is not None
    assert set(dir(mt_testing)) == set(mt_testing.__all__)


def test_fixture_works_in_prepend_mode_and_reports_a_broken_preload(pytester):
    pytester.makeini("[pytest]\nmt_testing_preload = not_installed_anywhere\n")
    pytester.makepyfile(
        helper="def twice(x):\n    return 2 * x\n",
        test_user="""
            import helper
            import torch.distributed as dist

            def body():
                return helper.twice(dist.get_rank())

            def test_body(ranks):
                assert ranks(2, body) == [0, 2]
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*could not preload not_installed_anywhere into the rank pool*", "*ModuleNotFoundError*"]
    )
