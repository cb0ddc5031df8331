"""What a benchmark's result must say of where it was measured."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Date, command, versions and device."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        import triton

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
        driver = asked.stdout.split()
        found |= {
            "device": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "driver": driver[0] if driver else None,
        }
    return found
