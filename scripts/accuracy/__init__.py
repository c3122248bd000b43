"""Accuracy of the layouts without and with servers."""
