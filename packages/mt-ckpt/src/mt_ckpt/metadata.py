"""The zarr.json documents of a checkpoint."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mt_ckpt.array import ArraySpec, group_names


def zarr_documents(
    arrays: Mapping[str, ArraySpec], *, step: int, packs: Sequence[str] = ()
) -> dict[str, bytes]:
    """Return the content of every `zarr.json` of a step directory or of a pack, by path.

    zarr-python writes one document per dtype. The documents of the arrays differ in shape and chunk
    shape only, and filling these in takes microseconds, while creating an array takes a
    millisecond. The root document contains the consolidated metadata (zarr-python's convention), so
    one read opens a checkpoint.
    """
    group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}})
    nodes = dict.fromkeys(group_names(list(arrays)), group)
    for name, spec in arrays.items():
        texts = _array_document(spec.dtype, wide=spec.wide, sliced=spec.slices is not None)
        sizes = [
            str([*each]) for each in (spec.shape, spec.chunks, spec.slices) if each is not None
        ]
        nodes[name] = "".join(itertools.chain(*itertools.zip_longest(texts, sizes, fillvalue="")))
    inner = ", ".join(f"{json.dumps(name)}: {text}" for name, text in sorted(nodes.items()))
    root = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"mt.step": step} | ({"mt.packs": list(packs)} if packs else {}),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {}},
    }
    documents = {f"{name}/zarr.json": text.encode() for name, text in sorted(nodes.items())}
    head = json.dumps(root).removesuffix("{}}}")
    return {"zarr.json": f"{head}{{{inner}}}}}}}".encode()} | documents


@functools.cache
def _array_document(dtype: str, *, wide: bool, sliced: bool) -> list[str]:
    """Return zarr-python's document for an array of this dtype, with our codecs and chunk keys.

    Returns:
        The text before, between and after the shapes of the array, its chunks and their slices.
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
        shards=spec.chunks if sliced else None,
        dtype=spec.stored,
        serializer=BytesCodec(endian="little"),
        compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
        fill_value=0,
        attributes={"mt.dtype": dtype},
    )
    document = json.loads(files["zarr.json"].to_bytes())
    document["shape"] = "SHAPE"
    document["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": "CHUNKS"}}
    if sliced:
        document["codecs"][0]["configuration"]["chunk_shape"] = "SLICES"
    return re.split('"(?:SHAPE|CHUNKS|SLICES)"', json.dumps(document))
