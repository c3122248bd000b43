"""SGLang's real DSA backend with our hooks: consumers of the top-k transform, in every mode of an extend.

Readers of all layouts, decode and verification: tests/gpu/test_dsa_backend_gpu.py.
"""

import inspect

import codec_oracle as oracle
import dsa_case
import numpy as np
import pytest
import torch
from cases import crossed
from dsa_case import DRAFTS, RANK, TOP_K, Case, SparseKernel, in_forward, make_backend, make_pool
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa import dsa_backend_kpool
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from sgl_kvpool.sglang_plugin import hook_groups

pytestmark = pytest.mark.usefixtures("published", "hooked")

EXTENDS = ["EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"]
#: Prefill and decode implementations per layout: FlashMLA's, or ours under SGLang's names.
PAIRS = {
    **dict.fromkeys(["bf16", *oracle.OURS_ALONE], ("flashmla_sparse", "flashmla_sparse")),
    "fp8_block_scale": ("flashmla_sparse", "flashmla_kv"),
}
RAGGED = oracle.PACKED
PREFIXES = {"none": [0, 0, 0], "some": [0, 29, 6], "all": [8, 29, 6]}
LENGTHS = [9, 40, 7]


@pytest.fixture
def hooked(monkeypatch):
    """Our hooks in this process, `torch.cat` uncompiled, torch in place of a kernel that asserts a GPU."""
    hook_groups.apply(hook_groups.named("sparse attention"))
    monkeypatch.setattr(dsa_backend, "_compiled_cat", torch.cat)
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", seen_lengths)


def seen_lengths(extend_seq_lens, seq_lens, total_len, max_q_len):
    """Number of tokens that each new token sees."""
    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    seen = torch.cat([torch.arange(n - new + 1, n + 1, dtype=torch.int32) for new, n in pairs])
    assert len(seen) == total_len
    return seen


@pytest.fixture
def kernel(monkeypatch):
    return SparseKernel(monkeypatch)


def case_of(layout, prefixes, **more):
    return Case(layout, LENGTHS, PREFIXES[prefixes], *PAIRS[layout], **more)


def run(case, mode, **more):
    with in_forward(case.backend):
        return case.run(mode, **more)


def unhook(monkeypatch):
    """Restore SGLang's own choice of the transform."""
    own = inspect.unwrap(DeepseekSparseAttnBackend.get_topk_transform_method)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "get_topk_transform_method", own)


