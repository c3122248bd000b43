"""Subcommands of `sgl-kvpool` other than the demo."""
