"""Instructions of other packages' kernels against numbers worked out by hand, and mutants of these cases."""

import math
import struct

import numpy as np
import ptxrun
import pytest

pytestmark = pytest.mark.quick
INF, NAN, TINY = math.inf, 0x7FFFFFFF, 2.0**-149
HEAD = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y) {
  .reg .b32 %i<10>, %o<8>, %t<4>; .reg .b16 %h<2>; .reg .b64 %q<6>; .reg .pred %p;
  .shared .align 128 .b8 area[2560];
  mov.u32 %t0, %tid.x; mul.wide.u32 %q0, %t0, 4;
  ld.param.u64 %q1, [x]; add.s64 %q1, %q1, %q0;
  ld.param.u64 %q2, [y]; add.s64 %q2, %q2, %q0;
"""


def execute(body, inputs, outputs=1):
    """What the threads leave in the registers %o, given those in %i: uint32 `[registers, threads]`."""
    threads = inputs.shape[1]
    loads = [f"ld.global.b32 %i{n}, [%q1 + {4 * threads * n}];" for n in range(len(inputs))]
    stores = [f"st.global.b32 [%q2 + {4 * threads * n}], %o{n};" for n in range(outputs)]
    found = np.zeros((outputs, threads), np.uint32)
    text = "\n".join([HEAD, *loads, body, *stores, "ret;\n}"])
    ptxrun.Module(text).launch(None, 1, threads, [np.ascontiguousarray(inputs), found])
    return found


def bits(value):
    """A number's float32, or the bits themselves of an int."""
    return value if isinstance(value, int) else struct.unpack("<I", struct.pack("<f", value))[0]


TIE = 1 + 2.0**-11  # between two neighbours of tf32
#: Body, and rows of inputs and the result.
CASES = {
    "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 %o0, %i0;": [(7, 7)],
    "lg2.approx.f32 %o0, %i0;": [(8.0, 3.0), (TINY, -149.0), (0.0, -INF), (-1.0, NAN), (INF, INF)],
    "lg2.approx.ftz.f32 %o0, %i0;": [(0.125, -3.0), (TINY, -INF)],
    "sqrt.rn.f32 %o0, %i0;": [(2.25, 1.5), (2.0, 0x3FB504F3), (-0.0, -0.0), (-1.0, NAN)],
    "rsqrt.approx.f32 %o0, %i0;": [(4.0, 0.5), (0.0, INF), (-0.0, -INF), (INF, 0.0), (-4.0, NAN)],
    "cvt.rpi.f32.f32 %o0, %i0;": [(1.5, 2.0), (-1.5, -1.0), (-0.5, -0.0), (TINY, 1.0)],
    "cvt.rpi.ftz.f32.f32 %o0, %i0;": [(1.5, 2.0), (TINY, 0.0)],
    "cvt.rmi.f32.f32 %o0, %i0;": [(1.5, 1.0), (-1.5, -2.0), (-TINY, -1.0)],
    "cvt.rzi.f32.f32 %o0, %i0;": [(1.5, 1.0), (-1.5, -1.0), (-0.5, -0.0)],
    "cvt.rni.f32.f32 %o0, %i0;": [(2.5, 2.0), (3.5, 4.0), (-0.5, -0.0), (INF, INF)],
    "cvt.sat.f32.f32 %o0, %i0;": [(1.5, 1.0), (0.25, 0.25), (-2.0, 0.0), (NAN, 0.0)],
    "cvt.rna.tf32.f32 %o0, %i0;": [(TIE, 1 + 2.0**-10), (-TIE, -1 - 2.0**-10), (bits(TIE) - 1, 1.0)],
    "cvt.rzi.s32.f32 %o0, %i0;": [(-2.7, -2 % 2**32), (3e9, 2**31 - 1), (-3e9, 2**31), (NAN, 0)],
    "cvt.rmi.s32.f32 %o0, %i0;": [(2.7, 2), (-2.1, -3 % 2**32)],
    "cvt.rpi.ftz.s32.f32 %o0, %i0;": [(2.1, 3), (TINY, 0)],
    "cvt.rni.u32.f32 %o0, %i0;": [(2.5, 2), (-7.0, 0), (5e9, 2**32 - 1)],
    "cvt.rzi.s64.f32 %q3, %i0; mov.b64 {%t1, %o0}, %q3;": [
        *((2.0**40, 256), (-1.0, 2**32 - 1), (1e30, 2**31 - 1), (NAN, 2**31)),
    ],
    "fma.rm.f32 %o0, %i0, %i1, %i2;": [
        *((1.0, 1.0, -(2.0**-n), 1 - 2.0**-24) for n in (30, 100)),
        *((-1.0, 1.0, -(2.0**-n), -1 - 2.0**-23) for n in (30, 100)),
        *((1.0, 1.0, 2.0**-30, 1.0), (3.0, 5.0, 0.25, 15.25)),
    ],
    "min.xorsign.abs.f32 %o0, %i0, %i1;": [
        *((-3.0, 2.0, -2.0), (-3.0, -2.0, 2.0), (3.0, 2.0, 2.0)),
        *((2.0, NAN, 2.0), (NAN, -2.0, -2.0), (NAN, NAN, NAN)),
    ],
    "max.xorsign.abs.f32 %o0, %i0, %i1;": [
        *((-3.0, 2.0, -3.0), (2.0, 3.0, 3.0), (-2.0, -3.0, 3.0)),
        *((2.0, NAN, 2.0), (NAN, -2.0, -2.0), (NAN, NAN, NAN)),
    ],
    "redux.sync.add.s32 %o0, %i0, -1;": [(-3 % 2**32, 16), (4, 16)],
    "redux.sync.add.u32 %o0, %i0, %i1;": [(1, 0x5555_5555, 16), (2, 0xAAAA_AAAA, 32)],
    "neg.f16x2 %o0, %i0;": [(0x3C00_8000, 0xBC00_0000)],
    "abs.bf16x2 %o0, %i0;": [(0xBF80_4000, 0x3F80_4000)],
    "mov.b32 {%h0, %h1}, %i0; neg.bf16 %h0, %h0; mov.b32 %o0, {%h0, %h1};": [(0x1234_3F80, 0x1234_BF80)],
    **{
        f"ld.global.{load}.b32 %t1, [%q1]; st.global.{store}.b32 [%q2], %t1; ld.global.b32 %o0, [%q2];": [
            (7, 7)
        ]
        for load, store in (("ca", "wb"), ("cg", "cg"), ("cs", "cs"), ("L1::evict_last", "wt"))
    },
}
UNKNOWN = [
    *("add.rm.f32 %o0, %i0, %i0;", "add.xorsign.abs.f32 %o0, %i0, %i0;", "neg.ftz.f16x2 %o0, %i0;"),
    *("redux.sync.min.s32 %o0, %i0, -1;", "redux.sync.add.b32 %o0, %i0, -1;"),
    *("cvt.rn.tf32.f32 %o0, %i0;", "cvt.rna.satfinite.tf32.f32 %o0, %i0;", "cvt.sat.u8.s32 %o0, %i0;"),
]


@pytest.mark.parametrize(("body", "rows"), CASES.items(), ids=CASES)
def test_numbers(body, rows):
    columns = np.array([[bits(value) for value in row] for row in (rows * 32)[:32]], np.uint32).T
    assert execute(body, columns[:-1])[0].tolist() == columns[-1].tolist()


@pytest.mark.parametrize("body", UNKNOWN)
def test_what_no_handler_knows_is_a_fault(body):
    with pytest.raises(ptxrun.PtxError, match="this instruction is not implemented"):
        execute(body, np.zeros((1, 32), np.uint32))


def check_shuffle(mode, lanes, ends, width, given=None):
    """`ends`: the operand that says where segments of `width` lanes end; `given`: a mutant's mode, ends."""
    mode_given, ends_given = given or (mode, ends)
    body = f"shfl.sync.{mode_given}.b32 %o0|%p, %i0, {lanes}, {ends_given}, -1; selp.b32 %o1, 1, 0, %p;"
    source, inside = execute(body, np.arange(100, 132, dtype=np.uint32)[None], 2)
    for lane in range(32):
        other = lane + (lanes if mode == "down" else -lanes)
        is_inside = other // width == lane // width
        assert (source[lane] - 100, inside[lane]) == (other if is_inside else lane, is_inside)


def operands(columns, threads):
    """A, B and their product as the threads hold them, `[registers, threads]`, and the whole A and B of tf32.

    What is read has bits below tf32's, which a product ignores.
    """
    random, thread = np.random.default_rng(5), np.arange(threads)
    a, b = (random.integers(-9, 9, (count, 8)) + 0.5 for count in (threads // 2, columns))
    read = [x.astype(np.float32).view(np.uint32) | 0x1ABC for x in (a, b)]
    row, place = thread // 32 * 16 + thread % 32 // 4, thread % 4
    of_a = [read[0][row + 8 * (n % 2), place + 4 * (n // 2)] for n in range(4)]
    of_b = [read[1][row % 8, place + 4 * n] for n in range(2)]
    where = [(row + 8 * (n // 2 % 2), 8 * (n // 4) + 2 * place + n % 2) for n in range(columns // 2)]
    return of_a, of_b, np.array([(a @ b.T)[at] for at in where], np.float32), read


MMA = """mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
  {%o0, %o1, %o2, %o3}, {%i0, %i1, %i2, %i3}, {%i4, %i5}, {%i6, %i7, %i8, %i9};"""


def check_mma(body=MMA):
    of_a, of_b, product, _ = operands(8, 32)
    addend = np.arange(128, dtype=np.float32).reshape(4, 32)
    found = execute(body, np.array([*of_a, *of_b, *addend.view(np.uint32)]), 4).view(np.float32)
    assert (found == product + addend).all()


#: B, and A too unless it is in registers, in shared memory: 8 rows of 4 numbers, then the next 4 of them.
WGMMA = """
  mov.u32 %t1, area; shl.b32 %t2, %t0, 2; add.u32 %t2, %t1, %t2;
  st.shared.b32 [%t2], %i0; st.shared.b32 [%t2 + 512], %i1; st.shared.b32 [%t2 + 1024], %i2;
  st.shared.b32 [%t2 + 1536], %i3; st.shared.b32 [%t2 + 2048], %i4;
  fence.proxy.async.shared::cta; bar.sync 0;
  shr.u32 %t1, %t1, 4; cvt.u64.u32 %q3, %t1; or.b64 %q3, %q3, LAYOUT; add.s64 %q4, %q3, 128;
  setp.ne.s32 %p, 0, 0; wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32
    {%o0, %o1, %o2, %o3, %o4, %o5, %o6, %o7}, OF_A, %q4, %p, 1, 1;
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""


def check_wgmma(of_a_given, lead=128, stride=256):
    of_a, _, product, read = operands(16, 128)
    image = [x.reshape(-1, 8, 2, 4).transpose(0, 2, 1, 3).reshape(-1, 128) for x in read]
    body = WGMMA.replace("LAYOUT", str(lead >> 4 << 16 | stride >> 4 << 32)).replace("OF_A", of_a_given)
    assert (execute(body, np.concatenate([*image, of_a]), 8).view(np.float32) == product).all()


def test_shuffles_and_products():
    shuffles = (("up", 3, 0, 32), ("down", 5, 31, 32), ("up", 3, 0x1800, 8), ("down", 5, 0x181F, 8))
    for mode, lanes, ends, width in shuffles:
        check_shuffle(mode, lanes, ends, width)
    check_mma()
    check_wgmma("%q3")
    check_wgmma("{%i5, %i6, %i7, %i8}")


TF32 = "cvt.rna.tf32.f32 %o0, %i0;"
MUTANTS = {
    "tf32 is not rounded": lambda: test_numbers("mov.b32 %o0, %i0;", CASES[TF32]),
    "tf32 is cut": lambda: test_numbers("and.b32 %o0, %i0, 0xffffe000;", CASES[TF32]),
    "down for up": lambda: check_shuffle("up", 3, 0, 32, ("down", 31)),
    "no segments": lambda: check_shuffle("up", 3, 0x1800, 8, ("up", 0)),
    "no clamp": lambda: check_shuffle("down", 5, 0x181F, 8, ("down", 0x1800)),
    "mma, registers of A": lambda: check_mma(MMA.replace("%i1, %i2", "%i2, %i1")),
    "mma, registers of B": lambda: check_mma(MMA.replace("%i4, %i5", "%i5, %i4")),
    "wgmma, registers of A": lambda: check_wgmma("{%i5, %i7, %i6, %i8}"),
    "wgmma, leading offset": lambda: check_wgmma("%q3", lead=256),
    "wgmma, stride": lambda: check_wgmma("%q3", stride=128),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name):
    with pytest.raises((AssertionError, ptxrun.PtxError)):
        MUTANTS[name]()
