"""What rounding costs in production: values of sampled prefills beside the rows that were stored for them.

Every way in which SGLang prefills calls the pool's writers from Python: the MHA form from the model's code,
the absorbed form from the attention backend, which runs between the pieces of breakable CUDA graphs. Rows are
read back after they are stored, not encoded again, so that wrong writers and scales show too.
"""

import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

from sgl_kvpool import metrics
from sgl_kvpool.codec import decode_rows, encode_rows, gather_parts
from sgl_kvpool.codec.scalars import E2M1_MAX, E4M3_MAX, UE5M3_MAX
from sgl_kvpool.layout import Encoding, RowFormat, SegmentEncoding
from sgl_kvpool.srt.pool.row_pool import RowWriteLoc

#: Tokens that are compared of a sampled prefill, and groups of adjacent layers that metrics tell apart.
TOKENS, GROUPS = 32, 8
_LARGEST_CODE = {Encoding.BF16: math.inf, Encoding.E4M3: E4M3_MAX, Encoding.E2M1: E2M1_MAX}
_LARGEST_SCALE = {None: 1.0, Encoding.FP32: math.inf, Encoding.UE5M3: UE5M3_MAX}


class ErrorSample:
    """Compares tokens of every `every`-th prefill in all layers; costs nothing in the other batches."""

    def __init__(self, pool: Any, every: int) -> None:
        self._pool, self._every, self._prefills = pool, every, 0
        fmt: RowFormat = pool.row_format
        host = fmt.in_layout(pool.host_tier.host_layout(fmt.layout))
        self._formats = {"device": fmt} if host == fmt else {"device": fmt, "host": host}
        self._layers: set[int] = set()
        self._is_active = False
        #: Sums of a prefill by rows and part, which the device may still compute, and its event.
        self._pending: tuple[dict[tuple[str, str], torch.Tensor], torch.cuda.Event | None] | None = None

    def begin(self) -> bool:
        """Call before a prefill; returns whether it is sampled. Publishes the sample before."""
        if self._pending is not None and (self._pending[1] is None or self._pending[1].query()):
            self._publish(self._pending[0])
            self._pending = None
        self._is_active = self._prefills % self._every == 0 and self._pending is None
        self._prefills += 1
        if self._is_active:
            shape, device = (self._pool.layer_num, TOKENS), self._pool.device
            width = self._pool.row_format.head_dim
            self._layers.clear()
            self._values = torch.empty(*shape, width, dtype=torch.bfloat16, device=device)
            self._stored = torch.empty(*shape, width, dtype=torch.float32, device=device)
            self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        return self._is_active

    def take(self, index: int, loc_info: Any, k_nope: torch.Tensor, k_rope: torch.Tensor | None) -> None:
        """Keep tokens of a layer whose rows have been stored; arguments of the pool's writers."""
        if not self._is_active or not len(k_nope):
            return
        pool, tokens, rank = self._pool, len(k_nope), self._pool.kv_lora_rank
        count = min(tokens, TOKENS)
        some = slice(0, tokens // count * count, tokens // count)
        loc, _, _ = unwrap_write_loc(loc_info)
        rows, values, stored = (x[index, :count] for x in (self._rows, self._values, self._stored))
        rows.copy_(loc[some] if isinstance(loc_info, RowWriteLoc) else pool.rows_to_write(loc[some]))
        values[:, :rank].copy_(k_nope[some].flatten(1))
        if k_rope is not None and pool.qk_rope_head_dim:
            values[:, rank:].copy_(k_rope[some].flatten(1))
        gather_parts(
            pool.kv_buffer[index].squeeze(1).view(torch.uint8),
            rows,
            pool.row_format,
            stored[:, :rank],
            stored[:, rank:],
            k_scale=pool.k_scale(pool.start_layer + index),
        )
        self._layers.add(index)

    def end(self, kind: str) -> None:
        """Call after the sampled prefill: start the comparison, whose result a later `begin` publishes.

        `kind` is `eager` or `replayed`; a prefill whose layers did not all call `take` is `unseen`.
        """
        self._is_active = False
        is_seen = len(self._layers) == self._pool.layer_num
        metrics.sampled(kind if is_seen else "unseen")
        if not is_seen:
            return
        # Row 0 takes padded tokens; -1 is a token of another rank.
        valid = (self._rows > 0).unsqueeze(-1)
        values = torch.where(valid, self._values, 0).float()
        stored = torch.where(valid, self._stored, 0)
        sums, rank = {}, self._pool.kv_lora_rank
        for name, fmt in self._formats.items():
            if name == "host":  # converted through bf16, like a page
                bf16 = stored.bfloat16().flatten(0, 1)
                rows = encode_rows(bf16[:, :rank], bf16[:, rank:], fmt)
                stored = decode_rows(rows, fmt, torch.float32).view_as(stored)
            for part, cut, encoding, block in (
                ("latent", slice(rank), fmt.layout.latent, fmt.scale_block_values or rank),
                ("rope", slice(rank, fmt.head_dim), fmt.layout.rope, fmt.qk_rope_head_dim),
            ):
                if block:
                    sums[name, part] = self._compare(
                        encoding, valid, values[..., cut], stored[..., cut], block
                    )
        host = {key: found.to("cpu", non_blocking=True) for key, found in sums.items()}
        event = torch.cuda.Event() if values.is_cuda else None
        if event is not None:
            event.record()
        self._pending = host, event
        del self._values, self._stored, self._rows

    def _compare(self, encoding: SegmentEncoding, valid, values, stored, block: int) -> torch.Tensor:
        """Norms and counts over the tokens of each layer, float64 `[6, layers]`; `block` values make one."""
        layers = range(self._pool.start_layer, self._pool.start_layer + self._pool.layer_num)
        scales = [self._pool.k_scale(layer) if encoding.uses_k_scale else 1.0 for layer in layers]
        most = _LARGEST_CODE[encoding.values] * _LARGEST_SCALE[encoding.scales]
        largest = torch.tensor([most * k_scale for k_scale in scales]).view(-1, 1, 1)
        largest = largest.to(values.device, non_blocking=True)
        nonzero, blocks = values != 0, values.abs().unflatten(-1, (-1, block)).amax(-1)
        counts = (blocks > largest, valid, nonzero, nonzero & (stored == 0))
        norms = [torch.linalg.vector_norm(x, dim=(1, 2)) for x in (values - stored, values)]
        return torch.stack([x.double() for x in (*norms, *(x.sum((1, 2)) for x in counts))])

    def _publish(self, sums: dict[tuple[str, str], torch.Tensor]) -> None:
        first, layers = self._pool.start_layer, self._pool.layer_num
        for (rows, part), found in sums.items():
            fmt = self._formats[rows]
            blocks = fmt.scale.count if part == "latent" and fmt.scale else 1
            for ids in torch.arange(first, first + layers).tensor_split(min(GROUPS, layers)):
                norms, counts = found[:2, ids - first], found[2:, ids - first]
                error, size = norms.square().sum(1).sqrt().tolist()
                clamped, tokens, nonzero, zeroed = counts.sum(1).tolist()
                if tokens:
                    metrics.shown(
                        *(rows, part, f"{int(ids[0])}-{int(ids[-1])}"),
                        relative_error=error / size if size else 0.0,
                        clamped_blocks=clamped / (tokens * blocks),
                        zeroed_values=zeroed / nonzero if nonzero else 0.0,
                    )
