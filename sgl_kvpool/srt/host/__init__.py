"""The host tier: backup and loading of device pages."""
