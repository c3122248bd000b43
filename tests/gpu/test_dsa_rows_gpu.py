"""656-byte rows of this package, read by the kernels that SGLang calls for sparse attention (DSA)."""

import math

import pytest
import torch
from flashmla_rows import read_rows

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.codec import store_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANK, ROPE, PAGE, PAGES = 512, 64, 64, 53
FORMAT = MLAKVCacheLayout("fp8_block_scale").row_format(RANK, ROPE, align_bytes=1)
SCALE = 1 / 24


def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("called as on Hopper: elsewhere FlashMLA wants other numbers of heads, or has no kernel")


def stored(rows, seed):
    """A pool of pages of NaN bytes but for `rows` slots; those slots; its rows read back, float64."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((PAGES * PAGE, FORMAT.row_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:rows]
    # Tiles of a row differ in size, so that a scale in the wrong place shows.
    tiles = torch.exp2(torch.randint(-3, 2, (rows, RANK // 128, 1), generator=generator).float())
    nope = (torch.randn(rows, RANK // 128, 128, generator=generator) * tiles).view(rows, RANK).bfloat16()
    keys = torch.randn(rows, ROPE, generator=generator).bfloat16()
    store_rows(pool, slots.cuda(), nope.cuda(), keys.cuda(), FORMAT)
    values = torch.from_numpy(read_rows(pool.cpu().numpy()))
    assert values.isnan().any(-1).sum() == len(pool) - rows
    return pool, slots, values


def lists(slots, counts, width, seed):
    """Of every query, `counts` slots in any order, then -1."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((len(counts), width), -1, dtype=torch.int32)
    for one, count in zip(found, counts, strict=True):
        one[:count] = slots[torch.randperm(len(slots), generator=generator)[:count]].int()
    return found


def expected(q, values, indices):
    """For each query: output, log-sum-exp, and the output that absolute values would give."""
    outputs, sums, sizes = [], [], []
    for query, one in zip(q.double(), indices, strict=True):
        rows = values[one[one >= 0].long()]
        scores = query @ rows.T * SCALE
        weights = scores.softmax(-1)
        outputs.append(weights @ rows[:, :RANK])
        sums.append(scores.logsumexp(-1))
        sizes.append(weights @ rows[:, :RANK].abs())
    return torch.stack(outputs), torch.stack(sums), torch.stack(sizes)


def check(out, values):
    """Errors against the size of what was summed: FlashMLA rounds scales, decoded values and weights to bf16.

    The same done in torch is 2^-6 away at most, and far more than 1 with scales in another order.
    """
    exact, _, size = values
    out = out.double().cpu()
    assert out.isfinite().all()
    wrong = (out - exact).abs() / size
    assert wrong.max() < 2**-5, (wrong.max().item(), (wrong > 2**-5).float().mean().item())


@pytest.mark.parametrize("width", [pytest.param(128, marks=pytest.mark.quick), 2048])
@pytest.mark.parametrize("heads", [64, 128])
def test_flashmla_decode_reads_them(heads, width):
    """As `DeepseekSparseAttnBackend._forward_flashmla_kv` of SGLang 0.5.23 calls it."""
    pytest.importorskip("flash_mla")
    interface = pytest.importorskip("sglang.kernels.ops.attention.flash_mla_interface")
    hopper()
    pool, slots, values = stored(2500, seed=heads + width)
    counts = [width, 1, 65, width - 1, 64, 7]
    indices = lists(slots, counts, width, seed=1)
    q = torch.randn(len(counts), heads, RANK + ROPE, generator=torch.Generator().manual_seed(2)).bfloat16()
    reference = expected(q, values, indices)
    lengths = torch.tensor(counts, dtype=torch.int32, device="cuda")
    metadata, splits = interface.get_mla_metadata(
        cache_seqlens=lengths,
        num_q_tokens_per_head_k=heads,
        num_heads_k=1,
        num_heads_q=heads,
        is_fp8_kvcache=True,
        topk=width,
    )
    out, lse = interface.flash_mla_with_kvcache(
        q=q.cuda().unsqueeze(1),
        k_cache=pool.view(torch.float8_e4m3fn).view(-1, PAGE, 1, FORMAT.row_bytes),
        cache_seqlens=lengths,
        head_dim_v=RANK,
        tile_scheduler_metadata=metadata,
        num_splits=splits,
        softmax_scale=SCALE,
        indices=indices.cuda().unsqueeze(1),
        block_table=torch.empty((len(counts), 0), dtype=torch.int32, device="cuda"),
        is_fp8_kvcache=True,
        kv_format="V32",
    )
    check(out[:, 0], reference)
    torch.testing.assert_close(lse[..., 0].double().cpu(), reference[1], rtol=0, atol=0.02)


@pytest.mark.quick
def test_sglangs_gather_reads_them():
    """What prefills by flashmla_sparse attend: the reader's values, rounded to bf16 once."""
    module = pytest.importorskip("sglang.kernels.ops.attention.dsa.dequant_k_cache")
    pool, slots, values = stored(700, seed=3)
    rows = pool.view(torch.float8_e4m3fn).view(-1, 1, FORMAT.row_bytes)
    found = module.dequantize_k_cache_paged_dsa(rows, slots.int().cuda())
    exact = values[slots].float().bfloat16()
    torch.testing.assert_close(found.view(-1, RANK + ROPE).cpu(), exact, rtol=2**-7, atol=0)


@pytest.mark.quick
def test_flashmla_prefill_over_gathered_rows():
    """The prefill kernel over gathered rows, with lists of positions instead of slots (RAGGED)."""
    pytest.importorskip("flash_mla")
    interface = pytest.importorskip("sglang.kernels.ops.attention.flash_mla_interface")
    gather = pytest.importorskip("sglang.kernels.ops.attention.dsa.dequant_k_cache")
    hopper()
    pool, slots, values = stored(900, seed=4)
    counts, width = [900, 3, 128, 511], 1024
    places = lists(torch.arange(900), counts, width, seed=5)
    q = torch.randn(len(counts), 64, RANK + ROPE, generator=torch.Generator().manual_seed(6)).bfloat16()
    rows = pool.view(torch.float8_e4m3fn).view(-1, 1, FORMAT.row_bytes)
    out, _, lse = interface.flash_mla_sparse_fwd(
        q=q.cuda(),
        kv=gather.dequantize_k_cache_paged_dsa(rows, slots.int().cuda()),
        indices=places.cuda().unsqueeze(1),
        sm_scale=SCALE,
        d_v=RANK,
        topk_length=torch.tensor(counts, dtype=torch.int32, device="cuda"),
    )
    reference = expected(q, values[slots], places)
    check(out, reference)
    torch.testing.assert_close(lse.double().cpu() * math.log(2), reference[1], rtol=0, atol=0.02)
