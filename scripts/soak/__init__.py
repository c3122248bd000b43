"""Servers under load, and checks of their state: `python -m scripts.soak`."""
