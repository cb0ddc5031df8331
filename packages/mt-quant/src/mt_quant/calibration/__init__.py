"""Statistics of inputs, keys and values from calibration data."""
