"""`bench attention`: `mla_decode` beside other kernels."""
