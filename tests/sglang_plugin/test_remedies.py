"""The way out that a refusal names works: a server with the changed arguments is accepted."""

import re

import pytest

from sgl_kvpool.refusal import Refusal

DSA_FLAGS = ("--dsa-prefill-backend", "--dsa-decode-backend")
TIER = "--enable-hierarchical-cache"
EAGLE = ("--speculative-algorithm", "EAGLE")
TREE = (
    *("--speculative-eagle-topk", "2", "--speculative-num-steps", "3"),
    *("--speculative-num-draft-tokens", "4"),
)


def pair(prefill, decode):
    return (DSA_FLAGS[0], prefill, DSA_FLAGS[1], decode)


#: Layouts and arguments that are refused, each for one reason.
DENSE = [
    ("fp8", ("--attention-backend", "fa3")),
    ("fp8", ("--attention-backend", "flashinfer", *EAGLE)),
    ("fp8", ("--prefill-attention-backend", "flashmla")),
    ("fp8", ("--decode-attention-backend", "fa3")),
    ("fp4", ("--attention-backend", "flashmla")),
    ("fp8_block_scale", ("--prefill-attention-backend", "trtllm_mla")),
    ("bf16", ("--attention-backend", "fa3", "--kv-cache-arrangement", "page_major")),
    ("bf16", ("--attention-backend", "fa4", "--kv-cache-arrangement", "token_major")),
    ("fp4", ("--enable-two-batch-overlap", "--moe-a2a-backend", "deepep")),
    ("fp4", ("--cuda-graph-backend-prefill", "full")),
    ("fp4", ("--enable-torch-compile",)),
    ("fp4", ("--enable-lmcache",)),
    ("fp4", ("--tp-size", "2", "--dcp-size", "2", TIER)),
    ("fp4", ("--dtype", "float32")),
    ("fp4", ("--page-size", "0")),
    ("fp4", (*EAGLE, *TREE)),
    ("fp4", ("--speculative-algorithm", "NGRAM")),
    ("fp8", (*EAGLE, "--decode-attention-backend", "flashmla")),
    ("fp8", (*EAGLE, "--attention-backend", "flashmla")),
    ("fp4", ("--kv-host-sharing", "rank")),
    ("fp4", ("--kv-host-layout", "fp8_block_scale", TIER)),
    ("fp4", ("--kv-host-engine", "cpu", TIER)),
    ("bf16", ("--kv-host-engine", "copy_engine", "--kv-host-layout", "fp4", TIER)),
    ("fp4", ("--hicache-mem-layout", "layer_first", TIER)),
    ("fp4", ("--kv-host-sharing", "node", "--pp-size", "2", "--tp-size", "2", TIER)),
    ("fp4", ("--hicache-storage-backend", "file")),
    (
        "bf16",
        ("--attention-backend", "flashinfer", *EAGLE, "--speculative-draft-attention-backend", "kvpool_mla"),
    ),
]
SPARSE = [
    ("fp8", ()),
    ("fp8", pair("fa3", "fa3")),
    ("fp8", pair("flashmla_sparse", "flashmla_kv")),
    ("fp8", ("--kv-cache-dtype", "fp8_e4m3")),
    ("bf16", pair("flashmla_kv", "flashmla_kv")),
    ("bf16", ("--dsa-decode-backend", "flashmla_kv")),
    ("fp8_block_scale", pair("flashmla_sparse", "flashmla_sparse")),
    ("fp8_block_scale", pair("flashmla_kv", "aiter")),
    ("fp8_block_scale", (*pair("flashmla_sparse_q8", "flashmla_kv"), "--enable-mixed-chunk")),
    ("fp4", pair("flashmla_kv", "flashmla_kv")),
    ("fp4", ("--enable-torch-compile",)),
    ("fp4", ("--dtype", "float16")),
    ("fp4", ("--attention-backend", "fa3")),
    ("fp4", ("--prefill-attention-backend", "fa3", "--decode-attention-backend", "flashmla")),
    ("bf16", ("--prefill-attention-backend", "dsa")),
    ("fp4", ("--kv-cache-arrangement", "token_major")),
    ("fp4", (*EAGLE, "--speculative-draft-attention-backend", "fa3")),
    ("fp4", (TIER, "--kv-host-sharing", "node", "--tp-size", "2")),
]
CASES = [
    *(("mla", layout, argv) for layout, argv in DENSE),
    *(("dsa", layout, argv) for layout, argv in SPARSE),
    *(("dsa-kpool", layout, ()) for layout in ("fp8", "fp8_block_scale", "fp4", "fp4_fp8_rope")),
    ("dsa-kpool", "fp8_block_scale", pair("flashmla_kv", "flashmla_kv")),
    ("dsa-sinks", "fp4", ()),
    ("dsa-rank1024", "fp4", ()),
    ("mha", "fp4", ()),
]


