"""Work on whole models: quantise, load, fold scales, choose formats."""
