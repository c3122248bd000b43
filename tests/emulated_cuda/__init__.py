"""A CUDA device over CPU memory, for tests: `python -m pytest tests/gpu --emulated`.

`described` makes torch.cuda answer as on an H100, `tensors` are tensors that say they are on cuda:0,
`operators` carries out torch's operators on them, `graphs` records and replays them, `launches` gives
Triton's kernels to ptxrun, `order` has the clocks of streams and events, `shadows` and `accesses` check by
them, `memory` is the allocator, `libcudart` and `runtime` are the CUDA runtime of compiled code, with
`errors`, `libraries` has the operators of other packages that are replaced, and `models` those of SGLang's
model classes. `plugin.install` puts all of it in place. SGLang and sgl_kvpool run on it unchanged.
"""
