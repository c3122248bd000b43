"""ptxrun executes instructions as the PTX manual says: one warp, against numpy, torch and fractions."""

from fractions import Fraction

import numpy as np
import ptxrun
import pytest
import torch

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
U, S, L = np.uint32, np.int32, np.int64
LANE = np.arange(32)


@pytest.fixture
def random():
    return np.random.default_rng(0)


def execute(code, out_type, *inputs):
    """One warp: registers a, b, c hold `inputs`, arrays of 32; `code` writes register o."""
    text = HEAD + ".visible .entry k(" + ", ".join(f".param .u64 p_{n}" for n in "abco") + ") {\n"
    text += ".reg .u64 p; .reg .u32 t; .reg .pred q; .reg .b16 h0, h1;\n"
    text += "mov.u32 t, %tid.x;\n"
    for name, x in zip("abc", inputs, strict=False):
        size = x.dtype.itemsize
        text += f".reg .b{8 * size} {name}; ld.param.u64 p, [p_{name}];\n"
        text += f"mad.wide.u32 p, t, {size}, p; ld.global.b{8 * size} {name}, [p];\n"
    size = np.dtype(out_type).itemsize
    text += f".reg .b{8 * size} o;\n{code}\n"
    text += f"ld.param.u64 p, [p_o]; mad.wide.u32 p, t, {size}, p; st.global.b{8 * size} [p], o; ret;\n}}\n"
    out = np.zeros(32, out_type)
    module = ptxrun.Module(text)
    assert not module.unsupported, module.unsupported
    module.launch("k", 1, 32, [*inputs, *[None] * (3 - len(inputs)), out])
    return out


def integers(random, kind, low=None):
    info = np.iinfo(kind)
    x = random.integers(info.min if low is None else low, info.max, 32, kind, endpoint=True)
    if low is None:
        x[:3] = info.max, info.min, 0
    return x


def floats(random):
    x = (random.standard_normal(32) * 2.0 ** random.integers(-20, 20, 32)).astype(np.float32)
    x[:4] = 0.0, -0.0, 1.0, np.inf
    return x


def _prmt(a, b):
    return a & 255 | (b & 255) << 8 | (a >> 8 & 255) << 16 | (b >> 8 & 255) << 24


INTEGER = [
    ("add.s32 o, a, b;", S, lambda a, b: a + b),
    ("sub.u32 o, a, b;", U, lambda a, b: a - b),
    ("mul.lo.s32 o, a, b;", S, lambda a, b: a * b),
    ("mul.hi.s32 o, a, b;", S, lambda a, b: a.astype(L) * b >> 32),
    ("mul.hi.u32 o, a, b;", U, lambda a, b: a.astype(np.uint64) * b >> np.uint64(32)),
    ("div.s32 o, a, b;", S, lambda a, b: np.trunc(a / b.astype(np.float64)).astype(L)),
    ("rem.u32 o, a, b;", U, lambda a, b: a % b),
    ("min.s32 o, a, b;", S, np.minimum),
    ("max.u32 o, a, b;", U, np.maximum),
    ("and.b32 o, a, b;", U, np.bitwise_and),
    ("xor.b32 o, a, b;", U, np.bitwise_xor),
    ("bfe.u32 o, a, 5, 9;", U, lambda a, b: a >> 5 & 511),
    ("bfe.s32 o, a, 28, 9;", S, lambda a, b: a >> 28),
    ("prmt.b32 o, a, b, 0x5140;", U, _prmt),
    ("shl.b32 o, a, 33;", U, lambda a, b: a * 0),
    ("shr.s32 o, a, 40;", S, lambda a, b: a >> 31),
    ("mov.b32 {h0, h1}, a; mov.b32 o, {h1, h0};", U, lambda a, b: a << 16 | a >> 16),
    ("setp.lt.s32 q, a, b; selp.b32 o, a, b, q;", S, np.minimum),
    ("cvt.rn.f32.s32 o, a;", S, lambda a, b: a.astype(np.float32).view(S)),
    ("mov.u32 o, %laneid;", U, lambda a, b: LANE),
    ("shfl.sync.bfly.b32 o, a, 5, 31, -1;", U, lambda a, b: a[LANE ^ 5]),
    ("elect.sync o|q, -1;", U, lambda a, b: LANE * 0),
]


