"""An independent reader and writer of rows: numpy, ml_dtypes and byte offsets spelled by hand.

It shares no line with the product: e2m1 and e4m3 rounding is ml_dtypes', ue5m3 is a search over all
its values, sums are written out, sizes are literals.
"""

import ml_dtypes
import numpy as np
import torch

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.srt.facts.readers import sglang_dsa_reads

#: The numbers of a part of a row -> (bytes per value, values per scale, bytes per scale). `e4m3 / k_scale`
#: is e4m3 of values that were divided by the layer's k_scale.
PARTS = {
    "bf16": (2.0, 0, 0),
    "e4m3": (1.0, 0, 0),
    "e4m3 / k_scale": (1.0, 0, 0),
    "e4m3 in tiles": (1.0, 128, 4),
    "e2m1": (0.5, 16, 1),
}
#: Layout -> its latent and its rope.
STORED = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("e4m3 / k_scale", "e4m3 / k_scale"),
    "fp8_block_scale": ("e4m3 in tiles", "bf16"),
    "fp4": ("e2m1", "bf16"),
    "fp4_fp8_rope": ("e2m1", "e4m3"),
}
LAYOUTS = [layout.value for layout in MLAKVCacheLayout]
if list(STORED) != LAYOUTS:
    raise RuntimeError(f"STORED of {__file__} has lines for {list(STORED)}, not for {LAYOUTS}")
#: Layouts whose rows no torch dtype describes, those narrower than bf16, with scales, and of host tiers.
PACKED = [name for name in LAYOUTS if MLAKVCacheLayout(name).is_packed]
NARROW = [name for name in LAYOUTS if MLAKVCacheLayout(name).is_narrow]
HOST_LAYOUTS = [name for name in NARROW if not MLAKVCacheLayout(name).uses_k_scale]
#: Layouts whose rows no kernel of SGLang's sparse attention reads.
OURS_ALONE = [name for name in LAYOUTS if not sglang_dsa_reads(MLAKVCacheLayout(name))]
UE5M3 = (np.arange(0xF8, dtype=np.uint16) << 7).view(np.float16).astype(np.float64)
BF16_MAX = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def row_format(name, rank, rope, align=16):
    return MLAKVCacheLayout(name).row_format(rank, rope, align_bytes=align)


