"""Subclasses of SGLang's token-to-KV pools that store rows of a chosen layout."""
