"""What `mt-ckpt` does: one module for each subject."""
