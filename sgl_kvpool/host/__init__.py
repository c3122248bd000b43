"""The host tier: pages that leave the device and come back."""
