"""What `scripts/h100_regression.py` is made of. Nothing of it has been run on a GPU."""
