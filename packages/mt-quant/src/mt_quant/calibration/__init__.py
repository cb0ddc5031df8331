"""What calibration data says about inputs, keys and values."""
