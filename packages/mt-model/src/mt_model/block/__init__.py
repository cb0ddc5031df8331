"""The common parts of mixers and feed-forwards: configs, norms, losses, dropout, recomputation."""
