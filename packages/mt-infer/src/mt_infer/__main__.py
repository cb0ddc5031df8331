"""The `mt-infer` command; the launcher starts ranks by `python -m mt_infer`."""

import sys


def main() -> None:
    """Run the command; Ctrl-C while its modules are imported is no traceback either."""
    try:
        from mt_infer.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
