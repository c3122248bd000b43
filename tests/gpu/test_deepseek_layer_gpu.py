"""SGLang's DeepseekV2AttentionMLA over kvpool_mla on a GPU, in every form of attention, against float64.

The layer has the dimensions of DeepSeek-V3 but for the hidden size and the number of heads. The reference
computes the layer from its weights; rows that the form reads from the pool are those stored there, decoded by
the tests' oracle.
"""

from contextlib import contextmanager

import codec_oracle as oracle
import pytest
import torch
from deepseek_layer import HIDDEN, NOPE, Q_RANK, V_DIM, build_layer
from engine_cases import quick
from graph_runners import batch_of, publish_one_rank
from test_cuda_backend_gpu import DEVICE, HEADS, LAYER, RANK, ROPE, Case

pytest.importorskip("sglang")
pytestmark = pytest.mark.gpu

#: Tokens of a request.
LONGEST = 21
BACKEND = "kvpool_mla"
#: Largest relative error of stored rows, of accuracy.md's table of random latents and of bf16.
ROW_ERROR = {"bf16": 0.005, "fp8": 0.035, "fp8_block_scale": 0.035, "fp4": 0.1, "fp4_fp8_rope": 0.1}
#: Largest relative error of the output: bf16 projections, weights and results.
OUTPUT_ERROR = 0.012
#: First position whose query llama_4_scaling multiplies by more than 1; 8192 in Mistral-Large-3.
SCALED_FROM = 4
#: Prefills of two requests, one behind the other: lengths, and how many of them are stored before.
FIRST, SECOND, DECODE = ([6, 9], [0, 0]), ([13, 20], [6, 9]), ([14, 21], [13, 20])


class Layer:
    """The layer on the GPU with its pool and backend, and its hidden states."""

    def __init__(self, layout, **options):
        with torch.device(DEVICE):
            self.attention = build_layer(layer_id=LAYER)
        self.case = Case(layout, [LONGEST] * 2, [0, 0], **options)
        self.slots, self.backend = self.case.slots, self.case.backend
        self.backend.prefill_attention_backend_str = self.backend.decode_attention_backend_str = BACKEND
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(2, LONGEST, HIDDEN, generator=generator).bfloat16()
        self.scaling_beta = 0.0  # of llama_4_scaling

    def factors(self, positions):
        """SGLang's factor of each position's query, `[positions, 1, 1]`; None as for most models."""
        from sglang.srt.models.deepseek_v2 import _get_llama_4_scaling

        if not self.scaling_beta:
            return None
        return _get_llama_4_scaling(SCALED_FROM, self.scaling_beta, positions)

    def run(self, mode, lengths, prefixes):
        """One forward: the layer's output, and the method that SGLang chose."""
        batch, hidden = self.inputs(mode, lengths, prefixes)
        with self.running(batch):
            self.prepare(batch)
            self.backend.init_forward_metadata(batch)
            out, method = self.forward(batch, hidden)
        return out.cpu(), method

    def inputs(self, mode, lengths, prefixes):
        """A batch, and the hidden states of its tokens."""
        case = self.case
        case.lengths, case.prefixes = lengths, prefixes
        case.slots = [own[:n] for own, n in zip(self.slots, lengths, strict=True)]
        batch = batch_of(case, mode)
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(lengths), sum(lengths)
        parts = zip(self.hidden, lengths, prefixes, strict=True)
        hidden = torch.cat([own[first:last] for own, last, first in parts]).to(DEVICE)
        return batch, hidden

    @contextmanager
    def running(self, batch):
        """SGLang's context of a forward."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        context = ForwardContext(attn_backend=self.backend)
        with forward_context(context, forward_batch=batch), torch.no_grad():
            yield

    def forward(self, batch, hidden):
        from sglang.srt.layers.layer_boundary import AttentionInputs, get_attn_tp_context

        inputs = AttentionInputs(hidden, batch, self.attention.prepare_qkv_latent)
        get_attn_tp_context().set_attn_inputs(inputs)
        state = self.attention.forward_prepare(
            batch.positions, hidden, batch, None, llama_4_scaling=self.factors(batch.positions)
        )
        return self.attention.forward_core(state), state[1].name

    def prepare(self, batch):
        """What a runner adds to a batch before the backend sees it."""

    def wanted(self, lengths, prefixes, stored):
        """The output in float64; each request's first `stored` rows are read from the pool."""
        parts = zip(range(2), lengths, prefixes, stored, strict=True)
        return torch.cat([self._request(*part) for part in parts])

    def _request(self, request, length, prefix, stored):
        q, rows = self._projected(request, length)
        if stored:
            rows[:stored] = self.stored(request, stored)
        q *= 1 + self.scaling_beta * (1 + torch.arange(length) // SCALED_FROM).log().double()[:, None, None]
        kv = (rows[:, :RANK] @ self._weight("kv_b_proj").T).view(length, HEADS, NOPE + V_DIM)
        scores = torch.einsum("qhd,khd->hqk", q[..., :NOPE], kv[..., :NOPE])
        scores += torch.einsum("qhd,kd->hqk", q[..., NOPE:], rows[:, RANK:])
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (scores * self.attention.scaling).masked_fill(later, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., NOPE:])
        return out[prefix:].flatten(1) @ self._weight("o_proj").T

    def _projected(self, request, length):
        """Queries `[length, HEADS, NOPE + ROPE]` and rows `[length, RANK + ROPE]` as computed."""
        x = self.hidden[request, :length].double() @ self._weight("fused_qkv_a_proj_with_mqa").T
        q, latent, rope = x.split([Q_RANK, RANK, ROPE], dim=-1)
        q = self._norm(q, "q_a_layernorm") @ self._weight("q_b_proj").T
        q = q.view(length, HEADS, NOPE + ROPE)
        cos, sin = self.attention.rotary_emb.cos_sin_cache[:length].cpu().double().chunk(2, -1)
        q[..., NOPE:] = _rotated(q[..., NOPE:], cos[:, None], sin[:, None])
        return q, torch.cat([self._norm(latent, "kv_a_layernorm"), _rotated(rope, cos, sin)], -1)

    def stored(self, request, length):
        """Values of a request's first rows in the pool, float64."""
        pool = self.case.pool
        rows = pool.get_row_buffer(LAYER).squeeze(1)[pool.slot_to_row(self.slots[request][:length])]
        values = oracle.decode(rows.view(torch.uint8).cpu().numpy(), self.case.layout, RANK, ROPE)
        return torch.from_numpy(values).double()

    def _weight(self, name):
        return getattr(self.attention, name).weight.detach().cpu().double()

    def _norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self._weight(name)


