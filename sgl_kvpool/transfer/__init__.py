"""What moves pages between a pool and host memory. Without SGLang."""
