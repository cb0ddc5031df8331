"""Models by their sizes, and published ones by their names."""
