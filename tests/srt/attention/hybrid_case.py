"""Hybrid models as SGLang serves them, on the CPU: its own pools, backend wrapper and linear backends.

Real: `HybridReqToTokenPool` with the states of the linear layers, our pool around the rows, the wrapper
`HybridLinearAttnBackend` as SGLang's registry makes it, the backends of KDA and lightning attention with
their metadata, batches and layers. Our CUDA backend, made by its constructor, runs on the CPU: `mla_decode`
in torch, SGLang's prefill kernels in Triton's interpreter, FlashInfer's wrappers replaced. Queries are
float32, see test_cuda_extend.py. There is no model around the layers.
"""

import inspect
from types import SimpleNamespace
from unittest import mock

import batches
import codec_oracle as oracle
import numpy as np
import torch
from batches import forward_batch
from pools import ARRANGEMENTS, guard, hybrid_pool, memory
from sglang.srt.configs import mamba_utils
from sglang.srt.configs.bailing_hybrid import BailingHybridConfig
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention import flashinfer_mla_backend as base
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from test_backend import HEADS, RANK, SCALE
from test_host_attention import oracle_attention

from sgl_kvpool.sglang_plugin.hooks import pools
from sgl_kvpool.srt.attention import decode_verify, prefill

#: MLA layers of a model of `LAYERS` layers; the other layers keep states. k_scales are per model layer.
MLA_LAYERS, LAYERS = (1, 3, 6), 8
K_SCALES = {1: 0.25, 3: 2.0, 6: 0.5}
#: Tokens of the pool: a multiple of every page size that is tested.
TOKENS = 448
DRAFTS = 4
CONTEXT = 128  # length of a row of the request table

LAYOUTS = oracle.LAYOUTS
PLACED = [{"arrangement": "layer_major", "page_size": 1}]
PLACED += [{"arrangement": name, "page_size": size} for name in ARRANGEMENTS[1:] for size in (7, 64)]


def request_table(kind, mla_layers=MLA_LAYERS):
    """SGLang's request table with the states of the layers other than `mla_layers`."""
    linear = [layer for layer in range(LAYERS) if layer not in mla_layers]
    if kind != "lightning":
        shape = mamba_utils.KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=16)
        params = mamba_utils.KimiLinearCacheParams(shape=shape, layers=linear)
    else:
        shape = mamba_utils.Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=0, n_groups=0, num_heads=2, head_dim=16, state_size=16,
            conv_kernel=1,
        )  # fmt: skip
        params = mamba_utils.Mamba2CacheParams(shape=shape, layers=linear)
    table = HybridReqToTokenPool(
        size=8, mamba_size=10, mamba_spec_state_size=8, max_context_len=CONTEXT, device="cpu",
        enable_memory_saver=False, cache_params=params, mamba_layer_ids=linear,
        enable_mamba_extra_buffer=False, speculative_num_draft_tokens=DRAFTS,
    )  # fmt: skip
    table.req_index_to_mamba_index_mapping[:8] = torch.arange(1, 9, dtype=torch.int32)
    return table


def make_pool(layout, mamba_pool, *, page_size=1, rope=64, mla_layers=MLA_LAYERS, **more):
    """A pool whose rows are all 0xFF: NaN where an encoding has one."""
    pool = hybrid_pool(
        layout, layers=list(mla_layers), k_scales={layer: K_SCALES.get(layer, 0.75) for layer in mla_layers},
        size=TOKENS, page_size=page_size, mamba_pool=mamba_pool, kv_lora_rank=RANK,
        qk_rope_head_dim=rope, **more,
    )  # fmt: skip
    guard(pool.full_kv_pool, byte=0xFF)
    return pool


