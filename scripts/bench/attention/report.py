"""From measured rows to ratios, targets and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from scripts.bench.attention.cases import DENSE_PEERS, FP4_LAYOUTS, OURS, WHOLE_POOL_PEER
from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.layout import SegmentEncoding

__all__ = ["add_ratios", "best_us", "print_ratios", "print_table", "targets"]

MEASURED = "measured"
#: The peer made for Hopper: without its time, the comparison with the best BF16 peer cannot be passed.
BEST_EXPECTED_PEER = "flashmla"
SPARSE_PEER = "flashmla_sparse_fp8"
#: Layouts with rows narrower than BF16 rows.
NARROW = tuple(layout.value for layout in MLAKVCacheLayout if layout.is_narrow)

_WORKLOAD = ("kind", "heads", "batch", "context_tokens", "rows_per_list", "queries_per_list")

#: Least speedup over the best BF16 peer, by the encoding of latents.
BEST_PEER_SPEEDUPS = {SegmentEncoding.E2M1_IN_BLOCKS: 1.4, SegmentEncoding.E4M3_IN_TILES: 1.2}
#: Least speedups of FP4, and the largest slowdown with many heads.
WHOLE_POOL_SPEEDUP, SPARSE_SPEEDUP, MANY_HEADS_SLOWDOWN = 10.0, 1.0, 1.3


def best_us(row: dict) -> float:
    """Time of a row without launches: in a CUDA graph if it could be captured."""
    return row["graph_us"] if row.get("graph_us") is not None else row["us"]


def _needs_decoding(row: dict) -> bool:
    return MLAKVCacheLayout(row["layout"]).needs_decoding


def _same_workload(row: dict, rows: Iterable[dict], **but: Any) -> list[dict]:
    """Measured rows of the same workload."""
    wanted = {name: row[name] for name in (*_WORKLOAD, "arrangement")} | but
    return [r for r in rows if r["status"] == MEASURED and all(r[k] == v for k, v in wanted.items())]


def add_ratios(rows: Sequence[dict]) -> None:
    """Add the speedup over each peer to our rows, for the same workload in the same run.

    `times_as_fast_as` has an entry per measured peer and "kvpool bf16", our kernel on BF16 rows.
    `time_to_layer_major` is an arrangement's time divided by the layer-major time of the same rows.
    """
    for row in rows:
        if row["status"] != MEASURED or row["runner"] != OURS:
            continue
        found = {}
        for other in _same_workload(row, rows):
            if other["runner"] != OURS:
                found[other["runner"]] = best_us(other) / best_us(row)
            elif _needs_decoding(row) and not _needs_decoding(other):
                found[f"{OURS} {other['layout']}"] = best_us(other) / best_us(row)
        row["times_as_fast_as"] = {name: round(ratio, 3) for name, ratio in found.items()}
        if row["arrangement"] != "layer_major":
            base = [
                r
                for r in _same_workload(row, rows, arrangement="layer_major")
                if (r["runner"], r["layout"]) == (OURS, row["layout"])
            ]
            row["time_to_layer_major"] = round(best_us(row) / best_us(base[0]), 3) if base else None


def _ours(rows: Iterable[dict], layout: str, **wanted: Any) -> list[dict]:
    """Measured rows of our kernel, layer-major and with one query per list."""
    wanted = {"runner": OURS, "layout": layout, "arrangement": "layer_major", "queries_per_list": 1, **wanted}
    return [r for r in rows if r["status"] == MEASURED and all(r[k] == v for k, v in wanted.items())]


def _verdict(name: str, need: str, found: float | None, passed: bool | None, note: str = "") -> dict:
    state = "not measured" if passed is None else "passed" if passed else "missed"
    return {
        "target": name,
        "need": need,
        "found": None if found is None else round(found, 3),
        "state": state,
        "note": note,
    }


def _against_best_peer(rows: Sequence[dict], layout: str, least: float, at: dict) -> dict:
    where = f"{at['heads']} heads, batch {at['batch']}, {at['context_tokens']} tokens"
    name = f"{layout}, {where}: best BF16 peer"
    need = f"at least {least}x"
    own = _ours(rows, layout, kind="dense", **at)
    if not own:
        return _verdict(name, need, None, None, "our kernel was not measured")
    others = {p: own[0]["times_as_fast_as"][p] for p in DENSE_PEERS if p in own[0]["times_as_fast_as"]}
    if not others:
        return _verdict(name, need, None, None, "no BF16 peer was measured")
    best, found = min(others.items(), key=lambda pair: pair[1])
    note = f"best of {len(others)}: {best}; {own[0]['of_tightest_limit']} of the tightest limit"
    if found >= least and BEST_EXPECTED_PEER not in others:
        return _verdict(name, need, found, None, f"{BEST_EXPECTED_PEER} was not measured; {note}")
    return _verdict(name, need, found, found >= least, note)


def _many_heads(rows: Sequence[dict], layout: str, heads: int, at: dict) -> dict:
    """Verdict by the worst of all measured dense workloads, which must include that of the target."""
    name = f"{layout}, {heads} heads: time over BF16 rows, same kernel"
    need, base = f"at most {MANY_HEADS_SLOWDOWN}x", f"{OURS} bf16"
    own = [r for r in _ours(rows, layout, kind="dense", heads=heads) if base in r["times_as_fast_as"]]
    if not own:
        return _verdict(name, need, None, None, "not measured on both layouts")
    worst = min(own, key=lambda r: r["times_as_fast_as"][base])
    found = 1 / worst["times_as_fast_as"][base]
    note = f"worst of {len(own)}: batch {worst['batch']}, {worst['context_tokens']} tokens"
    passed: bool | None = found <= MANY_HEADS_SLOWDOWN
    if passed and not any(all(r[k] == at[k] for k in ("batch", "context_tokens")) for r in own):
        passed, note = None, f"batch {at['batch']}, {at['context_tokens']} tokens was not measured; {note}"
    return _verdict(name, need, found, passed, note)


def _against(
    rows: Sequence[dict], layout: str, what: str, peer: str, least: float, at: dict, wanted: dict
) -> dict:
    """Verdict on a layout against one peer, by the worst measured workload; `at` must have been measured."""
    name, need = f"{layout}{what}", f"at least {least:g}x"
    own = [r for r in _ours(rows, layout, **wanted) if peer in r["times_as_fast_as"]]
    if not own:
        return _verdict(name, need, None, None, f"our kernel or {peer} was not measured")
    worst = min(own, key=lambda r: r["times_as_fast_as"][peer])
    found = worst["times_as_fast_as"][peer]
    note = f"worst of {len(own)}: batch {worst['batch']}, {worst['context_tokens']} tokens"
    passed: bool | None = found >= least
    if passed and not any(all(r[k] == v for k, v in at.items()) for r in own):
        passed, note = None, f"{at} was not measured; {note}"
    return _verdict(name, need, found, passed, note)


def targets(
    rows: Sequence[dict], *, on_gpu: bool, target: tuple[int, int, int], many_heads: int
) -> list[dict]:
    """Speed targets of the project, and the measured values.

    `rows`: Result rows, after `add_ratios`.
    `on_gpu`: Whether the times are a GPU's; times of a CPU neither pass nor miss a target.
    `target`: Heads, batch and context of the main comparison.
    Returns: `state` is "passed", "missed" or "not measured". A target is missed if the ratio to any peer is
      below it; it is passed only if the decisive peer was measured.
    """
    wrong = [r for r in rows if r["runner"] == OURS and r["status"] in ("wrong", "failed")]
    if not on_gpu:
        rows = []
    heads, batch, context = target
    at = {"heads": heads, "batch": batch, "context_tokens": context}
    found = [
        *(
            _against_best_peer(rows, layout.value, BEST_PEER_SPEEDUPS[layout.latent], at)
            for layout in reversed(MLAKVCacheLayout)
            if layout.latent in BEST_PEER_SPEEDUPS
        ),
        *(_many_heads(rows, layout, many_heads, at) for layout in NARROW),
        *(
            _against(
                rows, layout, ": SGLang's FP4 path, large pool", WHOLE_POOL_PEER, WHOLE_POOL_SPEEDUP, {},
                {"kind": "whole_pool"},
            )
            for layout in FP4_LAYOUTS
        ),
        *(
            _against(
                rows, layout, f", {heads} heads, sparse: FlashMLA on fp8_block_scale rows", SPARSE_PEER,
                SPARSE_SPEEDUP, {"batch": batch}, {"kind": "sparse", "heads": heads},
            )
            for layout in FP4_LAYOUTS
        ),
    ]  # fmt: skip
    if not on_gpu:
        found = [{**verdict, "note": "needs a GPU"} for verdict in found]
    if wrong:
        found.append(_verdict("our kernel: right results", "all", None, False, wrong[0]["reason"]))
    return found


def print_ratios(rows: Sequence[dict]) -> None:
    """Print the ratios of our kernel, one line per workload and layout."""
    for row in rows:
        ratios = [f"{ratio:.2f}x {name}" for name, ratio in row.get("times_as_fast_as", {}).items()]
        if row.get("time_to_layer_major"):
            ratios.append(f"{row['time_to_layer_major']:.2f} of layer_major's time")
        if ratios:
            where = f"{row['heads']} heads, batch {row['batch']}, {row['context_tokens']} tokens"
            queries = f", {row['queries_per_list']} queries" if row["queries_per_list"] > 1 else ""
            print(
                f"{row['kind']}, {where}{queries}, {row['arrangement']}, {row['layout']}: "
                + "; ".join(ratios)
            )


def print_table(row: dict | None) -> None:
    """Print one line of the table, or its head for None."""
    if row is None:
        print(
            f"{'group':12}{'heads':>6}{'batch':>6}{'context':>8} {'q':>2} {'arrangement':12}{'runner':20}"
            f"{'layout':16}{'us':>10}{'in graph':>10}{'Mrows/s':>9}{'GB/s':>7}{'of copy':>8}{'TFLOP/s':>8}"
            f"{'of limit':>9}"
        )
        return
    head = (
        f"{row['group']:12}{row['heads']:6}{row['batch']:6}{row['context_tokens']:8} "
        f"{row['queries_per_list']:2} {row['arrangement']:12}{row['runner']:20}{row['layout']:16}"
    )
    if row["status"] != MEASURED:
        print(f"{head} {row['status']}: {row['reason']}", flush=True)
        return
    graph = "" if row["graph_us"] is None else f"{row['graph_us']:.1f}"
    print(
        f"{head}{row['us']:10.1f}{graph:>10}{row['rows_per_s'] / 1e6:9.0f}{row['row_gb_per_s']:7.0f}"
        f"{row['of_copy_peak']:8.2f}{row['tflop_per_s']:8.1f}{row['of_tightest_limit']:9.2f}"
        f" {row['tightest_limit']}",
        flush=True,
    )
