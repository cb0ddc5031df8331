"""What a run reports: metrics, console, plots and history."""
