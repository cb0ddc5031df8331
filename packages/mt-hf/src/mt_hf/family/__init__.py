"""Families of models: fields of config.json, and links of tensors."""
