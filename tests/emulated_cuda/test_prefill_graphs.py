"""Graphs of prefills of SGLang's DeepSeek-V3 against prefills without graphs, and faults of SGLang.

SGLang replays the smallest captured size that holds a batch if that is at most twice the batch's tokens. It
captures none for models with KDA layers (Kimi-Linear), unless `--cuda-graph-backend-prefill` is given.
"""

import json
import re

import pytest
import random_deepseek

from emulated_cuda.model_engine import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LONG = tokens(1, 300)
#: The last chunk of the first is prefilled together with the others.
TOGETHER = [LONG, *(tokens(seed, 60) for seed in range(10, 13))]
QUESTIONS = [("together", TOGETHER, 1, True), ("hit", LONG[:256] + tokens(2, 50), 1, False)]
GRAPHS = {"cuda_graph_bs_prefill": [64, 256]}
WITHOUT = {"cuda_graph_backend_prefill": "disabled"}
#: Graphs have the absorbed form, prefills without graphs the MHA form.
ABSORBED = "from sgl_kvpool.sglang_plugin.hooks import attention as a; a._forward_method = a._absorbed"
#: Undoes `models._end_race_of_experts`.
RACE = "from sglang.srt.layers.moe.fused_moe_triton import layer as a; "
RACE += "a.FusedMoE.__init__ = a.FusedMoE.__init__.__wrapped__"


@pytest.fixture(scope="module")
def run(on_device, tmp_path_factory):
    """`run(code, **options)`: the end of the process of an Engine, which runs the code first."""
    model = str(random_deepseek.write(tmp_path_factory.mktemp("model") / "v3", "deepseek_v3"))

    def start(code="", **options):
        code += "\nfrom emulated_cuda import model_engine\n"
        code += f"model_engine.main({model!r}, {QUESTIONS!r}, kv_cache_layout='fp4', **{options!r})"
        return on_device.run(code, limit_s=600, SGLANG_EXTERNAL_MODEL_PACKAGE="")

    return start


def test_prefills_of_graphs_are_those_without_graphs(run):
    """Bit for bit. No capture of decode graphs, which waits, comes between theirs and the self-check."""
    said = []
    for code, options in (("", GRAPHS), (ABSORBED, WITHOUT)):
        done = run(code, **options, cuda_graph_backend_decode="disabled")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        assert "self-check passed" in done.stderr
        batches = re.findall(r"Prefill batch.*#new-seq: (\d+).*cuda graph: (\w+)", done.stderr)
        assert max(batches) == (str(len(TOGETHER)), str(options is GRAPHS))
        assert {graph for _, graph in batches} == {str(options is GRAPHS)}
        together, hit = (json.loads(done.stdout.splitlines()[-1])[name] for name, *_ in QUESTIONS)
        assert hit["meta_info"]["cached_tokens"] == 256
        answers = [answer["meta_info"] for answer in (*together, hit)]
        said.append([{name: x for name, x in one.items() if "logprobs" in name} for one in answers])
    assert [len(one["input_token_logprobs"]) for one in said[0]] == [*map(len, TOGETHER), 0]
    assert said[0] == said[1]


def test_faults_of_sglang_with_deepseek_v3(run):
    """Those of `models`: the race ends the capture of decode graphs, and what is not recorded is logged."""
    done = run(RACE, **WITHOUT)
    assert done.returncode != 0
    assert "in forward_normal_dual_stream" in done.stderr
    race = (
        r"OrderFault: quantization/unquant\.py:\d+ reads on .* what _moe_sum_reduce_kernel .* wrote on stream"
    )
    assert re.search(race, done.stderr)
    for line in re.findall("^.*FAULT (.*)$", done.stderr, re.M):
        assert re.search(r"allocated at norm/__init__\.py:\d+ was freed at models/deepseek_v2\.py", line)
