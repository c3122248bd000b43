"""Metrics of `--kv-error-sample` as the codec's oracle computes them from values, without and with faults."""

import codec_oracle as oracle
import numpy as np
import torch

LARGEST = {"e4m3": 448, "e4m3 / k_scale": 448, "e2m1": 6 * 61440}


def double_scales(rows, name):
    """Make the latents twice as large, by the scales in rows `[tokens, row_bytes]` uint8."""
    first, end, _ = oracle.cuts(name, 512, 64)
    if name == "fp8_block_scale":
        rows[:, first:end] = (rows[:, first:end].contiguous().view(torch.float32) * 2).view(torch.uint8)
    else:
        rows[:, first:end] += 8  # one more in the exponent


def plant(path, *, doubled=(), wide=(), small=(), put=setattr):
    """Faults of some model layers, and in `path` what their first prefill is given to store, with its slots.

    `doubled` layers store twice the latents; ropes are made `wide` and latents `small` before.
    """
    from sgl_kvpool.srt.pool import mla

    pools, store_rows, kept = mla.LayoutMLATokenToKVPool, mla.store_rows, {}
    set_mla_kv_buffer, now = pools.set_mla_kv_buffer, [-1]

    def changed(self, layer, loc_info, nope, rope, layer_id_override=None):
        if self.error_sample is not None:  # not in the self-check
            now[0] = layer.layer_id if layer_id_override is None else layer_id_override
            nope, rope = nope * (0.003 if now[0] in small else 1), rope * (300 if now[0] in wide else 1)
            if now[0] not in kept:
                slots = loc_info if isinstance(loc_info, torch.Tensor) else loc_info.loc
                kept[now[0]] = [x.flatten(1).cpu() for x in (nope, rope, slots[:, None])]
                torch.save(kept, path)
        set_mla_kv_buffer(self, layer, loc_info, nope, rope, layer_id_override)
        now[0] = -1

    def damaging(rows, slots, k_nope, k_rope, fmt, **options):
        store_rows(rows, slots, k_nope, k_rope, fmt, **options)
        if now[0] in doubled:
            double_scales(found := rows[slots], str(fmt.layout))
            rows[slots] = found

    put(pools, "set_mla_kv_buffer", changed)
    put(mla, "store_rows", damaging)


def metrics_of(families):
    """(Metric, rows, part, group of layers) -> value, of metrics, and `sampled`: counts by kind."""
    found = {"sampled": {}}
    for one in (one for metric in families for one in metric.samples):
        if "part" in one.labels:
            labels = (one.labels[key] for key in ("rows", "part", "layers"))
            found[one.name.removeprefix("sgl_kvpool_"), *labels] = one.value
        elif one.name == "sgl_kvpool_sampled_prefills_total":
            found["sampled"][one.labels["kind"]] = one.value
    return found


def sampled(kept):
    """Values of the compared tokens, every so many; slots below 1 are of no token."""
    found = {}
    for layer, (nope, rope, slots) in kept.items():
        some = torch.arange(min(32, len(slots))) * (max(0, len(slots) // 32 - 1) | 1)
        some = some[slots[some, 0] > 0]
        found[layer] = nope[some], rope[some]
    return found


def expected(layers, name, host=None, k_scales=None, doubled=()):
    """(Metric, rows, part, group of layers) -> value, from the sampled values (nope, rope) of each layer."""
    found, k_scales = {}, k_scales or {}
    for group in np.array_split(sorted(layers), min(8, len(layers))):
        compared = []
        for layer in group:
            nope, rope = layers[layer]
            given, k = torch.cat((nope, rope), 1).float().numpy(), k_scales.get(layer, 1.0)
            rows = oracle.encode(nope, rope, name, 512, 64, oracle.row_bytes(name), k)
            if layer in doubled:
                double_scales(torch.from_numpy(rows), name)
            compared.append([given, oracle.decode(rows, name, 512, 64, k)])
            if host:
                bf16 = oracle.cast(compared[-1][1], torch.bfloat16)
                rows = oracle.encode(bf16[:, :512], bf16[:, 512:], host, 512, 64, oracle.row_bytes(host))
                compared[-1].append(oracle.decode(rows, host, 512, 64))
        x, *stored = (np.concatenate(one).astype(np.float64) for one in zip(*compared, strict=True))
        for place, layout, y in zip(("device", "host"), (name, host), stored, strict=False):
            parts = zip(("latent", "rope"), (slice(512), slice(512, 576)), oracle.STORED[layout], strict=True)
            for part, cut, numbers in parts:
                limit = LARGEST.get(numbers, np.inf) * (k_scales.get(group[0], 1.0) if "/" in numbers else 1)
                blocks = np.abs(x[:, cut]).reshape(-1, oracle.PARTS[numbers][1] or x[:, cut].shape[1]).max(1)
                key = (place, part, f"{group[0]}-{group[-1]}")
                error, size = ((z[:, cut] ** 2).sum() for z in (x - y, x))
                found["relative_error", *key] = np.sqrt(error / size)
                found["clamped_blocks", *key] = (blocks > limit).mean()
                found["zeroed_values", *key] = (y[:, cut][x[:, cut] != 0] == 0).mean()
    return found