def cuts(name, rank, rope):
    """First byte of scales, of rope, and of the padding."""
    latent, keys = STORED[name]
    nope_bytes, block, scale_bytes = PARTS[latent]
    a = int(rank * nope_bytes)
    b = a + (rank // block * scale_bytes if block else 0)
    return a, b, b + int(rope * PARTS[keys][0])


def row_bytes(name, rank=512, rope=64, align=16):
    return -(-cuts(name, rank, rope)[2] // align) * align


#: Bytes of a row of DeepSeek's models; tests/test_layout.py has them as numbers.
ROW_BYTES = {name: row_bytes(name) for name in LAYOUTS}


def narrower(name):
    """Layouts that a host tier may have for rows of a layout on the device, R = 512 and P = 64."""
    return [host for host in HOST_LAYOUTS if ROW_BYTES[host] < ROW_BYTES[name]]


def by_latent(values):
    """Values by layout, such as limits of a distance, from values by the numbers of the latent."""
    return {name: values[latent] for name, (latent, _) in STORED.items()}


def bits_of(tensor):
    """bf16 tensor -> numpy uint16 (the copy drops strides)."""
    return tensor.contiguous().view(torch.uint16).numpy()


def floats_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def finite(values):
    values = np.where(np.isnan(values), np.float32(0), values)
    return np.clip(values, -BF16_MAX, BF16_MAX).astype(np.float32)


def to_e4m3(values):
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def nearest_ue5m3(values):
    """Byte of the nearest ue5m3 value by search; a tie goes to the even byte."""
    exact = values.astype(np.float64)
    above = np.searchsorted(UE5M3, exact).clip(1, len(UE5M3) - 1)
    below = above - 1
    up, down = UE5M3[above] - exact, exact - UE5M3[below]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def fp4_scale_bytes(largest):
    """Candidate scales of each block in the order in which they are tried, fp32 [n] -> [5, n]."""
    sixth, quarter = (nearest_ue5m3(largest / np.float32(part)) for part in (6, 4))
    return np.stack([sixth, sixth - 1, sixth + 1, quarter - 1, quarter]).clip(1, 0xF7)


def fp4_block(x):
    """fp32 [n, 16] -> codes uint8 [n, 16], scale bytes [n]."""
    largest = np.abs(x).max(-1)
    tried = fp4_scale_bytes(largest)
    codes, errors = [], []
    for byte in tried:
        scale = UE5M3[byte].astype(np.float32)[:, None]
        with np.errstate(over="ignore"):
            q = np.clip(x / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            e = (x - q.astype(np.float32) * scale) ** 2
            s = [e[:, i] for i in range(16)]
            halves = [
                ((s[k] + s[k + 1]) + (s[k + 2] + s[k + 3])) + ((s[k + 4] + s[k + 5]) + (s[k + 6] + s[k + 7]))
                for k in (0, 8)
            ]
            errors.append(halves[0] + halves[1])
        codes.append(q.view(np.uint8) & 15)
    best = np.argmin(errors, 0)  # ties: the first candidate
    at = np.arange(len(x))
    return np.stack(codes)[best, at], np.where(largest > 0, tried[best, at], 0)


def encode_part(bits, numbers, k_scale):
    """bf16 bits [tokens, count] -> bytes of the values and of the scales, uint8 [tokens, ...]."""
    tokens, count = bits.shape
    none = np.zeros((tokens, 0), np.uint8)
    x = finite(floats_of(bits))
    match numbers:
        case "bf16":
            return bits.view(np.uint8), none
        case "e4m3":
            return to_e4m3(x), none
        case "e4m3 / k_scale":
            with np.errstate(over="ignore"):
                return to_e4m3(x / np.float32(k_scale)), none
        case "e4m3 in tiles":
            tiles = x.reshape(tokens, count // 128, 128)
            scale = np.abs(tiles).max(-1) / np.float32(448)
            scale = np.maximum(scale, np.finfo(np.float32).tiny)
            codes = to_e4m3(tiles / scale[..., None]).reshape(tokens, -1)
            return codes, np.ascontiguousarray(scale.astype("<f4")).view(np.uint8)
        case "e2m1":
            codes, scale = fp4_block(x.reshape(-1, 16))
            codes = codes.reshape(tokens, count)
            return codes[:, 0::2] + 16 * codes[:, 1::2], scale.reshape(tokens, -1)
    raise KeyError(f"the oracle does not know the numbers {numbers!r}")


def encode(k_nope, k_rope, name, rank, rope, row_bytes, k_scale=1.0):
    """bf16 tensors -> uint8 numpy [tokens, row_bytes]."""
    latent, keys = STORED[name]
    a, b, end = cuts(name, rank, rope)
    rows = np.zeros((len(k_nope), row_bytes), np.uint8)
    rows[:, :a], rows[:, a:b] = encode_part(bits_of(k_nope), latent, k_scale)
    if rope:
        rows[:, b:end], _ = encode_part(bits_of(k_rope), keys, k_scale)
    return rows


def decode_part(values, scales, numbers, k_scale):
    """Bytes of values and scales, uint8 [tokens, ...] -> float32 [tokens, count]."""
    tokens, values, scales = len(values), np.ascontiguousarray(values), np.ascontiguousarray(scales)
    with np.errstate(all="ignore"):
        match numbers:
            case "bf16":
                return floats_of(values.view("<u2"))
            case "e4m3":
                return values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            case "e4m3 / k_scale":
                return values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(k_scale)
            case "e4m3 in tiles":
                codes = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                tiles = codes.reshape(tokens, -1, 128) * scales.view("<f4")[..., None]
                return tiles.reshape(tokens, -1)
            case "e2m1":
                codes = np.stack([values & 15, values >> 4], -1).reshape(tokens, -1, 16)
                scale = (scales.astype(np.uint16) << 7).view(np.float16).astype(np.float32)
                blocks = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale[..., None]
                return blocks.reshape(tokens, -1)
    raise KeyError(f"the oracle does not know the numbers {numbers!r}")


def decode(rows, name, rank, rope, k_scale=1.0):
    """uint8 numpy [tokens, >= payload] -> float32 [tokens, rank + rope], before any cast."""
    latent, keys = STORED[name]
    a, b, end = cuts(name, rank, rope)
    nope = decode_part(rows[:, :a], rows[:, a:b], latent, k_scale)
    if not rope:
        return nope
    return np.concatenate([nope, decode_part(rows[:, b:end], rows[:, b:b], keys, k_scale)], -1)


def cast(values, dtype):
    """float32 numpy -> torch tensor of dtype, rounded by ml_dtypes or numpy."""
    kinds = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: None}
    with np.errstate(all="ignore"):
        if kinds[dtype] is None:
            bits = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16)).view(np.uint16)
            return torch.from_numpy(bits).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(values.astype(kinds[dtype])))


