"""From a DeviceMesh that other code made to a layout."""

from __future__ import annotations

import torch
from mt_files import check_type
from torch.distributed.device_mesh import DeviceMesh

from mt_parallel_state.layout import AXES, ParallelLayout

_AXES = AXES[:4]


def layout_of_mesh(mesh: DeviceMesh) -> ParallelLayout:
    """Read the layout off a mesh whose dims are named tp, cp, dp or pp (missing ones are 1).

    The mesh's last dim varies fastest, so it is the first in `order`. Bind the result with
    `ParallelState(layout, offset=int(mesh.mesh.min()))`.

    Raises:
        ValueError: A dim has no name or another one, or the ranks are not consecutive.
    """
    check_type("mesh", mesh, DeviceMesh)
    names = mesh.mesh_dim_names
    if names is None or not set(names) <= set(_AXES):
        raise ValueError(f"the mesh's dims are named {names}; name them among {', '.join(_AXES)}")
    ranks = mesh.mesh.flatten()
    if not torch.equal(ranks, torch.arange(len(ranks)) + ranks[0]):
        raise ValueError(
            f"the mesh's ranks are {ranks.tolist()} in row-major order; a layout's are consecutive"
        )
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    order = "-".join([*reversed(names), *(axis for axis in _AXES if axis not in names)])
    return ParallelLayout(**sizes, order=order)
