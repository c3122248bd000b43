"""Facts of SGLang: which of its attention kernels read the rows of a layout. Works without SGLang."""
