"""Decode context parallelism on the device: gloo ranks with SGLang's layer and layers/dcp, and our pool.

`test_dcp_disaggregation.py` has the ranks of prefill and decode servers; here they pack rows on the device.
"""

import os
import sys

import pytest
from codec_oracle import LAYOUTS
from dcp_pairs import check_relayout
from managers import bootstrap, manager_of, no_groups  # noqa: F401  # fixtures
from pools import LAYERS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CODE = """
import sys
sys.path[:0] = {path!r}
from emulated_cuda import dcp_ranks
dcp_ranks.main({rank}, {ranks}, {folder!r}, {merge!r}, {cases!r})
"""

OTHER_LAYOUTS = [
    ("bf16", {"engine": "copy_engine"}),
    ("fp8", {"k_scales": {1: 0.37}, "page_size": 4, "engine": "staged"}),
    ("fp8_block_scale", {"arrangement": "page_major", "page_size": 4}),
    ("fp4_fp8_rope", {"arrangement": "token_major"}),
]


@pytest.mark.parametrize(
    ("ranks", "merge", "cases"),
    [
        pytest.param(2, "ag_rs", [("fp4", {"page_size": 1})], marks=pytest.mark.quick),
        (2, "ag_rs", OTHER_LAYOUTS),
        (4, "a2a", [("fp4", {"arrangement": "page_major"}), ("fp8_block_scale", {"page_size": 1})]),
    ],
    ids=["two", "layouts", "four"],
)
def test_forms_of_attention(on_device, tmp_path, ranks, merge, cases):
    """Each form attends the rows that it should, stored or as computed, on whichever rank they are."""
    processes = []
    for rank in range(ranks):
        values = {"path": sys.path, "ranks": ranks, "folder": str(tmp_path), "merge": merge}
        code = CODE.format(**values, rank=rank, cases=cases)
        output = [tmp_path / f"{name}-{rank}" for name in ("stdout", "stderr")]
        for path in output:
            path.write_bytes(b"")
        environment = {**on_device._environment, "SGLANG_NCCL_SO_PATH": os.devnull}
        command = [sys.executable, "-c", code]
        processes.append(on_device.start(command, environment, *output, tmp_path, children_fork=False))
    statuses = [process.wait(1500) for process in processes]
    ends = [path.read_text()[-3000:] for path in tmp_path.glob("stderr-*")]
    assert statuses == [0] * ranks, "\n".join(ends)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "page", "dcp"), [*((layout, 1, 3) for layout in LAYOUTS), ("fp4", 64, 2), ("fp8", 64, 2)]
)
def test_rows_are_packed_for_the_ranks_of_a_decode_server(
    manager_of, bootstrap, monkeypatch, layout, page, dcp  # noqa: F811
):  # fmt: skip
    """Copies of a chunk from SGLang's buffer, in which its kernel gathers the rows of a rank."""
    args = (layout, page, 1, dcp, dcp, page * dcp)
    tokens, (prefill,) = check_relayout(manager_of, bootstrap, monkeypatch, "cuda", *args)
    packed = [(buffer.get_ptr(), buffer.get_size()) for buffer in prefill._dcp_pack_buffers]
    sent = [size for start, size in prefill.engine.sent if any(0 <= start - at < end for at, end in packed)]
    row_bytes = prefill.kv_args.kv_item_lens[0] // page
    assert sum(sent) == tokens * LAYERS * row_bytes
