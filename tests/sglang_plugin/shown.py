"""The --kv-cache-dtype that SGLang sees for each layout."""

SHOWN = {
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_block_scale": "bfloat16",
    "fp4": "bfloat16",
    "fp4_fp8_rope": "bfloat16",
}
#: For models with sparse attention, where rows of `fp8_block_scale` are SGLang's own.
SHOWN_SPARSE = SHOWN | {"fp8_block_scale": "fp8_e4m3"}
