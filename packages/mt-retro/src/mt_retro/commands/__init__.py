"""The subcommands of `mt-retro`."""
