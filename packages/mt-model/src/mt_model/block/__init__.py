"""What every block of a model is made of."""
