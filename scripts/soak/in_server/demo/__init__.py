"""The demo's model together with the soak's census."""
