"""Cases of `mla_decode` and their expected results: float64 numpy on rows that `codec_oracle` decodes."""

from dataclasses import dataclass, field, replace

import codec_oracle as oracle
import numpy as np
import torch

from sgl_kvpool.memory.arrangement import KVArrangement, RowPlacement

LAYERS, LAYER = 3, 1
#: Weights are rounded to bfloat16, whose unit roundoff is 2**-8, and nothing else is rounded that coarsely:
#: e4m3, e2m1 times ue5m3 and the queries are exact in bfloat16, sums are float32. So the error of a result is
#: at most 2**-8 times the weighted sum of the magnitudes of its values; 1 % more allows for float32.
WEIGHT_ROUNDING = 2**-8 * 1.01
#: Scores are sums of up to 576 float32 products here, of magnitudes up to about 10.
LSE_TOLERANCE = 2e-5


@dataclass
class Case:
    """Arguments of `mla_decode`, and the values of the rows it may read."""

    layout: str
    fmt: object
    q: torch.Tensor
    pool: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    values: np.ndarray  # float32 [slots, R + P], decoded by the oracle; NaN where a slot holds nothing
    scale: float = 0.06
    k_scale: float = 1.0
    list_index: torch.Tensor | None = None
    queries_per_list: int = 1
    page: tuple[int, ...] | None = None
    options: dict = field(default_factory=dict)

    def but(self, **changes):
        return replace(self, **changes)

    @property
    def arguments(self):
        """Positional and keyword arguments of `mla_decode`."""
        positional = (self.q, self.pool, self.kv_indices, self.kv_lens, self.fmt, self.scale, self.k_scale)
        keywords = {name: getattr(self, name) for name in ("list_index", "queries_per_list", "page")}
        return positional, {**keywords, **self.options}

    def of_rank(self, rank, ranks):
        """The same rows as the part of one rank of decode context parallelism, in lists of all slots."""
        lists, width = self.kv_indices.shape
        table = torch.full((lists, width * ranks), 2**30, dtype=self.kv_indices.dtype)
        slots = self.kv_indices.long()
        table[:, rank::ranks] = torch.where(slots < 0, slots, slots * ranks + rank).to(table.dtype)
        page = (*(self.page or (1, 1)), ranks)
        return self.but(kv_indices=table[:, rank::ranks], page=page)

    def to(self, device):
        moved = {
            name: value.to(device)
            for name in ("q", "kv_indices", "kv_lens", "list_index")
            if (value := getattr(self, name)) is not None
        }
        # Move the pool with the bytes between its rows, and keep its strides.
        whole = torch.empty(0, dtype=torch.uint8).set_(self.pool.untyped_storage()).to(device)
        moved["pool"] = whole.as_strided(self.pool.shape, self.pool.stride(), self.pool.storage_offset())
        return self.but(**moved)


