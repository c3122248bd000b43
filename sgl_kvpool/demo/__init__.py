"""Models that are small enough for a CPU, and the command that compares the layouts with them."""
