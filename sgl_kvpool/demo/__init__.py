"""Models that are small enough for a CPU, and the commands that compare the layouts with them."""
