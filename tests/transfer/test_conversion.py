"""Rows in another format on the host: compiled arithmetic and plans against the codec."""

import itertools

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from cases import crossed
from codec_oracle import ROW_BYTES
from host_tier import backup, host_bytes, host_pool, load, stride_bytes
from pools import ARRANGEMENTS, GUARD, LAYERS, device_pool, rows

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.codec import encode_rows
from sgl_kvpool.layout import Encoding, RowFormat
from sgl_kvpool.transfer.conversion import RowConversion, narrower_layouts
from sgl_kvpool.transfer.host_options import HOST_LAYOUTS, HostTierOptions

#: Device and host layout; bytes of R=512, P=64 by hand.
NARROWER = [
    (device, host)
    for device, host in itertools.product(ROW_BYTES, oracle.HOST_LAYOUTS)
    if ROW_BYTES[host] < ROW_BYTES[device]
]
PLACED = list(itertools.product(ARRANGEMENTS, [1, 61, 64]))
GEOMETRIES = [(512, 64), (128, 64), (256, 0), (384, 64)]


def formats(device, host, rank=512, rope=64) -> tuple[RowFormat, RowFormat]:
    return tuple(MLAKVCacheLayout(name).row_format(rank, rope) for name in (device, host))


def converted(conversion, source, threads=1):
    """Rows after the compiled conversion, in one page; bytes between the rows are 0xEE and stay so."""
    from sgl_kvpool.transfer.cpu_engine import _module

    count, gaps = len(source), (32, 48)
    wide = [
        torch.full((count, fmt.row_bytes + gap), GUARD, dtype=torch.uint8)
        for fmt, gap in zip((conversion.source, conversion.target), gaps, strict=True)
    ]
    wide[0][:, : source.shape[1]] = source
    run = [
        *(wide[0].data_ptr(), wide[1].data_ptr(), 0, 0),
        *(source.shape[1], count, wide[0].stride(0), wide[1].stride(0)),
    ]
    none = torch.zeros(1, dtype=torch.int64)
    kinds = conversion.row_layouts()
    k_scales = torch.tensor(conversion.k_scales, dtype=torch.float32)
    _module().convert_pages(torch.tensor([run]), none, none, *kinds, k_scales, threads)
    assert (wide[1][:, conversion.target.row_bytes :] == GUARD).all()
    assert (wide[0][:, source.shape[1] :] == GUARD).all()
    return wide[1][:, : conversion.target.row_bytes]


def check(device, host, values, k_scale=1.0):
    """Compare the compiled conversion with torch's, both ways; `values` are bf16 `[tokens, R + P]`."""
    rank = device.kv_lora_rank
    stored = encode_rows(values[:, :rank], values[:, rank:], device, k_scale=k_scale)
    there = RowConversion(source=device, target=host, k_scales=(k_scale,))
    narrow = there.convert(stored, 0)
    assert torch.equal(converted(there, stored), narrow)
    back = there.reversed()
    assert torch.equal(converted(back, narrow), back.convert(narrow, 0))
    return stored, narrow


@pytest.mark.parametrize(
    ("device", "host", "geometry"),
    [
        (*pair, geometry)
        for pair, geometry in itertools.product(NARROWER, GEOMETRIES)
        # Without rope a row with scales may be longer than one of fp8.
        if MLAKVCacheLayout(pair[1]) in narrower_layouts(MLAKVCacheLayout(pair[0]).row_format(*geometry))
    ],
)
def test_compiled_rows_are_the_codecs_bytes(device, host, geometry):
    """Values of all sizes, among them rows of a single value, zeros and signed zeros."""
    generator = torch.Generator().manual_seed(0)
    own, other = formats(device, host, *geometry)
    values = torch.randn(400, sum(geometry), generator=generator)
    values *= torch.exp2(torch.randint(-40, 40, (400, 1), generator=generator).float())
    values[7:11] = torch.tensor([0.0, -0.0, 1e-38, -3e-39]).unsqueeze(1)
    values[:, 3::5] = 0
    for k_scale in (1.0, 0.3718) if device == "fp8" else (1.0,):
        check(own, other, values.bfloat16(), k_scale)


