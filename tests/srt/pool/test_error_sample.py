"""Metrics of sampled prefills against the codec's oracle, without and with planted faults; their cost."""

from types import SimpleNamespace

import pools
import prometheus_client
import pytest
import torch
from error_oracle import expected, plant, sampled
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kvpool import metrics
from sgl_kvpool.sglang_plugin.hooks.pools import _forward
from sgl_kvpool.sglang_plugin.options import ERROR_SAMPLE, record
from sgl_kvpool.transfer.host_options import HostTierOptions

PAGE, TOKENS, FAULTY = 64, 100, 6
SLOTS = torch.arange(TOKENS) + PAGE
pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture
def shown(monkeypatch):
    """`shown(name, **labels)`: value of a metric of this test's own registry."""
    registry, made = prometheus_client.CollectorRegistry(), {}
    for key, one in metrics.METRICS.items():
        kind = prometheus_client.Gauge if one.gauge_mode else prometheus_client.Counter
        made[key] = kind(one.name, one.help, one.labels, registry=registry)
    monkeypatch.setattr(metrics, "_metrics", made)
    return lambda name, **labels: registry.get_sample_value(f"sgl_kvpool_{name}", labels)


class Runner:
    """What the hook reads of SGLang's ModelRunner; a forward stores given values in every layer."""

    #: Layers whose latent and rope SGLang passes as one tensor.
    combined = ()

    def __init__(self, pool, every="64"):
        self.server_args, self.is_draft_worker, self.token_to_kv_pool = SimpleNamespace(), False, pool
        record(self.server_args, requested={ERROR_SAMPLE.name: every})

    def forward(self, values, slots=SLOTS, mode=ForwardMode.EXTEND, graph=False):
        def original(self, batch):
            for layer, (nope, rope) in values.items():
                pool, where = self.token_to_kv_pool, (SimpleNamespace(layer_id=layer), KVWriteLoc(slots))
                if layer in self.combined:
                    pool.set_kv_buffer(*where, torch.cat((nope, rope), 1)[:, None], None)
                else:
                    pool.set_mla_kv_buffer(*where, nope[:, None], rope[:, None])
            return SimpleNamespace(can_run_graph=graph)

        return _forward(original, self, SimpleNamespace(forward_mode=mode))


def values_of(pool, latent=1.0, rope=4.0):
    make = torch.Generator().manual_seed(3)
    return {
        layer: tuple(
            (torch.randn(TOKENS, width, generator=make) * size).bfloat16()
            for width, size in ((512, latent), (64, rope))
        )
        for layer in pools.layer_ids(pool)
    }


#: Layout, host layout, arrangement, k_scales, sizes of latent and rope, whether a layer's scales are doubled.
CASES = {
    "bf16, fp4 on the host": ("bf16", "fp4", "layer_major", {}, 1, 4, False),
    "token_major, fp4 on the host": ("fp8_block_scale", "fp4", "token_major", {}, 1, 4, False),
    "page_major, fp4": ("fp4", None, "page_major", {}, 1, 4, False),
    "k_scales": ("fp8", None, "layer_major", {5: 0.5, 6: 0.01, 7: 4.0}, 1, 4, False),
    "hybrid": ("fp8", None, "page_major", {3: 0.5, 6: 0.01, 7: 4.0}, 1, 4, False),
    "k_scale 1 on small latents": ("fp8", None, "layer_major", {}, 0.003, 4, False),
    "scales of a layer times 2": ("fp4", None, "layer_major", {}, 1, 4, True),
    "scales of tiles times 2": ("fp8_block_scale", "fp4_fp8_rope", "layer_major", {}, 1, 4, True),
    "rope above the clamp": ("fp4_fp8_rope", None, "layer_major", {}, 1, 300, False),
    "latent above the clamp": ("fp4", None, "layer_major", {}, 200000, 4, False),
}


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_the_oracle(shown, monkeypatch, tmp_path, case):
    name, host, arrangement, k_scales, latent, rope, double = CASES[case]
    count = 9 if double else 3  # more than eight layers are in groups
    options = {"host_tier": HostTierOptions(host)} if host else {}
    options["k_scales"] = k_scales
    if case == "hybrid":
        options |= {"layers": [3, FAULTY, 7], "page_size": PAGE, "size": 2 * PAGE}
        pool = pools.hybrid_pool(name, arrangement, **options)
    else:
        pool = pools.device_pool(name, arrangement, PAGE, 3, count, **options)
    if double:
        plant(tmp_path / "values", doubled=(FAULTY,), put=monkeypatch.setattr)
    values, runner = values_of(pool, latent, rope), Runner(pool)
    runner.combined = (pools.START + 2,)
    runner.forward(values)
    runner.forward(values)  # publishes the sample of the first
    some = sampled({layer: (*two, SLOTS[:, None]) for layer, two in values.items()})
    assert len(some[FAULTY][0]) == 32
    wanted = expected(some, name, host, k_scales, (FAULTY,) if double else ())
    for (metric, rows, part, layers), value in wanted.items():
        got = shown(metric, rows=rows, part=part, layers=layers)
        assert got == pytest.approx(value, rel=1e-5, abs=1e-12), (metric, rows, part, layers)
    clean = expected(some, name, host, k_scales)
    moved = {key[1:] for key in wanted if key[0] == "relative_error" and wanted[key] > 2 * clean[key]}
    assert {layers for _, _, layers in moved} == ({"5-6"} if double else set())


