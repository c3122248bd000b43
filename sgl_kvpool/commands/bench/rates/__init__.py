"""`sgl-kvpool bench rates`: what an SM does per clock of what decode attention is made of."""
