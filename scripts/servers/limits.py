"""Margins of a layout's server to other servers of the same run, with their reasons.

A step whose measurements exceed them fails. records.py has the margins between two runs.
"""

from dataclasses import dataclass

from sgl_kvpool.layout import MLAKVCacheLayout, SegmentEncoding

#: Layout of SGLang's own rows. Servers of the other layouts are compared with its server.
BASELINE = MLAKVCacheLayout.BF16.value


@dataclass(frozen=True)
class Limits:
    """Margins of one model and layout.

    `near`: Largest mean distance (nats) of the prompts' log-probabilities from stock SGLang's and bf16 rows'.
    `far`: Smallest distance from stock SGLang's; below it, another layout was served or rows were not read.
    `same_top`: Least share of the prompts' positions with the same most probable token as the peer. Each
      position is predicted from the text as it is (teacher-forced), so that one difference does not change
      the next.
    """

    near: float
    far: float
    same_top: float


_E = SegmentEncoding
#: Margins by model and encoding of latents.
_BY_LATENT = {
    # 3 layers, random, vocabulary of 512. Distances of the same model in transformers with latents encoded
    # and decoded as `fp8`, `fp8_block_scale` and `fp4`: 0.054, 0.055 and 0.146; in float32 instead of
    # bfloat16: 0.014 (tests/gpu/test_server_gpu.py). The shares of equal most probable tokens are 0.91, 0.92
    # and 0.77; in float32 0.97.
    "v3": {
        _E.BF16: Limits(0.03, 0.0, 0.93),
        _E.E4M3_BY_K_SCALE: Limits(0.10, 0.03, 0.85),
        _E.E4M3_IN_TILES: Limits(0.10, 0.03, 0.85),
        _E.E2M1_IN_BLOCKS: Limits(0.25, 0.03, 0.65),
    },
    # Sparse attention, index keys rounded to e4m3. Distances as above: 0.035, 0.031 and 0.112; in float32
    # 0.009. tilelang, which reads fp8, rounds queries too (tests/gpu/test_server_gpu.py). The share of
    # equal most probable tokens was not measured: its margins are V3's with a reserve for selections that
    # differ.
    "v32": {
        _E.BF16: Limits(0.02, 0.0, 0.90),
        _E.E4M3_BY_K_SCALE: Limits(0.15, 0.02, 0.75),
        _E.E4M3_IN_TILES: Limits(0.07, 0.02, 0.80),
        _E.E2M1_IN_BLOCKS: Limits(0.20, 0.05, 0.60),
    },
    # Two of its six layers have rows. Distances as above: 0.03, 0.03 and 0.09; in float32 0.02. The rounding
    # of the other layers exceeds that of FP8 rows, with which 0.96 of the most probable tokens are the same.
    "kimi": {
        _E.BF16: Limits(0.05, 0.0, 0.93),
        _E.E4M3_BY_K_SCALE: Limits(0.08, 0.0, 0.85),
        _E.E4M3_IN_TILES: Limits(0.08, 0.0, 0.85),
        _E.E2M1_IN_BLOCKS: Limits(0.20, 0.05, 0.70),
    },
    # The trained model of the demo on a CPU, on its held-out text. Distances from stock: 0.0003, 0.0201,
    # 0.0083 and 0.0205; shares of equal most probable tokens: 0.9999, 0.988, 0.995 and 0.985.
    "demo": {
        _E.BF16: Limits(0.003, 0.0, 0.99),
        _E.E4M3_BY_K_SCALE: Limits(0.05, 0.002, 0.96),
        _E.E4M3_IN_TILES: Limits(0.02, 0.002, 0.97),
        _E.E2M1_IN_BLOCKS: Limits(0.05, 0.005, 0.96),
    },
}
#: Margins by model and layout.
LIMITS = {
    model: {layout.value: by_latent[layout.latent] for layout in MLAKVCacheLayout}
    for model, by_latent in _BY_LATENT.items()
}

#: Least share of equal tokens after a host hit and after a device hit: rows and kernels are the same.
SAME_TOKENS = 1.0
#: With sparse attention the order of top-k is not deterministic, so sums have no fixed order. If two tokens
#: are equally likely, the following tokens of that prompt differ (tests/gpu/test_server_gpu.py).
SAME_TOKENS_SPARSE = 0.8
