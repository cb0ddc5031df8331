"""Language models: embeddings, heads and what is around the layers."""
