"""Treatment of gradients before the update: norms, clipping, loss scale, the decision."""
