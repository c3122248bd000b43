"""What `sgl-kvpool` runs besides the demo."""