def model_configuration(kind, mla_layers=MLA_LAYERS):
    """SGLang's configuration: Kimi-Linear (`kda`), Ring and Ling 2.5 (`lightning`), Bailing 3 (`kda-v3`)."""
    common = {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "intermediate_size": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "head_dim": 32, "pad_token_id": 0, "eos_token_id": 0, "rope_theta": 600000,
    }  # fmt: skip
    if kind == "kda":
        kinds = {
            "full_attn_layers": [i + 1 for i in mla_layers],  # checkpoints count layers from 1
            "kda_layers": [i + 1 for i in range(LAYERS) if i not in mla_layers],
        }
        shape = {"head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4}
        more = {"architectures": ["KimiLinearForCausalLM"], "linear_attn_config": kinds | shape}
        return KimiLinearConfig(**common, **more)
    return BailingHybridConfig(
        **common, architectures=["BailingMoeV2_5ForCausalLM"], num_experts=1, num_nextn_predict_layers=1,
        layer_group_size=[0 if i in mla_layers else 1 for i in range(LAYERS)],
        short_conv_kernel_size=4 if kind == "kda-v3" else None,
    )  # fmt: skip


def runner_of(pool, table, model, kind, draft):
    """The attributes of SGLang's ModelRunner that constructors of backends read."""
    config = model_configuration(kind)
    return SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=table, device="cpu", model=model, is_draft_worker=draft,
        use_mla_backend=True, server_args=SimpleNamespace(enable_mis=False), sliding_window_size=None,
        dtype=torch.float32, page_size=pool.page_size, kv_cache_dtype=pool.dtype,
        kv_cache_dtype_str="fp8_e4m3" if pool.dtype == torch.float8_e4m3fn else "bfloat16",
        kv_index_translator=KVIndexTranslator(
            req_to_token=table.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool,
            page_size=pool.page_size, device="cpu",
        ),
        model_config=SimpleNamespace(
            context_len=CONTEXT, is_encoder_decoder=False, num_attention_heads=HEADS, quantization=None,
            kv_lora_rank=RANK, qk_rope_head_dim=pool.qk_rope_head_dim, qk_nope_head_dim=32, v_head_dim=32,
            scaling=SCALE, hf_config=config, hf_text_config=config,
        ),
    )  # fmt: skip


def cuda_backend(runner, monkeypatch):
    """The CUDA backend from its own constructor."""
    from sgl_kvpool.srt.attention import cuda as module

    for name in ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        monkeypatch.setattr(base, name, mock.Mock(), raising=False)  # absent from SGLang without a GPU
    for owner in (base, decode_verify, prefill):
        monkeypatch.setattr(owner, "get_buffer", lambda name, make: make())  # each test has its own
    monkeypatch.setattr(module, "max_speculative_num_draft_tokens", lambda: DRAFTS)
    zeros = torch.zeros
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more))
        backend = module.KVPoolMLACudaBackend(runner)
    backend.absorbed_prefill.reader.wrapper = None  # the one call of FlashInfer
    return backend


def radix_attention(layer_id, rope=64, **changes):
    return batches.radix_attention(HEADS, RANK, rope, layer_id=layer_id, scaling=SCALE, **changes)


