"""Language models: embeddings, heads, and the models around the layers."""