def close(found, wanted):
    """Queries and keys are bfloat16, and Triton's interpreter truncates the keys that SGLang decodes."""
    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.double().numpy(), wanted.numpy(), rtol=0.03, atol=0.012)


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize(("mode", "prefixes"), crossed(EXTENDS, [*PREFIXES]))
def test_consumers_agree(layout, mode, prefixes, kernel):
    """Ragged layouts without a prefix attend keys as computed; all other cases read them from the pool."""
    case = case_of(layout, prefixes)
    found = run(case, mode)
    close(found, case.wanted(fresh_as_computed=prefixes == "none" and layout in RAGGED))
    batch, metadata = case.batch(mode), case.backend.forward_metadata
    ragged = layout in RAGGED
    indexer = case.backend.get_indexer_metadata(0, batch)
    assert indexer.topk_transform_method.name == ("RAGGED" if ragged else "PAGED")
    assert (metadata.topk_indices_offset is not None) == ragged
    assert (metadata.page_table_1_flattened is not None) == (ragged and prefixes != "none")
    if ragged:
        # For each token: where the keys of its request begin among the keys of the batch.
        starts = np.cumsum([0, *LENGTHS[:-1]])
        fresh = [n - p for n, p in zip(LENGTHS, PREFIXES[prefixes], strict=True)]
        assert metadata.topk_indices_offset.tolist() == np.repeat(starts, fresh).tolist()
    if metadata.page_table_1_flattened is not None:
        assert metadata.page_table_1_flattened.tolist() == torch.cat(case.slots).tolist()


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize(("mode", "prefixes"), crossed(EXTENDS, [*PREFIXES]))
def test_seeds_of_drafts_are_slots(layout, prefixes, mode, kernel):
    """Whatever transform prefill used, a draft's decode receives slots of the pool."""
    case = case_of(layout, prefixes, use_fused_topk=True)
    case.backend.init_forward_metadata(case.batch(mode))
    method = case.backend.get_topk_transform_method(case.batch(mode).forward_mode).name
    local, fresh = case.chosen(), [n - p for n, p in zip(LENGTHS, PREFIXES[prefixes], strict=True)]
    owners = np.repeat(range(3), fresh)
    rows = zip(local, (case.slots[owner] for owner in owners), strict=True)
    slots = torch.stack([torch.where(row >= 0, own[row.clamp(min=0).long()], -1) for row, own in rows])
    starts = torch.tensor([0, *np.cumsum(LENGTHS)[:-1]])[owners][:, None]
    selected = slots.int() if method == "PAGED" else torch.where(local >= 0, local + starts, -1).int()
    seeds = case.backend.prepare_mtp_seed_indices(selected, case.batch(mode).forward_mode)
    assert seeds.tolist() == slots.tolist()


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize("mode", EXTENDS[1:])
def test_unhooked_sglang_hands_packed_rows_to_a_16_bit_kernel(mode, stock, kernel, monkeypatch):
    """The defect of 0.5.23, over our pool and SGLang's; the hook repairs both."""
    case = case_of("fp8_block_scale", "some", stock=stock)
    close(run(case, mode), case.wanted(from_pool=stock))
    unhook(monkeypatch)
    with pytest.raises(TypeError, match=r"16-bit keys of 576 values, not 656 of torch\.float8_e4m3fn"):
        run(case, mode)


@pytest.mark.parametrize("layout", PAIRS)
def test_a_mixed_batch_that_is_planned_for_another_mode(layout, kernel):
    """SGLang's prefill graphs plan MIXED and attend EXTEND (prefill_cuda_graph_runner.py:1953)."""
    case = case_of(layout, "some")
    close(run(case, "EXTEND", planned_as="MIXED"), case.wanted())


def test_a_batch_without_keys_reads_nothing(kernel):
    """An idle rank's batch: its tokens have empty index lists."""
    case = Case("fp4", [1, 1], [0, 0], *PAIRS["fp4"])
    q = torch.randn(2, 4, 576).bfloat16()
    rows = case.pool.get_key_buffer(6)
    none = torch.full((2, TOP_K), -1, dtype=torch.int32)
    out = case.backend._forward_flashmla_sparse(
        q_all=q, kv_cache=rows, v_head_dim=RANK, page_table_1=none, sm_scale=1.0, topk_length=None
    )
    assert (out == 0).all()
    assert out.shape == (2, 4, RANK)


KPOOL = 4


