"""A byte-level MLA language model small enough to serve with SGLang on a CPU."""