def without(argv, flags):
    """Arguments without these flags and their values."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            dropping = word in flags
        kept += [] if dropping else [word]
    return kept


def ways_out(text, argv):
    """The argument lists that the last clause of a message proposes."""
    problem, _, advice = text.rpartition("; ")
    named = re.findall(r"--[\w-]+", problem)
    first = named[0] if named else None
    found = []
    for part in re.split(r", or |(?<=\w), and (?=leave)", advice):
        flags = re.findall(r"--[\w-]+", part)
        if re.match("(leave it out|leave them out)", part):
            together = problem.partition(" cannot ")[0].partition(" would ")[0]
            found.append(without(argv, re.findall(r"--[\w-]+", together) if "them" in part else [first]))
        elif part.startswith("leave out one of"):
            found += [without(argv, [flag]) for flag in {first, named[-1]}]
        elif part.startswith("leave out"):
            found.append(without(argv, [*flags, *(["--enable-mixed-chunk"] if "option" in part else [])]))
        elif part.startswith(("serve it without", "serve without")):
            found.append(without(argv, ["--kv-cache-layout"]))
        elif "use one of: " in part or re.match(r"(use|give) [a-z_]\w*$", part):
            values = re.sub("^(use one of: |use |give )", "", part).split(", ")
            found += [[*without(argv, [first]), first, value] for value in values]
        elif least := re.match(r"give a whole number from (\d+) ", part):
            found.append([*without(argv, [first]), first, least[1]])
        elif part.startswith("use --"):
            use, _, leave = part.partition(" and leave out ")
            words = re.findall(r"(--[\w-]+)(?: ([a-z][\w]*|\d+)(?= |,|$))?", use)
            left = re.findall(r"--[\w-]+", leave)
            if part.endswith(" alone"):
                left += ["--prefill-attention-backend", "--decode-attention-backend"]
            changed = without(argv, [*left, *(flag for flag, _ in words)])
            found.append([*changed, *(word for both in words for word in both if word)])
        elif part == "add that":
            found.append([*argv, TIER])
        else:
            found.append(part)  # makes the test fail with the clause
    return found


@pytest.mark.parametrize(
    ("model", "layout", "argv"), CASES, ids=[f"{m} {x} {' '.join(a)}" for m, x, a in CASES]
)
def test_the_ways_out_of_a_refusal_are_accepted(resolve, checkpoints, model, layout, argv):

    start = ["--kv-cache-layout", layout, *argv]
    with pytest.raises(Refusal) as refused:
        resolve(checkpoints[model], *start, device="cuda")
    ways = ways_out(str(refused.value), start)
    assert ways, refused.value
    for way in ways:
        assert isinstance(way, list), way
        assert way != start
        resolve(checkpoints[model], *way, device="cuda")


def test_what_gives_the_user_most_is_named_first(resolve, checkpoints):

    def advice(model, layout, *argv, **gpu):
        with pytest.raises(Refusal) as refused:
            resolve(checkpoints[model], "--kv-cache-layout", layout, *argv, device="cuda", **gpu)
        return str(refused.value).rpartition("; ")[2]

    assert advice("dsa", "fp8").startswith("use --kv-cache-layout fp8_block_scale, or ")
    block_scale = "use --kv-cache-layout fp8_block_scale, "
    assert advice("dsa", "fp4", "--enable-torch-compile").startswith(block_scale)
    assert advice("dsa", "bf16", *pair("flashmla_kv", "flashmla_kv")).startswith(block_scale)
    for layout in ("fp8", "fp4"):  # half of the bytes of bf16
        assert advice("dsa-kpool", layout).startswith("use --kv-cache-layout fp8 --dsa-prefill-backend til")
    # What needs Blackwell is not proposed on Hopper.
    assert advice("mla", "fp8", "--attention-backend", "fa3") == (
        "leave it out, or use one of: kvpool_mla, flashmla, triton"
    )
    assert "flashmla" not in advice("mla", "fp8", "--attention-backend", "fa3", *EAGLE)
    assert advice("dsa", "fp8_block_scale", capability=(10, 0)).startswith("use --kv-cache-layout fp8, or ")
