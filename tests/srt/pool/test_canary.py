"""What SGLang's canary finds in pools of rows, by its kernels' reference and its own perturbation."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pools
import pytest
import torch
from sglang.kernels.ops.kv_canary.consts import FailReason, RealKvHashMode
from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag, VerifyPlan
from sglang.kernels.ops.kv_canary.write import WritePlan
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode
from sglang.srt.kv_canary.endpoint import build_endpoints_from_group
from sglang.srt.kv_canary.expected_inputs import ExpectedInputs
from sglang.srt.kv_canary.perturb.utils import flip_first_byte_in_source
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.state import CanaryDeviceState
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_kvpool.srt.pool import canary

pytestmark = pytest.mark.usefixtures("published")
CPU = torch.device("cpu")
MAKE = {
    **{
        " ".join(case): partial(pools.device_pool, *case, 64, pages=3, layers=9)
        for case in product(("bf16", "fp4_fp8_rope"), pools.ARRANGEMENTS)
    },
    "dsa": lambda: pools.dsa_pool("fp4"),
    "hybrid": lambda: pools.hybrid_pool("fp8", "page_major", page_size=64, size=128),
}
#: Slots of a sequence of five tokens, in two pages.
SLOTS = torch.tensor([64, 66, 130, 65, 129])


class Canary:
    """The canary of one pool, which wrote and verifies the slots of one sequence."""

    def __init__(self, pool, mode):
        canary.register()
        config = CanaryConfig(
            mode=CanaryMode.LOG, ring_capacity=64, sweep_interval=1, real_kv_hash_mode=mode,
            enable_write_input_assert=False, enable_verify_token_assert=False, stats_print_every_n_steps=0,
        )  # fmt: skip
        (self.group,) = attach_canary_buffers(
            pool=pool, config=config, device=CPU, kv_token_id_vs_position_offset=0
        )
        self.state = CanaryDeviceState.allocate(config=config, device=CPU, num_tags=len(CanaryLaunchTag))
        ends = build_endpoints_from_group(group=self.group, device_state=self.state)
        self.ends, self.mode = {end.kernel_kind: end for end in ends}, mode
        self.log = self.state.violation_log

    def write(self):
        plan = WritePlan.allocate(write_req_capacity=1, device=CPU)
        plan.write_offsets.copy_(torch.tensor([0, len(SLOTS)]))
        plan.write_seed_slot_indices.fill_(-1)
        plan.write_num_valid_reqs.fill_(1)
        idle = VerifyPlan.allocate(verify_capacity=1, device=CPU)
        idle.verify_num_valid.zero_()
        positions = torch.arange(len(SLOTS))
        for tag in (CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL):
            self.ends[tag].launch_per_forward(
                verify_plan=idle, write_plan=plan, input_ids=positions + 100, positions=positions,
                out_cache_loc=SLOTS, enable_write_input_assert=False, enable_verify_token_assert=False,
                expected_inputs=ExpectedInputs(tokens=positions, positions=positions),
                violation_log=self.log, real_kv_hash_mode=self.mode,
            )  # fmt: skip

    def found(self):
        """Slots whose rows a sweep finds changed."""
        plan = VerifyPlan.allocate(verify_capacity=len(SLOTS), device=CPU)
        plan.verify_slot_indices.copy_(SLOTS)
        plan.verify_expected_tokens.fill_(-1)
        plan.verify_expected_positions.copy_(torch.arange(len(SLOTS)))
        plan.verify_prev_slot_indices.copy_(torch.cat((torch.tensor([-1]), SLOTS[:-1])))
        plan.verify_num_valid.fill_(len(SLOTS))
        self.log.violation_write_index.zero_()
        sweep = self.ends[CanaryLaunchTag.SWEEP_K_FULL]
        sweep.launch_sweep(verify_plan=plan, violation_log=self.log, real_kv_hash_mode=self.mode)
        ring = self.log.violation_ring[: int(self.log.violation_write_index)].tolist()
        assert {row[-1] for row in ring} <= {FailReason.VERIFY_REAL_KV_HASH_MISMATCH}
        return [row[1] for row in ring]


def store(pool, slots):
    for layer in pools.layer_ids(pool):
        parts = (torch.randn(len(slots), 1, width).bfloat16() for width in (512, 64))
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), KVWriteLoc(slots), *parts)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("mode", [RealKvHashMode.PARTIAL, RealKvHashMode.ALL])
def test_what_the_canary_finds(name, mode):
    pool = MAKE[name]()
    store(pool, SLOTS)
    watch = Canary(pool, mode)
    watch.write()
    assert watch.found() == []
    others = torch.tensor([67, 128, 131, 68])
    store(pool, others)  # neighbours
    assert watch.found() == []
    bytes_of, at = pools.rows(pool), pools.at(pool, SLOTS)
    sources = watch.group.real_kv_sources_k
    layers = range(0, 9, 3) if len(bytes_of) == 9 else range(3)
    assert len(sources) == len(layers)
    for source, layer in zip(sources, layers, strict=True):
        before = [one.copy() for one in bytes_of]
        flipped = flip_first_byte_in_source(group=watch.group, source=source, slot_idx=130)
        assert flipped is not None
        place = pools.at(pool, 130)
        before[layer][(*place, 0)] ^= 0xFF
        assert all((one == other).all() for one, other in zip(before, bytes_of, strict=True))
        assert watch.found() == [130]
        bytes_of[layer][(*place, 0)] ^= 0xFF
        bytes_of[layer][(at[0][1], at[1][1], -1)] ^= 1
        assert watch.found() == ([66] if mode is RealKvHashMode.ALL else [])
        bytes_of[layer][(at[0][1], at[1][1], -1)] ^= 1
    store(pool, SLOTS[3:4])  # a slot that another request was given
    assert watch.found() == [65]


def test_without_real_data_there_are_no_sources():
    watch = Canary(pools.device_pool("fp4"), RealKvHashMode.NONE)
    assert watch.group.real_kv_sources_k == ()
    assert len(watch.group.k_tail) == (pools.PAGES * 4)