@pytest.mark.parametrize("rank", [128, 512])  # behind a latent of 128 a rope begins at byte 72 of fp4 rows
@pytest.mark.parametrize("device", ["bf16", "fp8", "fp8_block_scale"])
def test_either_side_has_its_own_encoding_and_divisor_of_the_rope(device, rank):
    values = torch.randn(50, rank + 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    own, narrow = formats(device, "fp4_fp8_rope", rank)
    assert narrow.row_bytes == {128: 144, 512: 352}[rank]
    for k_scale in (1.0, 0.5):
        _, stored = check(own, narrow, values, k_scale)
        of_rope = values[:, rank:].float()
        if device == "fp8":  # whose rope has been rounded before
            of_rope = (of_rope / k_scale).to(torch.float8_e4m3fn).float() * k_scale
        codes = stored[:, narrow.rope.offset_bytes : narrow.rope.end_bytes].view(torch.float8_e4m3fn)
        assert torch.equal(codes.float(), of_rope.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("rank", [128, 512])
def test_a_latent_that_both_sides_store_alike_keeps_its_bytes(rank):
    """Also bytes that no encoder chooses: 4 under a scale of 1.5 is 6 under 1, which is tried first."""
    own = MLAKVCacheLayout.FP4.row_format(rank, 64)
    other = own.in_layout(MLAKVCacheLayout.FP4_NOPE_FP8_ROPE)
    generator = torch.Generator().manual_seed(5)
    rows_ = torch.randint(0, 256, (200, own.row_bytes), generator=generator).to(torch.uint8)
    rows_[0, : own.scale.end_bytes] = 0
    rows_[0, 0], rows_[0, own.scale.offset_bytes] = 6, 0x7C
    rope = torch.randn(200, 64, generator=generator).bfloat16()
    rows_[:, own.rope.offset_bytes : own.rope.end_bytes] = rope.view(torch.uint8)
    rows_[:, own.payload_bytes :] = 0
    there = RowConversion(source=own, target=other, k_scales=(1.0,))
    narrow = converted(there, rows_)
    assert torch.equal(narrow, there.convert(rows_, 0))
    latent = slice(0, own.scale.end_bytes)
    assert torch.equal(narrow[:, latent], rows_[:, latent])
    codes = narrow[:, other.rope.offset_bytes : other.rope.end_bytes]
    assert torch.equal(codes, rope.to(torch.float8_e4m3fn).view(torch.uint8))
    back = converted(there.reversed(), narrow)
    assert torch.equal(back, there.reversed().convert(narrow, 0))
    assert torch.equal(back[:, latent], rows_[:, latent])


@pytest.mark.parametrize(("device", "host"), [pair for pair in NARROWER if pair[0] == "bf16"])
def test_every_bf16_pattern(device, host):
    """NaN with its payloads, infinities and subnormals: in a rope of bf16 they keep their bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    shuffled = patterns[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    own, other = formats(device, host)
    for values in (patterns, shuffled):
        rope = shuffled[: 128 * 64].view(128, 64)
        stored, narrow = check(own, other, torch.cat([values.view(128, 512), rope], dim=1))
        if other.rope.encoding is Encoding.BF16:
            assert torch.equal(narrow[:, other.rope.offset_bytes :], stored[:, own.rope.offset_bytes :])


def without_nan(codes):
    """Replace e4m3 codes of NaN, which no encoder stores, by 0, in place."""
    codes[(codes & 0x7F) == 0x7F] = 0


@pytest.mark.parametrize(("device", "host"), NARROWER)
def test_host_rows_of_every_code_are_converted_as_by_torch(device, host):
    """All codes with many scales, as host rows may hold them, converted to the device's layout."""
    own, other = formats(device, host)
    generator = torch.Generator().manual_seed(2)
    narrow = torch.randint(0, 256, (300, other.row_bytes), generator=generator).to(torch.uint8)
    if other.scale.encoding is Encoding.UE5M3:
        scale = narrow[:, other.scale.offset_bytes : other.scale.end_bytes]
        scale.clamp_(max=0xF7)  # no encoder stores more: infinity and NaN as fp16
    else:
        without_nan(narrow[:, : other.nope.size_bytes])
        scales = torch.exp2(torch.randint(-60, 60, (300, 4), generator=generator).float())
        narrow[:, other.scale.offset_bytes : other.scale.end_bytes] = scales.view(torch.uint8)
    if other.rope.encoding is Encoding.E4M3:
        without_nan(narrow[:, other.rope.offset_bytes : other.rope.end_bytes])
    back = RowConversion(source=other, target=own, k_scales=(1.0,))
    assert torch.equal(converted(back, narrow), back.convert(narrow, 0))


@pytest.mark.parametrize(("pair", "placed"), crossed(NARROWER, PLACED))
def test_there_and_back_through_a_tier(no_reserve, pair, placed):
    """Host pages hold the codec's bytes of the device's rows, device pages what those decode to."""
    (device, host), (arrangement, page_size) = pair, placed
    k_scales = {5: 0.5, 6: 1.0, 7: 3.25} if device == "fp8" else {}
    options = HostTierOptions(layout=host)
    pool = device_pool(device, arrangement, page_size, host_tier=options, k_scales=k_scales)
    generator = torch.Generator().manual_seed(page_size)
    own, other = formats(device, host)
    scales = [k_scales.get(5 + number, 1.0) for number in range(LAYERS)]
    for layer, scale in zip(rows(pool), scales, strict=True):
        values = torch.randn(layer.shape[0] * page_size, 576, generator=generator).bfloat16()
        layer[...] = encode_rows(values[:, :512], values[:, 512:], own, k_scale=scale).view(layer.shape)
    tier = host_pool(pool)
    assert tier.get_size_per_token() * page_size == stride_bytes(LAYERS, page_size, ROW_BYTES[host])
    assert tier.page_bytes == LAYERS * ROW_BYTES[host] * page_size
    before, guard = [layer.copy() for layer in rows(pool)], host_bytes(tier).copy()

    backup(tier, [3, 0, 2], [1, 4, 2])
    there = [RowConversion(source=own, target=other, k_scales=(scale,)) for scale in scales]
    expected = guard
    for i, layer in enumerate(before):
        taken = torch.from_numpy(layer[[1, 4, 2]].reshape(-1, own.row_bytes))
        expected[[3, 0, 2], i] = there[i].convert(taken, 0).view(3, page_size, -1).numpy()
    assert np.array_equal(host_bytes(tier), expected)
    assert all(np.array_equal(a, b) for a, b in zip(before, rows(pool), strict=True))

    load(tier, [0, 3], [2, 3])
    for i, layer in enumerate(before):
        narrow = torch.from_numpy(expected[[0, 3], i].reshape(-1, other.row_bytes))
        layer[[2, 3]] = there[i].reversed().convert(narrow, 0).view(2, page_size, -1).numpy()
    assert all(np.array_equal(a, b) for a, b in zip(before, rows(pool), strict=True))
    assert np.array_equal(host_bytes(tier), expected)


@pytest.mark.parametrize(("device", "host"), NARROWER)
def test_torch_makes_the_same_of_a_transfer_that_failed(no_reserve, failures, caplog, device, host):
    pool = device_pool(device, host_tier=HostTierOptions(layout=host))
    own, _ = formats(device, host)
    for layer in rows(pool):
        layer[...] = encode_rows(torch.randn(20, 512), torch.randn(20, 64), own).view(layer.shape)
    tier = host_pool(pool)
    backup(tier, [3, 1], [4, 2])
    good = host_bytes(tier).copy()

    def fails(*arguments):
        raise OSError(5, "broken on purpose")

    for channel in (*tier._channels.to_host, *tier._channels.to_device):
        channel.engine.copy = fails
    host_bytes(tier)[...] = GUARD
    backup(tier, [3, 1], [4, 2])
    assert np.array_equal(host_bytes(tier), good)
    load(tier, [3], [1])
    again = device_pool(device, host_tier=HostTierOptions(layout=host))
    other = host_pool(again)
    host_bytes(other)[...] = good
    load(other, [3], [1])
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(rows(pool), rows(again), strict=True))
    assert failures() == {"backup": 1, "load": LAYERS}
    assert "broken on purpose" in caplog.text


def test_what_is_not_narrower_is_refused(no_reserve):
    """tests/sglang_plugin has every pair."""
    assert ("same", *oracle.HOST_LAYOUTS) == HOST_LAYOUTS
    assert "fp8" not in HOST_LAYOUTS  # its bytes depend on the layer's k_scale
    with pytest.raises(ValueError, match="--kv-host-layout fp8_block_scale does not work: its rows have 656"):
        host_pool(device_pool("fp4", host_tier=HostTierOptions(layout="fp8_block_scale")))


def test_plans_that_cannot_convert():
    from test_plan import side

    from sgl_kvpool.transfer.plan import TransferPlan

    own, other = formats("bf16", "fp4")
    pair = RowConversion(source=own, target=other, k_scales=(1.0,) * 3)

    def plan(conversion=pair, tokens=(4, 4), row=(1152, 416)):
        source = side("layer_major", 0, tokens=tokens[0], row=row[0])[0]
        target = side("page_major", 0, tokens=tokens[1], row=row[1], content="others")[0]
        return TransferPlan(source, target, "kv", conversion)

    assert plan().bytes_per_page() == 3 * 4 * 416
    assert plan().bytes_per_page(1) == 4 * 416
    with pytest.raises(ValueError, match="or the meaning of their bytes"):
        plan(None)
    with pytest.raises(ValueError, match="2 k_scales for 3 layers of group kv"):
        plan(RowConversion(source=own, target=other, k_scales=(1.0,) * 2))
    with pytest.raises(ValueError, match="the layers of group kv differ"):
        plan(tokens=(4, 2), row=(1152, 832))
    not_rows = "has 4624 bytes in a page of 4 tokens, which are not rows of format bf16-r512"
    with pytest.raises(ValueError, match=not_rows):
        plan(row=(1156, 416))


def test_rows_that_begin_anywhere_are_not_converted():
    from test_plan import side

    from sgl_kvpool.transfer.plan import TransferPlan

    own = MLAKVCacheLayout.BF16.row_format(128, 0)
    other = MLAKVCacheLayout.FP4.row_format(128, 0, align_bytes=1)
    assert other.row_bytes == 72
    pair = RowConversion(source=own, target=other, k_scales=(1.0,) * 3)
    with pytest.raises(ValueError, match="do not all begin at a multiple of 16 bytes.*--kv-host-layout same"):
        TransferPlan(side("layer_major", 0, row=256)[0], side("page_major", 0, row=72)[0], "kv", pair)


def test_a_host_tier_looks_for_no_nan(monkeypatch):
    """Torch stores the same bytes as the engines, even where encoders are set to raise for NaN."""
    monkeypatch.setenv("KVPOOL_CHECK_FINITE", "1")
    own, other = formats("bf16", "fp4")
    rows_ = torch.randn(4, 576).bfloat16()
    rows_[1, 7], rows_[2, 500], rows_[3, 570] = float("nan"), float("-inf"), float("nan")
    rows_ = rows_.view(torch.uint8)
    there = RowConversion(source=own, target=other, k_scales=(1.0,))
    assert torch.equal(converted(there, rows_), there.convert(rows_, 0))
    own, _ = formats("fp8", "fp4")
    back = RowConversion(source=other, target=own, k_scales=(0.5,))
    narrow = there.convert(rows_, 0)
    assert torch.equal(converted(back, narrow), back.convert(narrow, 0))
