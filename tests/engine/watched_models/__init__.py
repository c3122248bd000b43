"""The demo model in a process that says which pool it is served from."""
