"""`sgl-kvpool bench attention`: `mla_decode` beside other kernels; `program` has its arguments."""
