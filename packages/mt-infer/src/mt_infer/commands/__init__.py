"""The commands of `mt-infer`: each is a dataclass of its options that runs itself."""
