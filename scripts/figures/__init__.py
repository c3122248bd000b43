"""Tables, pictures and counts of the pages, which are computed."""
