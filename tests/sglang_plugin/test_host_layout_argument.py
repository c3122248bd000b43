"""`--kv-host-layout` and `--kv-host-engine`: the ways to request them, and what is refused."""

import pytest
from codec_oracle import HOST_LAYOUTS, ROW_BYTES

from sgl_kvpool.sglang_plugin.hooks.launching import layout_info
from sgl_kvpool.sglang_plugin.options import config_of

HICACHE = "--enable-hierarchical-cache"


def options(args):
    found = config_of(args).host_tier
    return found.layout, found.engine


@pytest.mark.parametrize("host", ["same", *HOST_LAYOUTS])
@pytest.mark.parametrize("layout", ROW_BYTES)
def test_narrower_or_the_same_and_nothing_else(arranged, layout, host):
    narrower = host in ("same", layout) or ROW_BYTES[host] < ROW_BYTES[layout]
    if narrower:
        assert options(arranged(None, HICACHE, "--kv-host-layout", host, layout=layout)) == (host, "auto")
        return
    able = ["same", *(h for h in HOST_LAYOUTS if ROW_BYTES[h] < ROW_BYTES[layout])]
    remedy = "use same" if len(able) == 1 else f"use one of: {', '.join(able)}"
    text = (
        f"^--kv-host-layout {host} does not work: its rows have {ROW_BYTES[host]} bytes, those of layout "
        f"{layout} on the device {ROW_BYTES[layout]}: .*; {remedy}$"
    )
    with pytest.raises(ValueError, match=text):
        arranged(None, HICACHE, "--kv-host-layout", host, layout=layout)


@pytest.mark.parametrize(("name", "value"), [("layout", "fp4"), ("engine", "cpu")])
def test_they_need_a_layout_and_a_host_tier(arranged, resolve, checkpoints, monkeypatch, name, value):
    flag, variable = f"--kv-host-{name}", f"KVPOOL_KV_HOST_{name.upper()}"
    text = rf"^{flag} {value} \(or {variable}\) does nothing without --enable-hierarchical-cache; add that"
    with pytest.raises(ValueError, match=text):
        arranged(None, flag, value, layout="bf16")
    text = rf"^{flag} {value} \(or {variable}\) applies to pools of sgl-kvpool.*add --kv-cache-layout bf16"
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], HICACHE, flag, value)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=text):
        resolve(checkpoints["mla"], HICACHE)


def test_what_the_server_says_of_itself(arranged):
    args = arranged(None, HICACHE, "--kv-host-layout", "fp4", layout="bf16")
    assert layout_info(args)["kv_host_layout"] == "fp4"
    assert layout_info(arranged(None, HICACHE, layout="fp8"))["kv_host_layout"] == "fp8"
    assert "kv_host_layout" not in layout_info(arranged(None, layout="fp8"))


def test_rows_of_sparse_models_that_are_not_converted(serve):
    """264 is not a multiple of the bytes that conversions load at once."""
    argv = (HICACHE, "--kv-host-layout", "fp4")
    for model, layout in (("dsa", "fp8_block_scale"), ("dsa-rank256", "bf16")):
        assert serve(model, layout, *argv).enable_hierarchical_cache
    text = "--kv-host-layout fp4 does not work: .*264: .*multiple of 16 bytes.*; use same$"
    with pytest.raises(ValueError, match=text):
        serve("dsa-rank256", "fp8_block_scale", *argv)
