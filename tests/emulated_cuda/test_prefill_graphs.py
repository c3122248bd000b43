"""Graphs of prefills of SGLang's DeepSeek-V3 against prefills without graphs, and faults of SGLang.

Their rows are damaged on purpose (`error_oracle.plant`), which `--kv-error-sample` and SGLang's canary show.

SGLang replays the smallest captured size that holds a batch if that is at most twice the batch's tokens. It
captures none for models with KDA layers (Kimi-Linear), unless `--cuda-graph-backend-prefill` is given.
"""

import json
import re

import pytest
import random_deepseek
import torch
from error_oracle import expected, metrics_of, sampled
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from emulated_cuda.model_engine import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LONG = tokens(1, 300)
#: The last chunk of the first is prefilled together with the others.
TOGETHER = [LONG, *(tokens(seed, 60) for seed in range(10, 13))]
QUESTIONS = [("together", TOGETHER, 1, 0), ("hit", LONG[:256] + tokens(2, 50), 3, -1)]
GRAPHS = {"cuda_graph_bs_prefill": [64, 256]}
WITHOUT = {"cuda_graph_backend_prefill": "disabled"}
#: SGLang changes a byte of a cached row before each batch but the first two.
CANARY_OPTIONS = {"kv_canary": "log", "kv_canary_real_data": "partial", "kv_canary_sweep_interval": 1}
CANARY = {
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB": "1",
    "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP": "full",
    "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "2",
}
#: Graphs have the absorbed form, prefills without graphs the MHA form.
ABSORBED = "from sgl_kvpool.sglang_plugin.hooks import attention as a; a._forward_method = a._absorbed"
#: Undoes `models._end_race_of_experts`.
RACE = "from sglang.srt.layers.moe.fused_moe_triton import layer as a; "
RACE += "a.FusedMoE.__init__ = a.FusedMoE.__init__.__wrapped__"


@pytest.fixture(scope="module")
def run(on_device, tmp_path_factory):
    """`run(code, faults, **options)`: the end of an Engine that runs the code, metrics, the oracle's."""
    model = str(random_deepseek.write(tmp_path_factory.mktemp("model") / "v3", "deepseek_v3"))

    def start(code="", faults=None, **options):
        folder = tmp_path_factory.mktemp("run")
        options = {"kv_cache_layout": "fp4_fp8_rope", **options}
        if faults is not None:
            options |= {"enable_metrics": True, "kv_error_sample": "64"}
            options |= {"cuda_graph_backend_decode": "disabled"}
            code += f"\nimport os; os.environ['PROMETHEUS_MULTIPROC_DIR'] = {str(folder)!r}"
            code += f"\nfrom error_oracle import plant; plant({str(folder / 'values')!r}, **{faults!r})"
        code += "\nfrom emulated_cuda import model_engine\n"
        code += f"model_engine.main({model!r}, {QUESTIONS!r}, **{options!r})"
        done = on_device.run(code, limit_s=600, SGLANG_EXTERNAL_MODEL_PACKAGE="", **CANARY)
        if faults is None:
            return done, None, None
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        values = sampled(torch.load(folder / "values"))
        wanted = expected(values, options["kv_cache_layout"], doubled=faults.get("doubled", ()))
        found = MultiProcessCollector(CollectorRegistry(), path=str(folder)).collect()
        return done, metrics_of(found), wanted

    return start


def test_prefills_of_graphs_are_those_without_graphs(run):
    """Bit for bit. No capture of decode graphs, which waits, comes between theirs and the self-check."""
    said = []
    for code, options in (("", GRAPHS), (ABSORBED, WITHOUT)):
        done, metrics, wanted = run(code, {"doubled": [1], "wide": [2]}, **options)
        assert "self-check passed" in done.stderr
        batches = re.findall(r"Prefill batch.*#new-seq: (\d+).*cuda graph: (\w+)", done.stderr)
        assert max(batches) == (str(len(TOGETHER)), str(options is GRAPHS))
        assert {graph for _, graph in batches} == {str(options is GRAPHS)}
        together, hit = (json.loads(done.stdout.splitlines()[-1])[name] for name, *_ in QUESTIONS)
        assert hit["meta_info"]["cached_tokens"] == 256
        answers = [answer["meta_info"] for answer in (*together, hit)]
        said.append([{name: x for name, x in one.items() if "logprobs" in name} for one in answers])
        assert metrics.pop("sampled") == {"replayed" if options is GRAPHS else "eager": 1}
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    assert [len(one["input_token_logprobs"]) for one in said[0]] == [*map(len, TOGETHER), 0]
    assert said[0] == said[1]


def test_the_canary_finds_what_sglang_changes(run):
    done, metrics, wanted = run("", {"small": [0]}, **WITHOUT, kv_cache_layout="fp8", **CANARY_OPTIONS)
    assert metrics.pop("sampled") == {"eager": 1}
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    before, _, after = done.stderr.partition("kv_canary perturb: enabled")
    assert "install_canary" in before
    assert "violation" not in before
    slots = re.findall(r"perturb real_kv_used: group=FULL .* slot=(\d+) ", after)
    found = set(re.findall(r"violation: launch_tag=\w+ fail_reason=(\S+) slot_idx=(\d+) ", after))
    assert {reason for reason, _ in found} == {"verify_real_kv_hash"}
    assert slots[0] in {slot for _, slot in found} <= set(slots)


def test_faults_of_sglang_with_deepseek_v3(run):
    """Those of `models`: the race ends the capture of decode graphs, and what is not recorded is logged."""
    done, *_ = run(RACE, **WITHOUT)
    assert done.returncode != 0
    assert "in forward_normal_dual_stream" in done.stderr
    race = r"quantization/unquant\.py:\d+ reads on .* what _moe_sum_reduce_kernel .* wrote on stream"
    assert re.search(f"OrderFault: {race}", done.stderr)
    for line in re.findall("^.*FAULT (.*)$", done.stderr, re.M):
        assert re.search(r"allocated at norm/__init__\.py:\d+ was freed at models/deepseek_v2\.py", line)
