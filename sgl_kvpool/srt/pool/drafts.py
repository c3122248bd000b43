"""Draft models: the bytes of their pools for the target's budget, and the refusal of those without MLA."""

from dataclasses import dataclass
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import Refusal
from sgl_kvpool.srt.facts.readers import KVPOOL_BACKEND
from sgl_kvpool.srt.model import Model


@dataclass(frozen=True)
class OwnDraft:
    """A draft with a pool of its own, whose layers SGLang does not append to the target's.

    `model` has the draft as its model, `ranks` is the number of ranks that share the draft's heads, and
    `copies` that of ranks that share the target's rows (`--dcp-size`) and have all of the draft's.
    """

    model: Model
    layers: int
    ranks: int
    copies: int

    @property
    def has_rows(self) -> bool:
        """Whether the draft stores MLA rows; otherwise it stores keys and values of heads."""
        from sglang.srt.configs.model_config import AttentionArch

        return self.model.model_config.attention_arch == AttentionArch.MLA

    def token_bytes(self, layout: MLAKVCacheLayout) -> int:
        """Bytes of the draft's pool per row of the target's; a draft with MLA stores rows of `layout`.

        ValueError if SGLang does not know the --kv-cache-dtype that it would use for the draft.
        """
        if self.has_rows:
            return self.copies * self.layers * self.model.row_format_in(layout).row_bytes
        import torch
        from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
        from sglang.srt.runtime_context import get_model, get_spec

        config = self.model.model_config
        _, dtype = configure_kv_cache_dtype(
            server_args_kv_cache_dtype=get_model().kv_cache_dtype,
            speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
            model=None,
            model_dtype=config.dtype,
            is_draft_worker=True,
            is_dflash=False,
            speculative_draft_attention_backend=get_spec().speculative_draft_attention_backend,
        )
        values = config.get_num_kv_heads(self.ranks) * (config.head_dim + config.v_head_dim)
        return self.copies * self.layers * values * torch.empty(0, dtype=dtype).element_size()


def own_draft(configurator: Any) -> OwnDraft | None:
    """The draft of a KVCacheConfigurator's target; None if its layers are appended to the target's pool.

    SGLang sizes every draft of EAGLE and STANDALONE as more layers of the target, and says that this is right
    for drafts with the target's attention (`pool_configurator.py:259`). Keys and values of heads are wider
    than a latent, and narrower rows of the target give both pools more tokens: with Kimi-K2 in `fp4` on 8
    GPUs, a draft of 64 heads of 128 needs 4096 bytes per token where 416 would be charged. Drafts with sparse
    attention, which also have index keys, are left to SGLang.

    Refusal for a draft without MLA and without an explicit backend, if its target has sparse attention (DSA):
    SGLang would use the target's backend, which ends in an AttributeError.
    """
    from sglang.srt.runtime_context import get_parallel

    draft = configurator.spec_aux_config.draft_model_config if _drafts(configurator) else None
    if draft is None or packed_layers(configurator) or Model(draft).is_dsa:
        return None
    # SGLang counts layers the same way in `spec_aux_hidden_state.py`, except that a value of 0, as in some
    # checkpoints for MTP, counts as absent here, and as no layers there.
    layers = draft.num_nextn_predict_layers or max(draft.num_hidden_layers, draft.num_attention_layers)
    ranks, copies = configurator.draft_attn_tp_size, get_parallel().attn_dcp_size
    own = OwnDraft(Model(draft), int(layers), ranks, copies)
    if not own.has_rows and Model(configurator.model_config).is_dsa:
        from sglang.srt.runtime_context import get_spec

        if get_spec().speculative_draft_attention_backend is None:
            reason = "SGLang would use its target's sparse attention (DSA) for it"
            raise _without_mla(draft, reason, "a backend")
    return own


def packed_layers(configurator: Any) -> int:
    """Number of draft layers whose rows a host tier keeps in the target's pages.

    SGLang packs layers of multi-token prediction (`base_spec_worker._can_pack_hicache_mtp`); other drafts
    have a host pool of their own, with as many tokens as the target's.
    """
    algorithm = configurator.spec_algorithm
    if not _drafts(configurator) or not algorithm.is_eagle() or algorithm.is_eagle3():
        return 0
    draft = configurator.spec_aux_config.draft_model_config
    return int(draft.num_nextn_predict_layers or 0) if draft is not None else 0


def _drafts(configurator: Any) -> bool:
    algorithm = configurator.spec_algorithm
    return not configurator.is_draft_worker and (algorithm.is_eagle() or algorithm.is_standalone())


def require_mla(runner: Any) -> None:
    """Refuse a draft model without MLA, whose pool our backend cannot read."""
    if runner.is_draft_worker and not runner.use_mla_backend:
        reason = f"attention backend {KVPOOL_BACKEND} reads MLA pools"
        raise _without_mla(runner.model_config, reason, "one for the draft")


def _without_mla(draft: Any, reason: str, what: str) -> Refusal:
    return Refusal(
        f"{Model(draft).model_name}, the draft model, does not use multi-head latent attention "
        f"(MLA), and {reason}",
        f"name {what} with --speculative-draft-attention-backend (flashinfer, fa3 or triton)",
    )
