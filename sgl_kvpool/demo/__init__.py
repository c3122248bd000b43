"""Models small enough to serve on a CPU, and the command that compares the layouts with them."""
