"""`sgl-kvpool bench tiles`: tiles and splits of `mla_decode`, and which tile table follows from them."""