def make_case(
    layout, *, rank=512, rope=64, heads=8, counts=((70,), (131,)), width=150, slots=None,
    arrangement="layer_major", page_size=4, ids=torch.int32, dtype=torch.bfloat16, k_scale=1.0, fill=0xFF,
    holes=True, seed=0,
):  # fmt: skip
    """Lists of random slots; what no list refers to holds NaN bytes, entries beyond a count are garbage.

    counts : one tuple per list, one number of rows per query of the list
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    lists, queries = len(counts), len(counts[0])
    longest = [min(max(0, *group), width) for group in counts]
    slots = slots or -(-(sum(longest) + 9) // page_size) * page_size
    fmt = oracle.row_format(layout, rank, rope)
    placement = RowPlacement(KVArrangement(arrangement), LAYERS, slots // page_size, page_size, fmt.row_bytes)
    buffer = torch.full((placement.total_bytes,), fill, dtype=torch.uint8)
    pool = placement.layer_view(buffer, LAYER)
    kv_indices = np.empty((lists, width), np.int64)
    # Beyond the count: unused slots, slots outside the pool, arbitrary numbers.
    kv_indices[:] = random.choice([0, slots - 1, slots + 5, 2**31 - 1, -(2**31)], (lists, width))
    used = random.permutation(np.arange(1, slots))[: sum(longest)]
    done = 0
    for i, length in enumerate(longest):
        kv_indices[i, :length] = used[done : done + length]
        done += length
        if holes and length > 5:
            kv_indices[i, random.integers(0, length, 3)] = -1
            kv_indices[i, length - 1] = -7
    used = used if len(used) else np.array([1])  # the oracle's encoder wants a row
    nope = torch.randn(len(used), rank, dtype=torch.bfloat16) * torch.rand(len(used), 1).bfloat16() * 2
    keys = torch.randn(len(used), rope, dtype=torch.bfloat16)
    rows = oracle.encode(nope, keys if rope else None, layout, rank, rope, fmt.row_bytes, k_scale)
    places = placement.slot_to_row(torch.from_numpy(used))
    pool[places] = torch.from_numpy(rows)
    values = np.full((slots, rank + rope), np.nan, np.float32)
    values[used] = oracle.decode(rows, layout, rank, rope, k_scale)
    return Case(
        layout,
        fmt,
        torch.randn(lists * queries, heads, rank + rope).to(dtype),
        pool,
        torch.from_numpy(kv_indices).to(ids),
        torch.tensor(counts, dtype=ids).flatten(),
        values,
        k_scale=k_scale,
        queries_per_list=queries,
        page=None if placement.slots_are_rows else (page_size, placement.row_of_slot(page_size)),
    )


def expected(case):
    """Result, lse and the weighted sums of magnitudes, float64 [T, H, R], [T, H] and [T, H, R]."""
    tokens, heads, _ = case.q.shape
    rank = case.fmt.kv_lora_rank
    out, size = np.zeros((2, tokens, heads, rank))
    lse = np.full((tokens, heads), -np.inf)
    q = case.q.double().numpy()
    for token in range(tokens):
        group = token // case.queries_per_list
        chosen = group if case.list_index is None else int(case.list_index[group])
        if not 0 <= chosen < len(case.kv_indices):
            continue
        slots = case.kv_indices[chosen, : max(int(case.kv_lens[token]), 0)].numpy()
        slots = slots // (*(case.page or (1, 1)), 1)[2]
        seen = case.values[slots[(slots >= 0) & (slots < len(case.values))]].astype(np.float64)
        if not len(seen):
            continue
        assert not np.isnan(seen).any(), "the case refers to a slot that holds nothing"
        scores = q[token] @ seen.T * case.scale  # [heads, rows]
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        lse[token] = (top + np.log(total))[:, 0]
        out[token] = (weights / total) @ seen[:, :rank]
        size[token] = (weights / total) @ np.abs(seen[:, :rank])
    return out, lse, size


def roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def check(found, case, rounding=WEIGHT_ROUNDING):
    """Assert that `found`, (out, lse), is within the tolerances of the oracle."""
    out, lse, size = expected(case)
    found_out, found_lse = (tensor.cpu().double().numpy() for tensor in found)
    limit = size * (rounding + 3 * LSE_TOLERANCE) + np.abs(out) * roundoff(found[0].dtype) * 1.02
    assert not np.isnan(found_out).any()
    wrong = np.abs(found_out - out) > limit
    assert not wrong.any(), (wrong.sum(), np.argwhere(wrong)[0], np.abs(found_out - out).max(), size.max())
    np.testing.assert_array_equal(np.isinf(found_lse), np.isinf(lse))
    finite = np.isfinite(lse)
    assert (found_lse[~finite] < 0).all()
    np.testing.assert_allclose(found_lse[finite], lse[finite], rtol=2e-6, atol=LSE_TOLERANCE)


def as_read(case, tile):
    """The case with the values that a tile multiplies: `gluon_wide` rounds those with tile scales."""
    if (tile.kernel, case.layout) != ("gluon_wide", "fp8_block_scale"):
        return case
    return case.but(values=torch.from_numpy(case.values).bfloat16().float().numpy())


def every_code(layout):
    """(format, pool [256, row_bytes], values [256, 512]): rows of every code with many scales, without rope.

    Without e4m3's NaN codes, which no encoder writes.
    """
    fmt = oracle.row_format(layout, 512, 0)
    count = 256
    pool = torch.zeros(count, fmt.row_bytes, dtype=torch.uint8)
    codes = torch.arange(count)[:, None] + torch.arange(fmt.nope.size_bytes)[None, :]
    codes = (codes % 256).to(torch.uint8)
    latent = oracle.STORED[layout][0]
    if latent != "e2m1":
        codes = torch.where(codes % 128 == 127, 0, codes)
    pool[:, : fmt.nope.size_bytes] = codes
    if latent == "e2m1":
        scales = (torch.arange(count)[:, None] * 7 + torch.arange(fmt.scale.count)[None, :]) % 0xF8
        pool[:, fmt.scale.offset_bytes : fmt.scale.end_bytes] = scales.to(torch.uint8)
    elif latent == "e4m3 in tiles":
        scales = torch.exp2(torch.arange(count * 4).float() % 40 - 20).view(count, 4)  # exact in bfloat16
        pool[:, fmt.scale.offset_bytes : fmt.scale.end_bytes] = scales.view(torch.uint8)
    values = torch.from_numpy(oracle.decode(pool.numpy(), layout, 512, 0))
    return fmt, pool, values


def check_parts(case, run, splits, block_rows):
    """Lists that fit one part write no partial results; of other lists, every part with rows writes them."""
    tokens, heads, rank = len(case.kv_lens), case.q.shape[1], case.fmt.kv_lora_rank
    partial = torch.empty(splits * tokens * heads * (rank + 1))
    check(run(case, splits, partial=partial), case)
    written = ~partial[: splits * tokens * heads * rank].view(splits, tokens, heads, rank).isnan()
    for token, count in enumerate(case.kv_lens.tolist()):
        blocks = -(-count // block_rows)
        per_part = max(1, -(-blocks // splits))
        parts = -(-blocks // per_part)
        expected = torch.arange(splits)[:, None, None] < (parts if parts > 1 else 0)
        assert torch.equal(written[:, token], expected.expand(splits, heads, rank)), count
