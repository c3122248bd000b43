"""`bench attention`: `mla_decode` beside other kernels. `program` defines the arguments."""
