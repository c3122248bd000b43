"""`bench tiles`: times of tiles and splits of `mla_decode`, and the tile table that follows."""
