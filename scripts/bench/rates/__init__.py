"""`bench rates`: an SM's rates per clock for the operations of decode attention."""
