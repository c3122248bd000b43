"""The demo's model with the soak's census."""
