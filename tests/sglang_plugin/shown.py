"""The --kv-cache-dtype that SGLang sees for each layout."""

from codec_oracle import LAYOUTS

#: bfloat16 for rows that none of SGLang's kernels reads.
SHOWN = dict.fromkeys(LAYOUTS, "bfloat16") | {"fp8": "fp8_e4m3"}
#: For models with sparse attention, where rows of `fp8_block_scale` are SGLang's own.
SHOWN_SPARSE = SHOWN | {"fp8_block_scale": "fp8_e4m3"}