def _rotated(x, cos, sin):
    one, other = x[..., ::2], x[..., 1::2]
    return torch.stack([one * cos - other * sin, other * cos + one * sin], -1).flatten(-2)


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def layer(request):
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sgl_kvpool.sglang_plugin.hooks import attention

    publish_one_rank()
    attention.register_names()
    assert forward_mha._is_cuda
    yield Layer(request.param)
    attention.register_names()


@pytest.mark.parametrize("layer", quick([(one,) for one in oracle.LAYOUTS], [("fp4",)]), indirect=True)
def test_forms_of_attention(layer, monkeypatch):
    """Each form attends the rows that it should, stored or as computed, and no others."""
    from sgl_kvpool.sglang_plugin.hooks import attention

    layout, prefixes = layer.case.layout, SECOND[1]

    def check(step, mode, form, stored):  # the rows that are read from the pool
        found, method = layer.run(mode, *step)
        assert method == form
        distances = {
            name: distance(found, layer.wanted(*step, count))
            for name, count in {"none": [0, 0], "prefix": step[1], "all": step[0]}.items()
        }
        assert distances[stored] < OUTPUT_ERROR, distances
        if layout != "bf16":  # whose rows are as computed
            assert distances[stored] == min(distances.values()), distances

    check(FIRST, "EXTEND", "MHA_ONE_SHOT", "none")
    for request, length in enumerate(FIRST[0]):
        computed = layer._projected(request, length)[1]
        assert distance(layer.stored(request, length), computed) < ROW_ERROR[layout]
    layer.attention.chunked_prefix_cache_threshold = sum(prefixes) + 1
    check(SECOND, "EXTEND", "MLA", "prefix")
    layer.attention.chunked_prefix_cache_threshold = sum(prefixes)
    check(SECOND, "EXTEND", "MHA_ONE_SHOT", "all")
    with monkeypatch.context() as patch:
        patch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "8")  # three chunks, the last with one request alone
        check(SECOND, "EXTEND", "MHA_CHUNKED_KV", "prefix")
    layer.backend.absorbed_prefill.reads_rows = True
    with monkeypatch.context() as patch:
        patch.setenv("KVPOOL_PREFILL_READS_ROWS", "1")
        attention.register_names()
    check(SECOND, "EXTEND", "MLA", "all")
    check(DECODE, "DECODE", "MLA", "all")


@pytest.mark.parametrize("layer", quick([(one,) for one in oracle.LAYOUTS], [("fp4",)]), indirect=True)
def test_queries_that_are_scaled_by_their_position(layer):
    """Every batch of such a model is absorbed, the only form in which SGLang multiplies."""
    from sgl_kvpool.sglang_plugin.hooks import attention

    attention.let_sglang_scale_queries()
    layer.scaling_beta = 1.5
    steps = (FIRST, "EXTEND", [0, 0]), (SECOND, "EXTEND", SECOND[1]), (DECODE, "DECODE", DECODE[0])
    for step, mode, stored in steps:
        found, method = layer.run(mode, *step)
        assert method == "MLA"
        assert distance(found, layer.wanted(*step, stored)) < OUTPUT_ERROR
        layer.scaling_beta, unscaled = 0.0, layer.scaling_beta
        assert distance(found, layer.wanted(*step, stored)) > 5 * OUTPUT_ERROR
        layer.scaling_beta = unscaled
