"""Query heads with their shared key and value, for more ranks than key/value groups."""

from __future__ import annotations

import torch
from mt_parallel_state import Group, all_to_all, group_size
from torch import Tensor


def exchange_kv_groups(qkv: Tensor, group: Group) -> Tensor:
    """Turn a split of `head_dim` into a split of the query heads, each with its key and value.

    With more ranks than key/value groups a fused projection cannot be cut between groups. Cut along
    `head_dim` instead (`shard_dim=2`), its weight is still a plain box per rank, no row of it
    is on two ranks, and this exchange gives every rank its query heads with their shared key and
    value head. It is one all-to-all in forward and one in backward, which sums the gradients of a
    key or value head that several ranks use. Each rank sends and receives
    `tokens * (queries per rank + 2) * head_dim` elements.

    Shape:
        qkv: [B, S, G, Q + 2, D / ranks]; in a group the Q queries come first, then the key, then
        the value. Returns [B, S, 1, Q * G / ranks + 2, D]: rank t has the queries t * Q * G / ranks
        and following, counted over all groups.

    Raises:
        ValueError: The ranks are not a multiple of the groups, or do not divide the query heads.
    """
    if group_size(group) == 1:
        return qkv
    ranks, groups, queries = group_size(group), qkv.shape[2], qkv.shape[3] - 2
    sharing, rest = divmod(ranks, groups)
    if rest or queries % sharing:
        raise ValueError(
            f"{groups} key/value groups of {queries} query heads do not fit {ranks} ranks; "
            f"use a multiple of {groups} ranks that divides {groups * queries}"
        )
    own, shared = qkv.split((queries, 2), dim=3)
    own = own.unflatten(3, (sharing, queries // sharing))
    shared = shared.unsqueeze(3).expand(-1, -1, -1, sharing, -1, -1)
    per_rank = torch.cat((own, shared), dim=4).flatten(2, 3)
    return all_to_all(per_rank, group, split_dim=2, concat_dim=-1)
