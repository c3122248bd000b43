"""Subclasses of SGLang's pools, host pools and attention backends for rows of this package's layouts."""
