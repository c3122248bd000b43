"""Memory layout of rows. This package imports neither kernels nor SGLang."""
