"""Checkpoints as folders of Zarr arrays that any layout can read."""

from mt_ckpt.error import CheckpointError
from mt_ckpt.grid import Box
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.load import (
    ArrayReader,
    inspect_checkpoint,
    load_checkpoint,
    open_arrays,
    verify_checkpoint,
)
from mt_ckpt.manifest import Manifest
from mt_ckpt.root import clean, latest_checkpoint
from mt_ckpt.run import RunFolder, SavedModel, SavedTokenizer
from mt_ckpt.save import save_checkpoint
from mt_ckpt.shard import TensorShard, param_shards
from mt_ckpt.state import load, save

__all__ = [
    "ArrayReader",
    "Box",
    "CheckpointError",
    "Manifest",
    "RunFolder",
    "SavedModel",
    "SavedTokenizer",
    "TensorShard",
    "clean",
    "hold_checkpoint",
    "inspect_checkpoint",
    "latest_checkpoint",
    "load",
    "load_checkpoint",
    "open_arrays",
    "param_shards",
    "save",
    "save_checkpoint",
    "verify_checkpoint",
]
