"""Compiles the codec kernels for sm_90a without a GPU; prints facts about the machine code as JSON.

A program of its own, because Triton must not be in interpreter mode:

    python compile_kernels.py '[{"layout": "fp4", "which": "store", "rank": 512, "rope": 0}]' [DIR]

DIR receives the machine code to read.
"""

import json
import os
import re
import subprocess
import sys
import tempfile


def run_tool(name, *arguments, cwd=None):
    """Output of one of the binary utilities that come with Triton."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    command = [tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def compile_kernel(layout, which, rank, rope, dtype="bf16", slots="*i64", aligned=True):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sgl_kvpool import MLAKVCacheLayout
    from sgl_kvpool.codec import triton as codec

    fmt = MLAKVCacheLayout(layout).row_format(rank, rope)
    store = which == "store"
    fn = codec.store_kernel if store else codec.gather_kernel
    tokens = codec._STORE_TOKENS if store else codec._GATHER_TOKENS
    constants = {**codec.geometry(fmt), "TOKENS": tokens, "NATIVE": True}
    signature = {
        "rows_ptr": "*u8",
        "slots_ptr": slots or "constexpr",
        "nope_ptr": f"*{dtype}",
        "rope_ptr": f"*{dtype}" if rope else "constexpr",
        "tokens": "i32",
        "row_count": "i32",
        "row_stride": "i32",
        "slots_stride": "constexpr",
        "nope_stride": "i32",
        "rope_stride": "i32",
        "k_scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    constants["slots_stride"] = 1  # the launcher makes a stride of 1 and None constants
    constants |= {} if slots else {"slots_ptr": None}
    constants |= {} if rope else {"rope_ptr": None}
    # Divisibility by 16 that the launcher declares for torch's tensors and the row strides in use.
    multiples = ["rows_ptr", "slots_ptr", "nope_ptr", "rope_ptr"]
    multiples += ["row_stride", "nope_stride", "rope_stride"]
    attrs = {
        (fn.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in multiples
        if aligned and signature[name] != "constexpr"
    }
    return compile(
        ASTSource(fn, signature, constants, attrs),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": codec._WARPS, "enable_fp_fusion": False},
    )


def machine_code(compiled, *options):
    """(SASS by nvdisasm with these options, resource usage) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return run_tool("nvdisasm", "-c", *options, cubin.name), run_tool(
            "cuobjdump", "-res-usage", cubin.name
        )


def facts(compiled, sass, usage):
    ptx = compiled.asm["ptx"]
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))

    def in_sass(pattern):
        return len(re.findall(pattern, sass))

    def in_ptx(pattern):
        return len(re.findall(pattern, ptx))

    return {
        "target": re.search(r"\.target (\w+)", ptx).group(1),
        "registers": int(resources["REG"]),
        "stack_bytes": int(resources["STACK"]),
        "local_bytes": int(resources["LOCAL"]),
        "shared_bytes": compiled.metadata.shared,
        "local_accesses": in_sass(r"\b(?:LDL|STL)\b"),
        "loads": in_sass(r"\bLDG\b"),
        "loads_16_bytes": in_sass(r"\bLDG\.E\.(?:\w+\.)*128\b"),
        "stores": in_sass(r"\bSTG\b"),
        "stores_8_bytes": in_sass(r"\bSTG\.E\.(?:\w+\.)*64\b"),
        "stores_16_bytes": in_sass(r"\bSTG\.E\.(?:\w+\.)*128\b"),
        "fma": in_ptx(r"\bfma\."),
        "flush_to_zero": in_ptx(r"\.ftz\b"),
        "approximate": in_ptx(r"\b(?:div\.full|div\.approx|rcp\.)"),
        "exact_divisions": in_ptx(r"\bdiv\.rn\.f32"),
        "to_e4m3": in_ptx(r"\bcvt\.rn\.satfinite\.e4m3x2\.f32"),
        "to_bf16": in_ptx(r"\bcvt\.rn\.bf16(?:x2)?\.f32"),
    }


def main():
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    found = []
    for job in json.loads(sys.argv[1]):
        compiled = compile_kernel(**job)
        sass, usage = machine_code(compiled)
        found.append(facts(compiled, sass, usage))
        if len(sys.argv) > 2:
            name = "-".join(str(value).strip("*") for value in job.values())
            with open(os.path.join(sys.argv[2], f"{name}.sass"), "w") as file:
                file.write(sass)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
