"""Decode context parallelism on the device: gloo ranks with SGLang's layer and layers/dcp, and our pool."""

import os
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CODE = """
import sys
sys.path[:0] = {path!r}
from emulated_cuda import dcp_ranks
dcp_ranks.main({rank}, {ranks}, {folder!r}, {merge!r}, {cases!r})
"""


@pytest.mark.parametrize(
    ("ranks", "merge", "cases"),
    [
        pytest.param(2, "ag_rs", [("fp4", {"page_size": 1})], marks=pytest.mark.quick),
        (
            2,
            "ag_rs",
            [
                ("bf16", {"engine": "copy_engine"}),
                ("fp8", {"k_scales": {1: 0.37}, "page_size": 4, "engine": "staged"}),
                ("fp8_block_scale", {"arrangement": "page_major", "page_size": 4}),
                ("fp4_fp8_rope", {"arrangement": "token_major"}),
            ],
        ),
        (4, "a2a", [("fp4", {"arrangement": "page_major"}), ("fp8_block_scale", {"page_size": 1})]),
    ],
    ids=["two", "layouts", "four"],
)
def test_forms_of_attention(on_device, tmp_path, ranks, merge, cases):
    """Each form attends the rows that it should, stored or as computed, on whichever rank they are."""
    processes = []
    for rank in range(ranks):
        code = CODE.format(
            path=sys.path, rank=rank, ranks=ranks, folder=str(tmp_path), merge=merge, cases=cases
        )
        output = [tmp_path / f"{name}-{rank}" for name in ("stdout", "stderr")]
        for path in output:
            path.write_bytes(b"")
        environment = {**on_device._environment, "SGLANG_NCCL_SO_PATH": os.devnull}
        processes.append(
            on_device.start([sys.executable, "-c", code], environment, *output, tmp_path, children_fork=False)
        )
    statuses = [process.wait(1500) for process in processes]
    assert statuses == [0] * ranks, "\n".join(
        (tmp_path / f"stderr-{rank}").read_text()[-3000:] for rank in range(ranks)
    )