class Pooled(Case):
    """Each token attends the tokens of random index keys, then those behind the last key."""

    def chosen(self):
        generator = torch.Generator().manual_seed(9)
        lists = []
        for length, prefix in zip(self.lengths, self.prefixes, strict=True):
            for seen in range(prefix + 1, length + 1):
                keys = torch.randperm(seen // KPOOL, generator=generator)[: TOP_K // KPOOL]
                selected = (keys[:, None] * KPOOL + torch.arange(KPOOL)).flatten()
                places = torch.cat([selected, torch.arange(seen // KPOOL * KPOOL, seen)])
                lists.append(torch.nn.functional.pad(places, (0, TOP_K + KPOOL - 1 - len(places)), value=-1))
        return torch.stack(lists).int()


@pytest.mark.parametrize("layout", oracle.OURS_ALONE)
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_pooled_index_keys(layout, rope, mode, kernel, monkeypatch):
    """Our reader attends in every mode. GLM5-Next has no rotary values."""
    # The indexer's plan of an extend, which SGLang makes in pinned memory.
    monkeypatch.setattr(dsa_backend_kpool, "init_kpool_extend_metadata", lambda metadata, *_, **__: metadata)
    monkeypatch.setattr(dsa_case, "ROPE", rope)
    new = {"DECODE": 1, "TARGET_VERIFY": DRAFTS, "DRAFT_EXTEND_V2": DRAFTS}.get(mode, 7)
    lengths = [n + new for n in (1, 37, 20)]
    case = Pooled(layout, lengths, [1, 37, 20], *PAIRS[layout], dsa_index_kpool=KPOOL)
    close(run(case, mode), case.wanted())
    assert kernel.dtypes == []


@pytest.mark.parametrize("blackwell", [False, True])
def test_a_choice_does_not_leak_into_the_next_batch(blackwell, kernel):
    """SGLang keeps the previous implementation for a batch with dense attention, and transforms by it."""
    dense = [False]
    case = Case(
        "fp8_block_scale", LENGTHS, PREFIXES["some"], "flashmla_auto", "flashmla_kv",
        _is_in_breakable_cuda_graph=lambda: not dense[0], _is_blackwell=lambda: blackwell,
    )  # fmt: skip
    choices = []
    for mode, takes_dense in (("EXTEND", False), ("EXTEND", True), ("MIXED", False), ("EXTEND", False)):
        dense[0] = takes_dense
        batch = case.batch(mode)
        case.backend.set_dsa_prefill_impl(batch)
        assert case.backend.use_mha == takes_dense
        method = case.backend.get_topk_transform_method(batch.forward_mode).name
        choices.append((case.backend.dsa_prefill_impl, method))
    sparse = ("flashmla_sparse", "RAGGED") if blackwell else ("flashmla_kv", "PAGED")
    assert choices == [sparse, ("flashmla_auto", "PAGED"), ("flashmla_kv", "PAGED"), sparse]


# -------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("layout", "pair"),
    [
        ("fp8_block_scale", ("flashmla_sparse", "flashmla_sparse")),
        ("fp8_block_scale", ("fa3", "flashmla_kv")),
        ("fp8", ("flashmla_kv", "flashmla_kv")),
        ("fp4", ("flashmla_sparse", "fa3")),
        ("fp4", ("fa3", "flashmla_sparse")),
    ],
)
def test_a_backend_that_cannot_read_its_pool(layout, pair):
    for stock in (True, False) if layout != "fp4" else (False,):  # SGLang has no fp4 pool
        with pytest.raises(ValueError, match="cannot read rows of KV cache layout"):
            make_backend(make_pool(layout, stock=stock), *pair)


def test_names_of_other_hardware_do_not_leave_our_pool_without_a_reader():
    """Over SGLang's own pool such names are accepted."""
    for layout in ("fp4", "fp8_block_scale"):
        with pytest.raises(ValueError, match="'aiter' is unknown"):
            make_backend(make_pool(layout), "flashmla_sparse", "aiter")
    stock = make_backend(make_pool("fp8_block_scale", stock=True), "flashmla_sparse", "aiter")
    assert stock.get_topk_transform_method().name == "PAGED"


def test_attention_sinks_are_refused(kernel):
    case = Case("fp4", [3], [2], *PAIRS["fp4"])
    with pytest.raises(ValueError, match="attention sinks are not computed over rows of KV cache layout fp4"):
        case.backend._forward_flashmla_sparse(
            q_all=torch.zeros(1, 4, 576).bfloat16(), kv_cache=case.pool.get_key_buffer(6), v_head_dim=RANK,
            page_table_1=torch.zeros(1, TOP_K, dtype=torch.int32), sm_scale=1.0, attn_sink=torch.zeros(4),
        )  # fmt: skip


def test_the_workspace_is_shared(kernel):
    """The backends of target, draft and draft steps run one after the other."""
    pool = make_pool("fp4")
    one, other = (make_backend(pool, *PAIRS["fp4"]) for _ in range(2))
    assert one._kvpool_sparse_reader._workspace is other._kvpool_sparse_reader._workspace
