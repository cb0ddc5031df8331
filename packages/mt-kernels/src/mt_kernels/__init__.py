"""A record for kernels, a way to choose among them, and code that several packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_kernels.candidate import Candidate as Candidate
from mt_kernels.candidate import Choice as Choice
from mt_kernels.candidate import serves as serves
from mt_kernels.counter import GOLDEN as GOLDEN
from mt_kernels.counter import MIX_1 as MIX_1
from mt_kernels.counter import MIX_2 as MIX_2
from mt_kernels.counter import key_words as key_words
from mt_kernels.counter import random_bits as random_bits
from mt_kernels.device import cpu_obstacle as cpu_obstacle
from mt_kernels.device import eager_obstacle as eager_obstacle
from mt_kernels.device import triton_is_interpreted as triton_is_interpreted
from mt_kernels.device import triton_obstacle as triton_obstacle
from mt_kernels.registry import AUTO as AUTO
from mt_kernels.registry import KernelError as KernelError
from mt_kernels.registry import Registry as Registry
from mt_kernels.selector import Selector as Selector

if TYPE_CHECKING:
    from mt_kernels.flex import flex_attention as flex_attention
else:
    # Resolved at first use, so that an import stays light.
    __getattr__ = resolve_later(__name__)