def test_long_prefills_are_sampled_at_all_places_of_a_page(shown):
    """Of values that are zero at every second place, as those of one of two ranks are."""
    pool = pools.device_pool("fp4", page_size=PAGE, pages=17)
    values = torch.randn(1024, 576).bfloat16() * (torch.arange(1024) % 2)[:, None]
    values = dict.fromkeys(pools.layer_ids(pool), values.split([512, 64], 1))
    runner = Runner(pool)
    for _ in range(2):
        runner.forward(values, torch.arange(1024) + PAGE)
    assert 0.07 < shown("relative_error", rows="device", part="latent", layers="5-5") < 0.11


def test_rounded_values_and_stages_without_layers_are_not_compared(shown):
    pool = pools.device_pool("fp8", page_size=PAGE, pages=3)
    e4m3 = {layer: tuple(x.to(torch.float8_e4m3fn) for x in two) for layer, two in values_of(pool).items()}
    runner = Runner(pool)
    runner.forward(e4m3)
    assert shown("sampled_prefills_total", kind="unseen") == 1
    none = Runner(SimpleNamespace(row_pool=SimpleNamespace(layer_num=0)))
    assert not none.forward({}).can_run_graph


def test_which_prefills_are_sampled(shown):
    """Every 64th, with graphs or without; no decode and no verification; padded tokens are left out."""
    pool = pools.device_pool("fp4", page_size=PAGE, pages=3)
    runner, values = Runner(pool), values_of(pool)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        runner.forward(values, mode=mode)
    assert pool.error_sample is None
    padded = {layer: tuple(torch.cat((x[:30], 1000 * x[:2])) for x in two) for layer, two in values.items()}
    slots = torch.cat((SLOTS[:30], torch.zeros(2, dtype=SLOTS.dtype)))
    runner.forward(padded, slots)
    for prefill in range(1, 64):
        runner.forward(values if prefill % 2 else {})
    assert 0.08 < shown("relative_error", rows="device", part="latent", layers="5-5") < 0.09
    for graph, stored in ((True, values), (False, {5: values[5]})):
        runner.forward(stored, mode=ForwardMode.MIXED, graph=graph)
        for _ in range(63):
            runner.forward({})
    counts = [shown("sampled_prefills_total", kind=kind) for kind in ("eager", "replayed", "unseen")]
    assert counts == [1, 1, 1]


def test_tokens_of_other_ranks_are_left_out(shown):
    with get_parallel().override(attn_dcp_rank=1, attn_dcp_size=2, dcp_enabled=True):
        pool = pools.device_pool("fp4", page_size=PAGE, pages=3)
        runner = Runner(pool)
        runner.forward(values_of(pool), SLOTS + PAGE)
        runner.forward({})
    assert 0.08 < shown("relative_error", rows="device", part="latent", layers="5-5") < 0.09


class Launches(TorchDispatchMode):
    """Operators that are no views, and the bytes of what they take and return."""

    def __enter__(self):
        self.names, self.size_bytes = [], 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in str(function):
            self.names.append(str(function))
            tensors = (x for x in (*args, found) if isinstance(x, torch.Tensor))
            self.size_bytes += sum(x.nbytes for x in tensors)
        return found


def test_cost(shown):
    """In a prefill that is not sampled nothing is launched; one in 64 has at most 0.5 % of its kernels.

    Assumed of a prefill without it: 30 kernels a layer, and 50 MB (in DeepSeek-V2-Lite's bf16, attention
    reads 28 MB and an expert 17 MB).
    """
    for layers, host in ((13, "same"), (27, "fp4")):
        options = {"readers": ("kvpool_mla",), "host_tier": HostTierOptions(host)}
        pool = pools.device_pool("fp8_block_scale", page_size=PAGE, pages=3, layers=layers, **options)
        runner, values = Runner(pool), values_of(pool)
        with Launches() as without:
            pool.set_mla_kv_buffer(None, KVWriteLoc(SLOTS), *(x[:, None] for x in values[5]), 5)
        runner.forward(values)
        runner.forward({})
        with Launches() as idle:
            runner.forward(values)
        assert idle.names == without.names * layers
        for _ in range(61):
            runner.forward({})
        with Launches() as sampled:
            runner.forward(values)
        assert len(sampled.names) > len(idle.names)
        # Rows are decoded, and converted for the host, outside torch.
        extra = len(sampled.names) - len(idle.names) + layers + (2 if host == "fp4" else 0)
        assert extra / 64 < 0.005 * 30 * layers
        assert (sampled.size_bytes - idle.size_bytes) / 64 < 0.005 * 50e6 * layers
