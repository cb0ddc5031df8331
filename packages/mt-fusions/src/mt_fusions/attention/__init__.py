"""Rotary embedding, and the softmax of attention scores."""
