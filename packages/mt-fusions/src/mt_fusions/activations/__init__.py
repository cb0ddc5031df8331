"""Activations of the feed-forward, with a gate or a bias."""
