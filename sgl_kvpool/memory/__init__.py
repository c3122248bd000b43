"""Where the bytes of rows lie. Imports neither torch kernels nor SGLang."""
