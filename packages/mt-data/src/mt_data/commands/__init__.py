"""The subcommands of `mt-data`, one module for each subject."""
