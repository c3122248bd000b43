"""What rounding costs in production: values of sampled prefills beside the rows that were stored for them.

Every way in which SGLang prefills calls the pool's writers from Python: the MHA form from the model's code,
the absorbed form from the attention backend, which runs between the pieces of breakable CUDA graphs. Rows are
read back after they are stored, so that wrong writers and scales show; `host` rows are these, encoded again.
"""

import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

from sgl_kvpool import metrics
from sgl_kvpool.codec import decode_rows, encode_rows, gather_rows
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
        self._pool, self._every, self._prefills, self._is_active = pool, every, 0, False
        self._layer_ids = pool.row_layer_ids
        fmt: RowFormat = pool.row_format
        self._host = fmt.in_layout(pool.host_tier.host_layout(fmt.layout))
        formats = {"device": fmt} if self._host == fmt else {"device": fmt, "host": self._host}
        rank, rope = fmt.kv_lora_rank, fmt.qk_rope_head_dim
        #: Rows and part of a row that are compared, with columns, encoding and values of a block.
        self._parts: list[tuple[str, str, slice, SegmentEncoding, int]] = []
        for rows, one in formats.items():
            self._parts += [(rows, "latent", slice(rank), one.layout.latent, one.scale_block_values or rank)]
            self._parts += [(rows, "rope", slice(rank, None), one.layout.rope, rope)] if rope else []
        self._seen: set[int] = set()
        #: Sums of the sample before, which the device may still compute, and its event.
        self._pending: tuple[torch.Tensor, torch.Event] | None = None

    def begin(self) -> None:
        """Call before a prefill; publishes the sample before."""
        if self._pending is not None and self._pending[1].query():
            self._publish(self._pending[0])
            self._pending = None
        self._is_active = self._prefills % self._every == 0 and self._pending is None
        self._prefills += 1
        if self._is_active:
            shape, device = (len(self._layer_ids), TOKENS), self._pool.device
            self._seen.clear()
            self._values = torch.empty(*shape, self._pool.row_format.head_dim, device=device)
            self._rows = torch.zeros(shape, dtype=torch.int64, device=device)

    def take(self, index: int, loc_info: Any, *parts: Any) -> None:
        """Keep tokens that are stored in a layer; latents and ropes, or both in one tensor."""
        if not self._is_active or not (count := min(len(parts[0]), TOKENS)):
            return
        if parts[0].element_size() == 1:  # SGLang has rounded them for trtllm: the prefill is unseen
            return
        step = (len(parts[0]) // count - 1) | 1  # odd: tokens of all ranks, and of all places of a page
        some = slice(0, step * count, step)
        loc, is_row = unwrap_write_loc(loc_info)[0][some], isinstance(loc_info, RowWriteLoc)
        self._rows[index, :count] = loc if is_row else self._pool.rows_to_write(loc)
        given = [part[some].flatten(1) for part in parts if part is not None]
        self._values[index, :count] = torch.cat(given, 1)
        self._seen.add(index)

    def end(self, kind: str) -> None:
        """Call after a prefill, `eager` or `replayed`: if it is sampled, start its comparison.

        A later `begin` publishes the result. A prefill whose layers did not all call `take` is `unseen`.
        """
        if not self._is_active:
            return
        self._is_active = False
        if len(self._seen) < len(self._layer_ids):
            metrics.sampled("unseen")
            return
        metrics.sampled(kind)
        pool, fmt, rank, read = self._pool, self._pool.row_format, self._pool.kv_lora_rank, []
        for index, (layer, rows) in enumerate(zip(self._layer_ids, self._rows, strict=True)):
            buffer = pool.row_pool.kv_buffer[index].squeeze(1).view(torch.uint8)
            read.append(gather_rows(buffer, rows, fmt, torch.float32, k_scale=pool.k_scale(layer)))
        # Row 0 takes padded tokens; -1 is a token of another rank.
        valid = (self._rows > 0).unsqueeze(-1)
        values, device = (torch.where(valid, x, 0) for x in (self._values, torch.stack(read)))
        stored = {"device": device}
        if self._host != fmt:  # converted like a page
            nope, rope = device.flatten(0, 1).tensor_split([rank], 1)
            rows = encode_rows(nope, rope, self._host)
            stored["host"] = decode_rows(rows, self._host, torch.float32).view_as(device)
        pairs = [(values[..., cut], stored[rows][..., cut], *how) for rows, _, cut, *how in self._parts]
        sums = torch.stack([self._compare(valid, *pair) for pair in pairs])
        self._pending = sums.to("cpu", non_blocking=True), torch.get_device_module(sums.device).Event()
        self._pending[1].record()
        del self._values, self._rows

    def _compare(self, valid, values, stored, encoding: SegmentEncoding, block: int) -> torch.Tensor:
        """Sums over the tokens of each layer, float64 `[6, layers]`, of which `_publish` makes metrics."""
        most = _LARGEST_CODE[encoding.values] * _LARGEST_SCALE[encoding.scales]
        limits = [most * (self._pool.k_scale(x) if encoding.uses_k_scale else 1) for x in self._layer_ids]
        # From pinned memory, because from other memory a copy would wait for the device.
        limit = torch.tensor(limits, pin_memory=values.is_cuda).to(values.device, non_blocking=True)
        nonzero, blocks = values != 0, values.abs().unflatten(-1, (-1, block)).amax(-1)
        squares = ((values - stored).double().square(), values.double().square())
        counts = (blocks > limit.view(-1, 1, 1), valid.expand_as(blocks), nonzero & (stored == 0), nonzero)
        return torch.stack([x.sum((1, 2), dtype=torch.float64) for x in (*squares, *counts)])

    def _publish(self, sums: torch.Tensor) -> None:
        ids = self._layer_ids
        for (rows, part, *_), found in zip(self._parts, sums, strict=True):
            for group in torch.arange(len(ids)).tensor_split(min(GROUPS, len(ids))):
                error, size, clamped, blocks, zeroed, nonzero = found[:, group].sum(1).tolist()
                if blocks:
                    metrics.shown(
                        *(rows, part, f"{ids[group[0]]}-{ids[group[-1]]}"),
                        relative_error=math.sqrt(error / size) if size else 0.0,
                        clamped_blocks=clamped / blocks,
                        zeroed_values=zeroed / nonzero if nonzero else 0.0,
                    )
