"""What `mt-data` does: one module for each subject."""
