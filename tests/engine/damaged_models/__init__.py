"""The demo model in a process whose codec decodes wrong latents: every second value with the wrong sign."""
