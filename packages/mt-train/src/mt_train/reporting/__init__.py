"""Reports of a run: metrics, console, plots and history."""
