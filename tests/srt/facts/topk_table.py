"""The oracle of `topk_transform`: what DSA's implementations can be given, written out by hand, case by case.

Nothing here is taken from the code under test but the names of layouts. Line numbers are of SGLang 0.5.23's
srt/layers/attention/dsa_backend.py unless a file is named; `forward_extend` starts at 2164, `forward_decode`
at 2537, and both read the pool with `get_key_buffer`: what a kernel gets are the rows as they are stored,
unless the RAGGED branch of `forward_extend` (:2385) replaces them by gathered ones.
"""

from sgl_kvpool import MLAKVCacheLayout

#: Layouts whose rows no kernel of SGLang reads have the lines of `fp4`.
LIKE = {"fp4_fp8_rope": "fp4"}
LAYOUTS = ("bf16", "fp8", "fp8_block_scale", "fp4", *LIKE)
if set(LAYOUTS) != {layout.value for layout in MLAKVCacheLayout}:
    raise RuntimeError(f"{__file__} has lines for {LAYOUTS}; add others to them or to LIKE")
IMPLEMENTATIONS = (
    *("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "trtllm"),
    *("triton_sparse_mla", "flashinfer_sparse_mla", "kvpool_mla"),
)

#: Who attends: :1132 and :2187. Spelt out, so that a mode that SGLang adds is seen to be missing.
EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")  # the prefill implementation
MODES = (
    *EXTENDS,
    *("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"),  # the decode implementation
    "PREBUILT",  # neither: the rows came from another server, and no forward pass is run
)

#: One line per layout and prefill: EXTEND, MIXED, SPLIT_PREFILL, DLLM_EXTEND. P is PAGED, R is RAGGED, x is
#: refused in that mode. Dashes: the prefill is refused in all modes. After the bar: why.
PREFILLS = """
bf16             flashmla_sparse        P P P P | kernel over 16-bit keys, and rows are that (:2805)
bf16             flashmla_sparse_q8     R x x x | gathers and casts to fp8 (:3171); other modes raise (:2285)
bf16             flashmla_kv            P P P P | quantises a layer's rows in every call (:3342)
bf16             flashmla_auto          P P P P | stands for flashmla_sparse (:4099)
bf16             fa3                    P P P P | splits rows of 16-bit values by width (:2774)
bf16             tilelang               P P P P | kernel of the rows' dtype (tilelang_kernel.py:1194)
bf16             trtllm                 P P P P | views rows as kv_cache_dim values (:3882)
bf16             triton_sparse_mla      P P P P | as flashmla_sparse (:2455)
bf16             flashinfer_sparse_mla  - - - - | 656-byte rows alone (flash_mla_sm120.py:694, :738)
bf16             kvpool_mla             - - - - | a decode

fp8              flashmla_sparse        - - - - | 16-bit keys; nothing decodes rows without scales
fp8              flashmla_sparse_q8     - - - - | "packed fp8_e4m3 pool" or bf16 (:454)
fp8              flashmla_kv            - - - - | would quantise what is fp8 already (:3342)
fp8              flashmla_auto          - - - - | stands for flashmla_sparse: rows count as bf16 (:4099)
fp8              fa3                    - - - - | 16-bit queries
fp8              tilelang               P P P P | reads fp8 rows without scales (tilelang_kernel.py:1194)
fp8              trtllm                 P P P P | queries are fp8 too (:3826)
fp8              triton_sparse_mla      - - - - | as flashmla_sparse
fp8              flashinfer_sparse_mla  - - - - | 656-byte rows alone
fp8              kvpool_mla             - - - - | a decode

fp8_block_scale  flashmla_sparse        R R R R | decodes what it gathers (:2447): must gather
fp8_block_scale  flashmla_sparse_q8     R x x x | decodes and casts what it gathers (:3164); :2285
fp8_block_scale  flashmla_kv            P P P P | FlashMLA's own row (:3364)
fp8_block_scale  flashmla_auto          P P P P | flashmla_kv (:4096); on Blackwell SGLang renames it
fp8_block_scale  fa3                    - - - - | would take bytes for values (:2774)
fp8_block_scale  tilelang               - - - - | fp8 rows without scales
fp8_block_scale  trtllm                 - - - - | fp8 rows without scales
fp8_block_scale  triton_sparse_mla      R R R R | as flashmla_sparse
fp8_block_scale  flashinfer_sparse_mla  P P P P | such rows by slots (:2478)
fp8_block_scale  kvpool_mla             - - - - | a decode

fp4              flashmla_sparse        R R R R | our hook decodes what is gathered
fp4              flashmla_sparse_q8     - - - - | its gathering knows bf16 and scaled fp8
fp4              flashmla_kv            - - - - | FlashMLA has no such row
fp4              flashmla_auto          - - - - | would be flashmla_sparse, which our hook knows by that name
fp4              fa3                    - - - - | no kernel of SGLang reads our FP4
fp4              tilelang               - - - - | no kernel of SGLang reads our FP4
fp4              trtllm                 - - - - | no kernel of SGLang reads our FP4
fp4              triton_sparse_mla      - - - - | no hook
fp4              flashinfer_sparse_mla  - - - - | no kernel of SGLang reads our FP4
fp4              kvpool_mla             - - - - | a decode
"""

#: One line per layout and decode: whether it can read the rows by their slots. It never gathers.
DECODES = """
bf16             flashmla_sparse        yes | :2639
bf16             flashmla_sparse_q8     -   | "a prefill-only backend" (:483)
bf16             flashmla_kv            yes | slowly (:3342)
bf16             flashmla_auto          -   | no branch (:2735)
bf16             fa3                    yes | :2698
bf16             tilelang               yes | :2675
bf16             trtllm                 yes | :2567
bf16             triton_sparse_mla      -   | no branch (:2735)
bf16             flashinfer_sparse_mla  -   | 656-byte rows alone (flash_mla_sm120.py:694, :738)
bf16             kvpool_mla             yes | ours

fp8              flashmla_sparse        -   | 16-bit keys
fp8              flashmla_sparse_q8     -   | :483
fp8              flashmla_kv            -   | quantises what is fp8 already (:3342)
fp8              flashmla_auto          -   | no branch
fp8              fa3                    -   | 16-bit queries
fp8              tilelang               yes | tilelang_kernel.py:1194
fp8              trtllm                 yes | :3826
fp8              triton_sparse_mla      -   | no branch
fp8              flashinfer_sparse_mla  -   | 656-byte rows alone
fp8              kvpool_mla             yes | ours

fp8_block_scale  flashmla_sparse        -   | 16-bit keys, and decodes gather nothing (:2639)
fp8_block_scale  flashmla_sparse_q8     -   | :483
fp8_block_scale  flashmla_kv            yes | :3364
fp8_block_scale  flashmla_auto          -   | no branch
fp8_block_scale  fa3                    -   | would take bytes for values
fp8_block_scale  tilelang               -   | fp8 rows without scales
fp8_block_scale  trtllm                 -   | fp8 rows without scales
fp8_block_scale  triton_sparse_mla      -   | no branch
fp8_block_scale  flashinfer_sparse_mla  yes | :2651
fp8_block_scale  kvpool_mla             yes | ours

fp4              flashmla_sparse        -   | 16-bit keys; what stands for ours is called kvpool_mla here
fp4              flashmla_sparse_q8     -   | :483
fp4              flashmla_kv            -   | no such row
fp4              flashmla_auto          -   | no branch
fp4              fa3                    -   | no such row
fp4              tilelang               -   | no such row
fp4              trtllm                 -   | no such row
fp4              triton_sparse_mla      -   | no branch
fp4              flashinfer_sparse_mla  -   | no such row
fp4              kvpool_mla             yes | ours
"""

#: Any two sides that can read the rows may be paired, except over `fp8` rows, for which SGLang requires one
#: reader (arg_groups/overrides.py:571, mem_cache/kv_cache_configurator.py:3434). Paired with ours, trtllm
#: would also leave out the rotary embedding (forward_mla.py:972).
FP8_PAIRS = """
tilelang  tilelang
trtllm    trtllm
"""

PAGED, RAGGED, REFUSED = "PAGED", "RAGGED", "REFUSED"


def lines(text):
    """Words of every line, without what is after the bar."""
    return [line.split("|")[0].split() for line in text.splitlines() if line.strip()]


_ANSWERS = {"P": PAGED, "R": RAGGED, "x": REFUSED, "-": None}
_PREFILLS = {
    (layout, name): dict(zip(EXTENDS, map(_ANSWERS.__getitem__, answers), strict=True))
    for layout, name, *answers in lines(PREFILLS)
}
_DECODES = {(layout, name): {"yes": True, "-": False}[answer] for layout, name, answer in lines(DECODES)}
_FP8_PAIRS = {tuple(pair) for pair in lines(FP8_PAIRS)}
# A line that was forgotten, or written twice with two meanings, would be a hole in the oracle.
_CASES = [(layout, name) for layout in LAYOUTS if layout not in LIKE for name in IMPLEMENTATIONS]
assert [tuple(line[:2]) for line in lines(PREFILLS)] == _CASES
assert [tuple(line[:2]) for line in lines(DECODES)] == _CASES


def works_as(side, layout, name):
    """Whether a prefill or a decode reads such rows."""
    layout = LIKE.get(layout, layout)
    return _DECODES[layout, name] if side == "decode" else None not in _PREFILLS[layout, name].values()


def expected(layout, prefill, decode, mode):
    """PAGED, RAGGED or REFUSED."""
    if not works_as("prefill", layout, prefill) or not works_as("decode", layout, decode):
        return REFUSED
    if layout == "fp8" and (prefill, decode) not in _FP8_PAIRS:
        return REFUSED
    if mode not in EXTENDS:
        return PAGED
    return _PREFILLS[LIKE.get(layout, layout), prefill][mode]


def cells(layouts=LAYOUTS, modes=(*MODES, None), sides=IMPLEMENTATIONS):
    """All (layout, prefill, decode, mode)."""
    return [
        (layout, prefill, decode, mode)
        for layout in layouts
        for prefill in sides
        for decode in sides
        for mode in modes
    ]
