"""What happens to gradients before the update: norms, clipping, loss scale, the decision."""
