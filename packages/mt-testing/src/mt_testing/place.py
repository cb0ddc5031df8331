"""The place in the source that a call comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def caller(inside: str) -> tuple[str, int]:
    """Return file and line of the innermost frame outside torch and outside the file `inside`.

    Args:
        inside: The file that calls this function.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in (inside, __file__)
        or frame.f_code.co_filename.startswith(_TORCH)
        or frame.f_code.co_filename.endswith(f"{os.sep}contextlib.py")
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
