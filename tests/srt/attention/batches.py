"""Batches and attention layers as SGLang builds them, of requests whose slots and prefixes are known."""

import torch


def forward_batch(mode, slots, prefixes, seq_lens, rows):
    """A `ForwardBatch` of the tokens behind each request's prefix.

    `slots` are the slots of whole sequences, `seq_lens` the lengths that SGLang sets in this mode, `rows` the
    requests' rows of the request table.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    fresh = [own[prefix:] for own, prefix in zip(slots, prefixes, strict=True)]
    lengths, tokens, device = torch.tensor(seq_lens), sum(map(len, fresh)), slots[0].device
    batch = ForwardBatch(
        forward_mode=ForwardMode[mode], batch_size=len(seq_lens), extend_num_tokens=tokens,
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor(rows, device=device), out_cache_loc=torch.cat(fresh),
        seq_lens=lengths.to(device), seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths,
    )  # fmt: skip
    if mode not in ("DECODE", "IDLE"):
        batch.extend_prefix_lens_cpu = list(prefixes)
        batch.extend_seq_lens_cpu = list(map(len, fresh))
    return batch


def radix_attention(heads, rank, rope, **fields):
    """SGLang's attention layer in the absorbed form, unless `fields` say otherwise."""
    from sglang.srt.layers.radix_attention import RadixAttention

    absorbed = {"num_heads": heads, "head_dim": rank + rope, "num_kv_heads": 1, "v_head_dim": rank}
    return RadixAttention(**absorbed | fields)
