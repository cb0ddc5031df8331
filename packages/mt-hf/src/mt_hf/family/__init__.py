"""What a family of models answers for: fields of its config.json, and links of its tensors."""
