"""The command of lm-eval, with mt-infer's engine as a model named `mt`."""

import sys
from importlib.util import find_spec

from mt_infer.console import say


def main() -> int:
    """Register the engine, and run lm-eval's command line."""
    if find_spec("lm_eval") is None:
        say("evaluating needs: pip install 'mt-infer[eval]'")
        return 1
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import get_model, register_model  # pyright: ignore

    from mt_infer.eval.adapter import EngineLM

    try:
        get_model("mt")  # by its entry point, which release 0.4.13 does not read
    except ValueError:
        register_model("mt")(EngineLM)
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
