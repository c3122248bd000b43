"""--enable-hierarchical-cache with a layout: SGLang's own resolution on a CPU, our check for any device."""

from types import SimpleNamespace

import pytest
from codec_oracle import LAYOUTS, PACKED
from pools import ARRANGEMENTS
from refused import SHORT
from sglang.srt.arg_groups.overrides import resolving_view as view

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin.options import KVPoolConfig
from sgl_kvpool.sglang_plugin.rules import host_tier
from sgl_kvpool.sglang_plugin.server import Server

HICACHE = "--enable-hierarchical-cache"


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_arrangement_on_the_cpu(arranged, layout, arrangement):
    found = view(arranged(arrangement, HICACHE, layout=layout))
    assert found.page_size == 64
    assert (found.hicache_mem_layout, found.hicache_io_backend) == ("page_first", "kernel")


@pytest.mark.parametrize("sharing", [(), ("--kv-host-sharing", "rank")])
@pytest.mark.parametrize("store", ["file", "mooncake"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"secret": ', "JSONDecodeError: Expecting value: line 1"),
        ('["secret"]', "TypeError: "),
        ('"secret"', "AttributeError: "),
        ('{"prefetch_threshold": "secret"}', "ValueError: prefetch_threshold must be int, got str"),
        ("@nowhere.json", "FileNotFoundError: .*nowhere.json"),
        ("@store.yaml", "ScannerError: "),
    ],
)
def test_a_store_that_sglang_cannot_read(arranged, tmp_path, monkeypatch, text, reason, store, sharing):
    """The schedulers would end with its configuration, whose values may be keys, which are not shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store.yaml").write_text("key: 'secret")
    given = ("--hicache-storage-backend", store, "--hicache-storage-backend-extra-config", text)
    flag = "--hicache-storage-backend-extra-config cannot be read"
    said = rf"(?s)^{flag} \({reason}.*; give a JSON object, or @ and"
    with pytest.raises(ValueError, match=said) as refused:
        arranged(None, HICACHE, *given, *sharing)
    assert "secret" not in str(refused.value)
    assert arranged(None, HICACHE, *given[2:])  # SGLang reads it with a store only


def test_without_a_host_tier_or_without_a_layout_the_page_size_is_sglangs(arranged, resolve, checkpoints):
    assert view(arranged(None)).page_size == 1
    assert view(resolve(checkpoints["mla"], HICACHE)).page_size == 1


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        *(
            ("--hicache-ratio", bad, f"{float(bad)} is not a valid number")
            for bad in ("0", "-2", "nan", "inf")
        ),
        ("--hicache-size", "-3", "-3 is not a valid number of GB"),
    ],
)
def test_invalid_numbers_are_refused(arranged, flag, value, text):
    with pytest.raises(ValueError, match=f"^{flag} {text}"):
        arranged(None, HICACHE, flag, value, layout="fp4")


def test_a_size_makes_the_ratio_unimportant(arranged):
    found = view(arranged(None, HICACHE, "--hicache-size", "3", "--hicache-ratio", "0", layout="fp4"))
    assert (found.hicache_size, found.hicache_ratio) == (3, 0)
    assert (found.page_size, found.hicache_mem_layout) == (64, "page_first")


OFFLOAD = ("--disaggregation-mode", "decode", *SHORT["OFFLOAD"])


def test_a_decode_server_that_offloads_has_a_tier(arranged):
    """Its pages have the size of those that its prefill server puts into the store."""
    found = view(arranged(None, *OFFLOAD, layout="fp4"))
    assert found.page_size == 64
    assert (found.hicache_mem_layout, found.hicache_io_backend) == ("page_first", "kernel")
    text = "^--hicache-mem-layout layer_first does not work with --kv-cache-layout fp4"
    with pytest.raises(ValueError, match=text):
        arranged(None, *OFFLOAD, "--hicache-mem-layout", "layer_first", layout="fp4")


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sglangs_own_tier_on_a_gpu_takes_its_own_rows(arranged, layout, arrangement):
    """SGLang's tier accepts a label that ours refuses, and is used unless ours is needed or requested."""
    label = (HICACHE, "--hicache-mem-layout", "layer_first")
    arranged(arrangement, HICACHE, layout=layout, device="cuda")
    ours = [()]
    if layout not in PACKED and arrangement == "layer_major":
        arranged(arrangement, *label, layout=layout, device="cuda")
        ours = [("--kv-host-engine", "staged"), ("--kv-host-layout", "fp4")]
    for asked in ours:
        with pytest.raises(ValueError, match="^--hicache-mem-layout layer_first does not work"):
            arranged(arrangement, *label, *asked, layout=layout, device="cuda")


def test_engines_and_devices(arranged):
    for engine in ("staged", "copy_engine", "kernel"):
        arranged(None, HICACHE, "--kv-host-engine", engine, layout="fp4", device="cuda")
        text = f"^--kv-host-engine {engine} does not work on cpu; leave it out, or use cpu$"
        with pytest.raises(ValueError, match=text):
            arranged(None, HICACHE, "--kv-host-engine", engine, layout="fp4")
    arranged(None, HICACHE, "--kv-host-engine", "cpu", layout="fp4")
    # SGLang resolves nothing for an XPU on this machine.
    for on, flag in ((True, HICACHE), (False, "--disaggregation-decode-enable-offload-kvcache")):
        view = SimpleNamespace(enable_hierarchical_cache=on, device="xpu")
        server = Server(None, view=view, config=KVPoolConfig(layout=MLAKVCacheLayout.FP4))
        with pytest.raises(ValueError, match=f"^{flag} does not work with --kv-cache-layout fp4 on xpu"):
            host_tier.check_host_tier(server)
