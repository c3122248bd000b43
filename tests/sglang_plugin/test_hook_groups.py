"""Hook groups: a hook point that differs refuses exactly the groups that have it."""

import enum
import pkgutil
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
from refused import STEPS, TIER

from sgl_kvpool.refusal import Refusal
from sgl_kvpool.sglang_plugin import hook_groups
from sgl_kvpool.sglang_plugin.hook_groups import GROUPS
from sgl_kvpool.sglang_plugin.server import Server

POINTS = {group.name: {point.target: point for point in group.points()} for group in GROUPS}


def refused():
    """Names of the groups that do not work."""
    return {group.name for group in GROUPS if group.problem() is not None}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports all checked modules of SGLang, which takes half a minute in the first test of this file."""
    assert refused() == set()
    yield
    assert refused() == set()


class Gone:
    """An attribute that is missing from a class, even if a base class has it."""

    def __get__(self, instance, owner):
        raise AttributeError("gone")


@contextmanager
def without(target):
    """SGLang without the last name of `target`."""
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(owner, enum.EnumType):
            module_name, _, owner_attribute = owner_name.rpartition(".")
            kept = {k: v.value for k, v in owner.__members__.items() if k != name}
            patch.setattr(pkgutil.resolve_name(module_name), owner_attribute, enum.Enum(owner.__name__, kept))
        elif isinstance(owner, type):
            patch.setattr(owner, name, Gone(), raising=False)
        elif isinstance(owner, ModuleType):
            patch.delattr(owner, name)
        else:
            patch.setattr(type(owner), name, Gone())
        if target in sys.modules:
            patch.setitem(sys.modules, target, None)
        yield


def test_group_names_are_unique_and_have_no_separator():
    assert len(GROUPS) == len(POINTS)
    assert not any(hook_groups._SEPARATOR in name for name in POINTS)


@pytest.mark.parametrize(
    ("group", "point"), [(g, p) for g in GROUPS for p in g.points() if p.members and "__" not in p.target]
)
def test_a_member_that_is_gone_refuses_the_group(group, point):
    owner, _, name = point.target.rpartition(".")
    whole = pkgutil.resolve_name(point.target)
    lacking = [member for member in whole if member != point.members[-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil.resolve_name(owner), name, lacking)
        assert group.name in refused()
        assert f"has no {point.members[-1]}" in group.problem()


# -------------------------------------------------------------------- servers

CHAIN = ("--speculative-algorithm", "NEXTN", *STEPS, "--speculative-eagle-topk", "1")
SAMPLES = ("--enable-metrics", "--kv-error-sample", "512", "--kv-canary", "log")
PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake_tcp")
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl")
DENSE_CPU, DENSE_CUDA = "dense MLA on a CPU", "dense MLA on CUDA"
OVER_MOONCAKE = "disaggregation over mooncake on a CPU"
#: name: (checkpoint, device, arguments beside the layout, groups beside "pools").
SERVERS = {
    "dense": ("mla", "cpu", [], {DENSE_CPU}),
    "tier": ("mla", "cpu", [TIER], {DENSE_CPU, "host tier"}),
    "metrics": ("mla", "cpu", ["--enable-metrics"], {DENSE_CPU, "metrics"}),
    "hybrid": ("kda", "cpu", ["--disable-overlap-schedule"], {DENSE_CPU, "hybrid models"}),
    "cuda": ("mla", "cuda", [], {DENSE_CUDA}),
    "samples": ("mla", "cuda", SAMPLES, {DENSE_CUDA, "metrics", "error samples", "canary"}),
    "drafts": ("mla", "cuda", CHAIN, {DENSE_CUDA, "speculative decoding"}),
    "sparse": ("dsa", "cuda", [], {"sparse attention"}),
    "prefill": ("mla", "cpu", PREFILL, {DENSE_CPU, "disaggregation", OVER_MOONCAKE}),
    "decode": ("mla", "cpu", DECODE, {DENSE_CPU, "disaggregation", "disaggregation over nixl on a CPU"}),
}
#: group: a hook point of this group only.
BROKEN = {
    "pools": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class",
    DENSE_CUDA: "sglang.srt.layers.attention.merge_state.merge_state",
    "sparse attention": "sglang.kernels.ops.attention.dsa.dequant_k_cache.dequantize_k_cache_paged_dsa",
    "hybrid models": "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool._wait_for_layer",
    "speculative decoding": "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
    "host tier": "sglang.srt.managers.cache_controller.HiCacheController.move_indices",
    "host tier of hybrid models": "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_get_v2",
    "disaggregation": "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info",
    OVER_MOONCAKE: "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices",
    "disaggregation over nixl on a CPU": "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
    "metrics": "sglang.srt.utils.set_prometheus_multiproc_dir",
    "error samples": "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "canary": "sglang.srt.kv_canary.pool_patcher.api.register_pool_attacher",
}


@pytest.fixture
def serve(resolve, checkpoints):
    """`serve(name)`: SGLang's resolution of that server's arguments."""

    def run(name):
        model, device, arguments, _ = SERVERS[name]
        return resolve(checkpoints[model], "--kv-cache-layout", "fp4", *arguments, device=device)

    return run


@pytest.mark.parametrize("name", SERVERS)
def test_groups_of_a_server(serve, name):
    used = hook_groups.used_by(Server(serve(name)))
    assert {group.name for group in used} == {"pools", *SERVERS[name][3]}
    assert hook_groups.named(hook_groups.names(used)) == used


@pytest.mark.parametrize("broken", BROKEN)
def test_servers_that_use_a_broken_group_are_refused_by_name_and_the_others_start(serve, broken):
    (group,) = (group for group in GROUPS if group.name == broken)
    started = set()
    with without(BROKEN[broken]):
        assert broken in refused()
        for name in SERVERS:
            uses = {"pools", *SERVERS[name][3]}
            if not uses & refused():
                serve(name)
                started.add(name)
                continue
            text = f"^hook group '{broken}' does not work on SGLang 0.5.23: "
            with pytest.raises(Refusal, match=text) as error:
                serve(name)
            assert BROKEN[broken] in str(error.value)
            assert str(error.value).endswith(f"; leave out {group.leave_out}")
            assert "\n" not in str(error.value)
    assert started == {name for name in SERVERS if broken not in {"pools", *SERVERS[name][3]}}


def test_the_rules_for_models_are_checked_before_they_are_asked(resolve, checkpoints):
    with without("sglang.srt.configs.hybrid_arch.mambaish_config"):
        with pytest.raises(Refusal, match="hook group 'model rules' .* leave out --kv-cache-layout$"):
            resolve(checkpoints["mla"], "--kv-cache-layout", "fp4")
        resolve(checkpoints["mla"])