@pytest.mark.parametrize(("code", "kind", "expected"), INTEGER, ids=[case[0] for case in INTEGER])
def test_integers(code, kind, expected, random):
    a = integers(random, kind)
    b = integers(random, kind, 1 if code[:3] in ("div", "rem") else None)
    with np.errstate(all="ignore"):
        wanted = np.asarray(expected(a, b)).astype(kind)
    np.testing.assert_array_equal(execute(code, kind, a, b), wanted)


def test_results_of_64_bits(random):
    a, b, c = integers(random, S), integers(random, S), integers(random, L)
    with np.errstate(all="ignore"):
        wanted = a.astype(L) * b + c
    np.testing.assert_array_equal(execute("mad.wide.s32 o, a, b, c;", L, a, b, c), wanted)
    a, b = integers(random, L), integers(random, L)
    wanted = [x * y >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(execute("mul.hi.s64 o, a, b;", L, a, b), wanted)


EXACT = {
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: x - y,
    "mul": lambda x, y, z: x * y,
    "div": lambda x, y, z: x / y,
    "min": lambda x, y, z: min(x, y),
    "max": lambda x, y, z: max(x, y),
    "fma": lambda x, y, z: x * y + z,
}


@pytest.mark.parametrize(
    "code", ["add.f32", "sub.f32", "mul.f32", "min.f32", "max.f32", "div.rn.f32", "fma.rn.f32"]
)
def test_fp32_is_rounded_once(code, random):
    a, b, c = (np.where(np.isinf(x), 3, x).astype(np.float32) for x in (floats(random) for _ in range(3)))
    b[b == 0] = 2
    found = execute(f"{code} o, a, b{', c' if 'fma' in code else ''};", np.float32, a, b, c)
    for x, y, z, f in zip(a, b, c, found, strict=True):
        exact = EXACT[code[:3]](*(Fraction(float(v)) for v in (x, y, z)))
        error, step = Fraction(float(f)) - exact, Fraction(float(np.spacing(np.abs(f))))
        assert abs(error) <= step / 2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_halves(kind, op):
    name = "f16x2" if kind == torch.float16 else "bf16x2"
    x = [torch.randn(64).mul(2.0 ** torch.randint(-6, 6, (64,))).to(kind) for _ in range(3)]
    operands = ", ".join("abc"[: 3 if op == "fma" else 2])
    found = execute(f"{op}.rn.{name} o, {operands};", U, *(v.view(torch.int16).numpy().view(U) for v in x))
    a, b, c = (v.double() for v in x)
    exact = {"add": a + b, "mul": a * b, "fma": a * b + c}[op]
    np.testing.assert_array_equal(found.view(np.int16), exact.to(kind).view(torch.int16).numpy())


def test_conversions(random):
    x = floats(random)
    x[5:9] = [65504.0, 65520.0, 1e-8, 448.5]
    t = torch.from_numpy(x)

    def bits(half):
        return half.view(torch.int16).numpy().view(np.uint16).astype(U)

    found = execute("cvt.rn.bf16x2.f32 o, a, a;", U, x)
    np.testing.assert_array_equal(found, bits(t.bfloat16()) * 0x10001)
    found = execute("cvt.rn.f16.f32 h0, a; cvt.u32.u16 o, h0;", U, x)
    np.testing.assert_array_equal(found, bits(t.half()))
    e4m3 = t.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(U)
    found = execute("cvt.rn.satfinite.e4m3x2.f32 h0, a, 0f00000000; cvt.u32.u16 o, h0;", U, x)
    np.testing.assert_array_equal(found, e4m3 << 8)


def test_every_e4m3_as_a_half():
    for first in range(0, 256, 32):
        codes = np.arange(first, first + 32, dtype=U)
        found = execute("mov.b32 {h0, h1}, a; cvt.rn.f16x2.e4m3x2 o, h0;", U, codes)
        wanted = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).half()
        found = torch.from_numpy((found & 0xFFFF).astype(np.uint16)).view(torch.float16)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