def assert_same_bytes(found, expected, what="rows"):
    """Assert bitwise equality; the message names the first wrong places."""
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected), what, strict=True)


def assert_same_values(found, expected):
    """Bitwise equal tensors, except that any NaN equals any NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    nan = torch.isnan(expected.float())
    assert torch.equal(torch.isnan(found.float()), nan)
    zero = torch.zeros((), dtype=found.dtype)
    assert_same_bits(torch.where(nan, zero, found), torch.where(nan, zero, expected))


def assert_same_bits(found, expected):
    """Bitwise equal tensors, NaN payloads included."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    found, expected = (x.contiguous().view(torch.uint8) for x in (found, expected))
    assert_same_bytes(found, expected, "values")


# ------------------------------------------------------------------------------------------ inputs


def every_bf16():
    """All 65536 bit patterns, [128, 512]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(128, 512)


#: Blocks, as bf16 bits in hex, for which other orders of summation (halves first, or sequential) pick another
#: scale: about one in a million random blocks.
ORDER_DECIDES = (
    "bbc53e57bcb3be8fc011bf76bf99bf24bf33bd1cbe7f3e1cc0333e9e3e30bf07",
    "be553fca3c3bbf9abf8c3eadbf7f3ee8bfd43f013f7c3e57bc6fbf87bfb2bd69",
    "bf673fcdbc56bfdebf95404ebd823f2e3e52ba18bf35bf0bbfba3f05bfa4bdde",
    "bec63a183fc53ee93f913ee9bf96be203c29bf4b3f593f823fa43f9fbf853f4e",
    "bf1bbfab3f003ef43f203ac7bfe33ebd3f473f40bf6ebf32bda83f16bf7b3f83",
    "3f4dbe933f973fca3f6bbfbd3e61bfa03f723f7f3f31b9e3bfcb3fbdbec73e0d",
    "bd5e3c21401a3dfcbf25bfc8bfe43f95400b3f9b3c6aba9dbf473f3f3fa43e89",
    "bd00c0403f70becdbf14bf9abf70b96b3fd7bfc03f943e7abfc93e94bfa1bfcd",
)


def order_decides():
    """bf16 [8, 128]: each block of `ORDER_DECIDES` eight times."""
    bits = [[int(block[i : i + 4], 16) for i in range(0, 64, 4)] for block in ORDER_DECIDES]
    return torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).repeat(1, 8)


def hard_blocks(count, generator):
    """bf16 [count, 16]: spread sigmas, ties, halves, denormals, zeros, NaN, infinities, huge values."""
    x = torch.randn(count, 16, generator=generator)
    sigma = torch.exp2(torch.randint(-24, 16, (count, 1), generator=generator).float())
    x = (x * sigma).to(torch.bfloat16)
    kind = torch.arange(count) % 16
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])
    pick = grid[torch.randint(0, 16, (count, 16), generator=generator)]
    sign = torch.randint(0, 2, (count, 16), generator=generator) * 2.0 - 1
    power = torch.exp2(torch.randint(-20, 16, (count, 1), generator=generator).float())
    eighths = 1 + torch.randint(0, 8, (count, 1), generator=generator) / 8
    x = torch.where((kind == 1)[:, None], (pick * sign * power * eighths).to(x.dtype), x)
    raw = torch.randint(0, 65536, (count, 16), generator=generator, dtype=torch.int32)
    raw = raw.to(torch.uint16).view(torch.bfloat16)
    x = torch.where((kind == 2)[:, None], raw, x)  # any bits: half of these hold huge values
    x = torch.where((kind == 3)[:, None], (raw.view(torch.int16) & -0x7F81).view(x.dtype), x)
    rare = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3e38, 2e-5])
    some = rare[torch.randint(0, 8, (count, 16), generator=generator)].to(x.dtype)
    here = torch.randint(0, 4, (count, 16), generator=generator) == 0
    x = torch.where((kind == 4)[:, None] & here, some, x)
    x = torch.where((kind == 5)[:, None], torch.zeros_like(x), x)
    # Quotients halfway between two e2m1 magnitudes, at every mantissa of a scale.
    halves = torch.tensor([6, 6, 6, 6, 4, 4, 3, 3, 2, 2, 1.5, 1, 0.5, 1.25, 2.5, 5])
    x = torch.where((kind == 7)[:, None], (halves * power * eighths).to(x.dtype), x)
    x = torch.where((kind == 6)[:, None], x * torch.tensor([1.0] + [1e-3] * 15).to(x.dtype), x)
    return x


def hard_rows(tokens, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return hard_blocks(tokens * width // 16, generator).reshape(tokens, width)
