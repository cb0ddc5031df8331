"""Checkpoints as folders of Zarr arrays that any layout can read."""

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_ckpt.error import CheckpointError as CheckpointError
from mt_ckpt.grid import Box as Box
from mt_ckpt.hold import hold_checkpoint as hold_checkpoint
from mt_ckpt.load import ArrayReader as ArrayReader
from mt_ckpt.load import inspect_checkpoint as inspect_checkpoint
from mt_ckpt.load import load_checkpoint as load_checkpoint
from mt_ckpt.load import open_arrays as open_arrays
from mt_ckpt.manifest import Manifest as Manifest
from mt_ckpt.root import Keep as Keep
from mt_ckpt.root import clean as clean
from mt_ckpt.root import latest_checkpoint as latest_checkpoint
from mt_ckpt.save import save_checkpoint as save_checkpoint
from mt_ckpt.shard import TensorShard as TensorShard
from mt_ckpt.shard import param_shards as param_shards
from mt_ckpt.state import load as load
from mt_ckpt.state import save as save

if TYPE_CHECKING:
    from mt_ckpt.background import BackgroundSaver as BackgroundSaver
    from mt_ckpt.copies import MemoryCopies as MemoryCopies
    from mt_ckpt.exchange.megatron import open_megatron as open_megatron
    from mt_ckpt.run import RunFolder as RunFolder
    from mt_ckpt.run import SavedAdapters as SavedAdapters
    from mt_ckpt.run import SavedModel as SavedModel
    from mt_ckpt.run import SavedTokenizer as SavedTokenizer
    from mt_ckpt.verify import verify_checkpoint as verify_checkpoint
else:
    __getattr__ = resolve_later(__name__)
