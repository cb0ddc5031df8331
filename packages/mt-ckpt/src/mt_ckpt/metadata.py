"""The zarr.json documents of a checkpoint."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from mt_ckpt.array import ArraySpec, group_names


def zarr_documents(arrays: Mapping[str, ArraySpec], *, step: int) -> dict[str, bytes]:
    """Return the content of every `zarr.json` of a step directory, by path.

    zarr-python writes one document per dtype. The documents of the arrays differ in shape and chunk
    shape only, and filling these in takes microseconds, while creating an array takes a
    millisecond. The root document contains the consolidated metadata (zarr-python's convention), so
    one read opens a checkpoint.
    """
    nodes: dict[str, dict[str, Any]] = {
        name: {"zarr_format": 3, "node_type": "group", "attributes": {}}
        for name in group_names(list(arrays))
    }
    for name, spec in arrays.items():
        grid = {"name": "regular", "configuration": {"chunk_shape": list(spec.chunks)}}
        nodes[name] = _array_document(spec.dtype, wide=spec.wide) | {
            "shape": list(spec.shape),
            "chunk_grid": grid,
        }
    nodes = dict(sorted(nodes.items()))
    root = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"mt.step": step},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": nodes},
    }
    documents = {f"{name}/zarr.json": json.dumps(node).encode() for name, node in nodes.items()}
    return {"zarr.json": json.dumps(root).encode()} | documents


@functools.cache
def _array_document(dtype: str, *, wide: bool) -> dict[str, Any]:
    """Return zarr-python's document for an array of this dtype, with our codecs and chunk keys.

    Nobody changes the result, so it is made once in a process.
    """
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec
    from zarr.storage import MemoryStore

    spec = ArraySpec(shape=(1,), dtype=dtype, chunks=(1,), wide=wide)
    files: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(files),
        shape=spec.shape,
        chunks=spec.chunks,
        dtype=spec.stored,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
        attributes={"mt.dtype": dtype},
    )
    return json.loads(files["zarr.json"].to_bytes())
