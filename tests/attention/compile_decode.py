"""Compiles the kernels of `mla_decode` for sm_90a without a GPU; prints facts about the machine code as JSON.

A program of its own, because Triton must not be in interpreter mode:

    python compile_decode.py '[{"layout": "fp4", "heads": 16}]' [DIR]

DIR receives the machine code to read. ``scripts/figures/attention_facts.py`` imports this module for
``docs/attention.md``.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import warp_roles


def compile_decode(
    layout, heads, rank=512, rope=64, queries=1, ids="*i32", splits=8, page=None, kernel="triton", tile=None
):
    """Compile the decode kernel for `tile` (or its fields), by default the tile of the table for `kernel`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    from sgl_kvpool import MLAKVCacheLayout
    from sgl_kvpool.attention.decode_config import DecodeConfig, TileConfig, tile_config
    from sgl_kvpool.attention.decode_launch import decode_constants, decode_kernel_fn, gluon_constants
    from sgl_kvpool.attention.triton_lists import UNALIGNED
    from sgl_kvpool.memory.arrangement import PageStride

    fmt = MLAKVCacheLayout(layout).row_format(rank, rope)
    tile = tile or tile_config(fmt.layout, heads * queries, kernel)
    tile = TileConfig(*tile) if isinstance(tile, list) else tile
    config = DecodeConfig(tile, -(-heads * queries // tile.query_heads), splits, tile.min_blocks)
    key = fmt, config, heads, queries, PageStride(*page) if page else None
    fn = decode_kernel_fn(tile.kernel)
    if tile.kernel == "triton":
        source, constants = ASTSource, {**decode_constants(*key), "NATIVE": True}
    else:
        source, constants = GluonASTSource, dict(gluon_constants(*key))
    constants |= {"ROW_STRIDE": fmt.row_bytes}
    # The launcher makes a stride of 1 and None constants.
    constants |= {"kv_indices_stride": 1, "lse_head_stride": 1}
    if not rope:
        constants |= {"q_rope_ptr": None}
    signature = dict.fromkeys(fn.arg_names, "i32")
    signature |= dict.fromkeys(["q_ptr", "q_rope_ptr"], "*bf16") | {"rows_ptr": "*u8", "kv_indices_ptr": ids}
    signature |= {"kv_lens_ptr": "*i32", "list_index_ptr": "*i32", "out_ptr": "*bf16"}
    signature |= dict.fromkeys(["lse_ptr", "partial_ptr", "partial_lse_ptr"], "*fp32")
    signature |= dict.fromkeys(["score_scale", "value_scale"], "fp32")
    signature |= dict.fromkeys(constants, "constexpr")
    # Divisibility that the launcher declares for torch's tensors and for the strides of usual models.
    attrs = {
        (fn.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if (kind.startswith("*") and name not in UNALIGNED) or (name.endswith("stride") and kind == "i32")
    }
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile(source(fn, signature, constants, attrs), target=target, options=options)


def compile_merge(layout, heads, rank=512, queries=1, out="*bf16"):
    """Compile `merge_kernel` for the decode of a batch of eight lists."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_kvpool import MLAKVCacheLayout
    from sgl_kvpool.attention.decode_config import decode_config
    from sgl_kvpool.attention.decode_launch import MERGE_WARPS, merge_constants
    from sgl_kvpool.attention.triton_lists import merge_kernel as fn

    fmt = MLAKVCacheLayout(layout).row_format(rank, 64)
    constants = dict(merge_constants(fmt, decode_config(fmt, heads, queries, 8, 100_000), heads, queries))
    constants |= {"NATIVE": True, "lse_head_stride": 1}
    signature = dict.fromkeys(fn.arg_names, "i32") | {"out_ptr": out, "kv_lens_ptr": "*i64"}
    signature |= dict.fromkeys(["partial_ptr", "partial_lse_ptr", "lse_ptr"], "*fp32")
    signature |= {"list_index_ptr": "*i64", **dict.fromkeys(constants, "constexpr")}
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": MERGE_WARPS}
    return compile(ASTSource(fn, signature, constants), target=target, options=options)


def run_tool(name, *arguments, cwd=None):
    """Output of one of the binary utilities that come with Triton."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    return subprocess.check_output([tool, *arguments], text=True, cwd=cwd)


def machine_code(compiled, *options):
    """(SASS by nvdisasm with these options, resource usage) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = run_tool("cuobjdump", "-res-usage", cubin.name)
        return run_tool("nvdisasm", "-c", *options, cubin.name), usage


def facts(compiled, sass, usage):
    """What tests and `scripts/figures/attention_facts.py` read from the code, of nvdisasm -hex."""
    resources = dict(re.findall(r"(REG|STACK):(\d+)", usage))

    def count(pattern):
        return len(re.findall(pattern, sass))

    return {
        "role_registers": warp_roles.role_registers(sass) if "USETMAXREG" in sass else None,
        "target": re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1),
        "threads": int(re.search(r"\.reqntid (\d+)", compiled.asm["ptx"]).group(1)),
        "registers": int(resources["REG"]),
        "stack_bytes": int(resources["STACK"]),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": count(r"\bHGMMA\b"),
        "mma_sync": count(r"\bHMMA\b"),
    }


def main():
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    found = []
    for job in json.loads(sys.argv[1]):
        merge = job.pop("merge", False)
        compiled = compile_merge(**job) if merge else compile_decode(**job)
        sass, usage = machine_code(compiled, "-hex")
        found.append(facts(compiled, sass, usage))
        if len(sys.argv) > 2:
            name = "-".join(str(value).strip("*") for value in job.values())
            with open(os.path.join(sys.argv[2], f"{name}.sass"), "w") as file:
                file.write(sass)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
