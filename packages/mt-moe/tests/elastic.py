"""Stands for the package `deep_ep` where it can't run: its documented calls, by torch's gloo.

From the docstrings of `ElasticBuffer` in DeepEP 2.1: tokens in bf16 go once to each rank that has
one of their experts; what arrives says which of its own experts are meant, -1 elsewhere.
"""

from types import SimpleNamespace

import torch
from torch import distributed as dist

topk_idx_t = torch.int64


class ElasticBuffer:
    """Dispatch and combine; `calls` records them."""

    def __init__(self, group, *, num_max_tokens_per_rank, hidden, num_topk):
        self.group, self.room = group, num_max_tokens_per_rank
        self.sizes, self.calls = (hidden, num_topk), []

    def dispatch(self, x, topk_idx=None, topk_weights=None, num_experts=None, *, handle=None):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert len(x) <= self.room
        self.calls.append("dispatch" if handle is None else "dispatch again")
        if handle is not None:
            assert topk_idx is None
            rows = self._all(x)
            found = [rows[r][i] for r, i in handle.sources]
            return torch.stack(found) if found else x[:0], None, None, handle, None
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        assert (x.shape[1], topk_idx.shape[1]) == self.sizes
        local = num_experts // self.group.size()
        first = self.group.rank() * local
        parts = self._all((x, topk_idx, topk_weights))
        found = []
        for rank, (rows, chosen, weights) in enumerate(parts):
            for i in range(len(rows)):
                own = (chosen[i] >= first) & (chosen[i] < first + local)
                if own.any():
                    to = torch.where(own, chosen[i] - first, -1)
                    found.append(((rank, i), rows[i], to, weights[i]))
        sources, rows, chosen, weights = zip(*found, strict=True) if found else ((), (), (), ())
        chosen = torch.stack(chosen) if found else topk_idx.new_empty(0, topk_idx.shape[1])
        handle = SimpleNamespace(
            sources=sources,
            tokens=len(x),
            num_recv_tokens_per_expert_list=[int((chosen == e).sum()) for e in range(local)],
        )
        rows = torch.stack(rows) if found else x[:0]
        weights = torch.stack(weights) if found else topk_weights[:0]
        return rows.clone(), chosen, weights.clone(), handle, None

    def combine(self, x, handle, topk_weights=None):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        self.calls.append("combine")
        total = x.new_zeros(handle.tokens, x.shape[1], dtype=torch.float32)
        shares = None if topk_weights is None else x.new_zeros(handle.tokens, self.sizes[1]).float()
        for sources, rows, weights in self._all((handle.sources, x, topk_weights)):
            for place, (rank, i) in enumerate(sources):
                if rank == self.group.rank():
                    total[i] += rows[place].float()
                    if shares is not None:
                        shares[i] += weights[place]
        return total.bfloat16(), shares, None

    def _all(self, own):
        parts = [None] * self.group.size()
        dist.all_gather_object(parts, own, group=self.group)
        return parts
