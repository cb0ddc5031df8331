"""The subcommands of `mt-ckpt`, one module for each subject."""