class HybridCase:
    """Requests with different keys in every MLA layer, at random slots; a step runs all MLA layers.

    `lengths` are those of whole sequences; the step itself stores the tokens beyond `prefixes`.
    """

    def __init__(
        self, layout, lengths, prefixes, monkeypatch, *, rope=64, mla_layers=MLA_LAYERS, draft=False,
        kind="kda", **placed,
    ):  # fmt: skip
        self.layout, self.lengths, self.prefixes, self.rope = layout, lengths, prefixes, rope
        self.mla_layers = mla_layers
        self.table = request_table(kind, mla_layers)
        self.pool = make_pool(layout, self.table.mamba_pool, rope=rope, mla_layers=mla_layers, **placed)
        self.layers = {layer: radix_attention(layer, rope) for layer in mla_layers}
        model = torch.nn.ModuleList(self.layers.values())
        self.runner = runner_of(self.pool, self.table, model, kind, draft)
        self.backend = self.full = cuda_backend(self.runner, monkeypatch)
        generator = torch.Generator().manual_seed(7)
        page_size = self.pool.page_size
        slots = torch.randperm(TOKENS, generator=generator)[: sum(lengths)] + page_size
        self.slots = list(slots.split(lengths))
        self.rows = [5, 2, 7, 1][: len(lengths)]  # in the request table
        for row, own in zip(self.rows, self.slots, strict=True):
            self.table.req_to_token[row, : len(own)] = own.int()
        # Keys are slices of wider tensors, like the result of a projection.
        self.keys = {
            layer: [torch.randn(n, 1, RANK + rope + 5, generator=generator).bfloat16() for n in lengths]
            for layer in mla_layers
        }
        self.keys = {i: [k[..., : RANK + rope] for k in keys] for i, keys in self.keys.items()}
        for layer, module in self.layers.items():
            for own, keys, prefix in zip(self.slots, self.keys[layer], prefixes, strict=True):
                if prefix:
                    nope, roped = keys[:prefix, :, :RANK], keys[:prefix, :, RANK:]
                    self.pool.set_mla_kv_buffer(module, own[:prefix], nope, roped)
        self.q = {}

    def wrap(self, full=None):
        """Put SGLang's wrapper around our backend, as the scheduler does; later steps go through it."""
        own = inspect.unwrap(attention_registry.attn_backend_wrapper)
        self.backend = pools._wrap_for_model(own, self.runner, full or self.full)
        self.linear = self.backend.linear_attn_backend
        return self.backend

    def batch(self, mode):
        # In a verification, seq_lens exclude the tokens that are verified.
        seq_lens = self.prefixes if mode == "TARGET_VERIFY" else self.lengths
        batch = forward_batch(mode, self.slots, self.prefixes, seq_lens, self.rows)
        fresh = [n - p for n, p in zip(self.lengths, self.prefixes, strict=True)]
        if mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
            batch.spec_info = SimpleNamespace(
                draft_token_num=fresh[0], num_tokens_per_req=fresh[0], ragged_verify_layout=None
            )
        if mode in ("DECODE", "TARGET_VERIFY"):
            batch.extend_num_tokens = None
        if mode == "TARGET_VERIFY":
            batch.extend_prefix_lens_cpu = batch.extend_seq_lens_cpu = None
        elif mode != "DECODE":
            batch.extend_prefix_lens = torch.tensor(self.prefixes)
            batch.extend_seq_lens = torch.tensor(fresh)
            batch.extend_start_loc = torch.tensor([0, *np.cumsum(fresh)[:-1]])
        if mode in ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"):
            batch.seq_lens_cpu = None  # not needed: reading it would fail
        return batch

    def run(self, mode, *, split=False):
        """`{layer: result}` of one step of all MLA layers."""
        batch = self.batch(mode)
        self.backend.init_forward_metadata(batch)
        return {layer: self.layer_step(batch, layer, split=split) for layer in self.mla_layers}

    def layer_step(self, batch, layer, *, split=False):
        pairs = zip(self.keys[layer], self.prefixes, strict=True)
        keys = torch.cat([torch.nn.functional.pad(k[p:], (0, 3)) for k, p in pairs])[..., : RANK + self.rope]
        tokens = len(keys)
        generator = torch.Generator().manual_seed(8 + layer)
        q = torch.randn(tokens, HEADS, RANK + self.rope, generator=generator)
        self.q[layer] = q
        k, extra = keys, {}
        if split:
            # As the absorbed core passes them: the latent part is a transposed batched product.
            extra = {"q_rope": q[..., RANK:], "k_rope": keys[..., RANK:]}
            q, k = q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1), keys[..., :RANK]
        else:
            q = q.reshape(tokens, -1)
        return self.backend.forward(q, k, k[..., :RANK], self.layers[layer], batch, **extra)

    # ---------------------------------------------------------------- expected results

    def encoded(self, layer, keys):
        """The oracle's rows of `keys` in a layer, with the k_scale of that model layer."""
        nope, roped = keys[:, 0, :RANK], keys[:, 0, RANK:] if self.rope else None
        row_bytes, scale = self.pool.row_format.row_bytes, K_SCALES.get(layer, 0.75)
        return oracle.encode(nope, roped, self.layout, RANK, self.rope, row_bytes, scale)

    def wanted(self, layer, *, fresh_as_computed):
        """Expected float64 output over decoded rows; `fresh_as_computed`: bool, or one per request."""
        if isinstance(fresh_as_computed, bool):
            fresh_as_computed = [fresh_as_computed] * len(self.prefixes)
        out, start = [], 0
        for keys, prefix, as_computed in zip(self.keys[layer], self.prefixes, fresh_as_computed, strict=True):
            scale = K_SCALES.get(layer, 0.75)
            rows = self.encoded(layer, keys)
            values = oracle.decode(rows, self.layout, RANK, self.rope, scale).astype(np.float64)
            if as_computed:
                values[prefix:] = keys[prefix:, 0].double().numpy()
            q = self.q[layer][start : start + len(keys) - prefix].float().numpy()
            start += len(keys) - prefix
            out.append(oracle_attention(q, values, RANK, prefix)[0])
        return np.concatenate(out).reshape(start, -1)

    def assert_right(self, found, *, fresh_as_computed):
        for layer, out in found.items():
            wanted = self.wanted(layer, fresh_as_computed=fresh_as_computed)
            np.testing.assert_allclose(out.numpy(), wanted, err_msg=f"layer {layer}", rtol=2e-4, atol=2e-5)

    def assert_stored(self):
        """Each layer holds the rows of its keys, all other bytes are untouched. Overwrites the rows."""
        slots = torch.cat(self.slots)
        for layer in self.mla_layers:
            rows = self.pool.get_row_buffer(layer).squeeze(1)
            places = self.pool.slot_to_row(slots)
            expected = self.encoded(layer, torch.cat(self.keys[layer]))
            assert (rows[places].numpy() == expected).all(), f"layer {layer}"
            rows[places] = 0xFF
        assert all((part == 0xFF).all() for part in memory(self.pool))
