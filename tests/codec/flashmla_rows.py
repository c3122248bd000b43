"""A reader of FlashMLA's V3.2 rows that shares nothing with the product: slices of bytes, numpy, ml_dtypes.

A row as FlashMLA's and SGLang's kernels read it, in this order: R e4m3 values, R / 128 scales in fp32, one
for each 128 values, P bf16 values. No padding: 656 bytes for R = 512, P = 64.
"""

import ml_dtypes
import numpy as np

#: (R, P): bytes of a row. The last two are not multiples of 16.
ROW_BYTES = {(512, 64): 656, (512, 0): 528, (256, 0): 264, (256, 64): 392}


def read_rows(rows, rank=512, rope=64):
    """uint8 [N, ROW_BYTES] -> float64 [N, rank + rope], exactly; NaN where a value or its scale is NaN."""
    assert rows.dtype == np.uint8
    assert rows.shape[1] == ROW_BYTES[rank, rope]
    count, tiles = len(rows), rank // 128
    codes, scales, keys = np.split(rows, [rank, rank + 4 * tiles], axis=1)
    with np.errstate(invalid="ignore"):
        values = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales = np.ascontiguousarray(scales).view("<f4").astype(np.float64)
        values = values.reshape(count, tiles, 128) * scales[:, :, None]
        keys = np.ascontiguousarray(keys).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([values.reshape(count, rank), keys.reshape(count, rope)], axis=1)
