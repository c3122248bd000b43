"""The hybrid model as SGLang serves it, and what its linear layers need on a CPU."""
