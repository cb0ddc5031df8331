"""Checkpoints as folders of Zarr arrays that any layout can read."""

from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.load import load_checkpoint, read_metadata, verify_checkpoint
from mt_ckpt.root import clean, latest_checkpoint
from mt_ckpt.save import save_checkpoint
from mt_ckpt.shard import TensorShard, param_shards

__all__ = [
    "CheckpointError",
    "Problem",
    "TensorShard",
    "clean",
    "latest_checkpoint",
    "load_checkpoint",
    "param_shards",
    "read_metadata",
    "save_checkpoint",
    "verify_checkpoint",
]
