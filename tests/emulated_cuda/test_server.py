"""SGLang's Engine on the device: graphs, overlap scheduling, a host tier that is evicted and loaded back."""

import importlib.util
import json
import math
import os
from pathlib import Path

import forks
import pytest
from codec_oracle import LAYOUTS
from engine_cases import quick

from emulated_cuda import byte_engine
from emulated_cuda.conftest import MODULES, environment, said

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

ENGINE = Path(__file__).resolve().parents[1] / "engine"
GOLDENS = json.loads((ENGINE / "goldens.json").read_text())
NEW = byte_engine.GREEDY["max_new_tokens"]
#: Tokens of the whole pages of the third prompt that can be found; its last token is always computed.
LONG = (len(GOLDENS["prompts"][2]) - 1) // byte_engine.PAGE_SIZE * byte_engine.PAGE_SIZE
PARAMETERS = quick([(layout,) for layout in LAYOUTS], [("fp4",)])


@pytest.fixture(scope="module")
def without_device(tmp_path_factory):
    """`Forks` without a CUDA device."""
    folder = tmp_path_factory.mktemp("cpu")
    with forks.Forks(*MODULES, output=folder, environment=environment("cpu")) as process:
        yield process


def run(processes, device, layout, options=None, **environment):
    """What an Engine said, and its log."""
    code = "from emulated_cuda import byte_engine\n"
    code += f"byte_engine.main({device!r}, {layout!r}, **{options or {}!r})"
    found, log = said(processes, code, **environment)
    return {**found, "log": log}


@pytest.fixture(scope="module")
def answers(on_device, request):
    """`answers(layout, device)`: what the Engine of one process said, and its log."""
    found = {}

    def get(layout, device="cuda"):
        if (layout, device) not in found:
            processes = on_device if device == "cuda" else request.getfixturevalue("without_device")
            found[layout, device] = run(processes, device, layout)
        return found[layout, device]

    return get


def tokens(answers):
    return [answer["output_ids"] for answer in answers]


def golden_tokens(layout):
    return [golden["token_ids"][:NEW] for golden in GOLDENS["greedy"][layout][:3]]


def generated(answer):
    return [p for p, *_ in answer["meta_info"]["output_token_logprobs"]]


def mean_distance(one, other):
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("layout", PARAMETERS)
def test_tokens_are_those_of_the_cpu_server(answers, layout):
    """Of single requests, and of a batch of three that replays the graph of four."""
    found = answers(layout)
    assert tokens(found["first"]) == tokens(found["batch"]) == golden_tokens(layout)
    assert (found["aborted"], tokens([found["after"]])) == ("abort", golden_tokens(layout)[2:])
    assert "cuda graph: True" in found["log"]
    assert found["info"]["disable_overlap_schedule"] == "False"
    assert found["info"]["attention_backend"] == "kvpool_mla"
    assert found["info"]["kv_cache_layout"] == layout


@pytest.mark.parametrize("layout", PARAMETERS)
def test_a_host_hit_says_what_a_device_hit_said(answers, layout):
    check_hits(answers(layout))


def check_hits(found):
    hits = {name: found[name]["meta_info"]["cached_tokens_details"] for name in ("device_hit", "host_hit")}
    assert (hits["device_hit"]["device"], hits["device_hit"]["host"]) == (LONG, 0)
    assert (hits["host_hit"]["device"], hits["host_hit"]["host"]) == (0, LONG)
    assert tokens([found["host_hit"]]) == tokens([found["device_hit"]]) == tokens(found["first"][2:])
    assert generated(found["host_hit"]) == generated(found["device_hit"])


def list_of_free_pages():
    """The fault of SGLang's first list of free pages, as `clear` or the self-check's last `free` made it.

    It is made on the stream that constructs the scheduler. The first `free` of the event loop reads it on the
    loop's stream, and drops it without `record_stream`.
    """
    sglang = Path(importlib.util.find_spec("sglang").origin).parent
    lines = (sglang / "srt/mem_cache/allocator/paged.py").read_text().splitlines()
    line = {}
    for name in ("cat((*page_ids, self.free_pages))", "arange("):
        (line[name],) = (n for n, text in enumerate(lines, 1) if f"self.free_pages = torch.{name}" in text)
    replaced, made = (f"allocator/paged.py:{number}" for number in line.values())
    return [
        f"FAULT the block allocated at {place} was freed at {replaced}, and cat at {replaced} may still use "
        "it: its stream was not recorded (record_stream)"
        for place in (made, replaced)
    ]


@pytest.mark.parametrize("layout", PARAMETERS)
def test_the_device_found_one_fault_of_sglang(answers, layout):
    """Accesses without an order end the scheduler; what is found while memory is freed is in the log."""
    found = answers(layout)
    (fault,) = (line for line in found["log"].splitlines() if line.startswith("FAULT"))
    assert fault in list_of_free_pages()
    assert "self-check passed" in found["log"]


@pytest.mark.parametrize("layout", ["fp4", "fp8_block_scale"])
def test_log_probabilities_are_near_the_cpu_servers(answers, layout):
    """As near as two backends that read the same rows are in tests/engine."""
    found, wanted = answers(layout), answers(layout, "cpu")
    assert wanted["info"]["device"] == "cpu"
    prompts = (each["prompt"]["meta_info"]["input_token_logprobs"][1:] for each in (found, wanted))
    assert mean_distance(*([p for p, *_ in prompt] for prompt in prompts)) < 0.02
    for one, other in zip(found["first"], wanted["first"], strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert mean_distance(generated(one), generated(other)) < 0.02


#: Of decode context parallelism, with half of the rows in each rank: also in two stages, and in two groups
#: with other requests, one of which is idle or pads its batch.
RANKS = {
    "two": ("fp4", {"tp_size": 2}),
    "stages": ("fp8_block_scale", {"tp_size": 2, "pp_size": 2}),
    "groups": ("fp4", {"tp_size": 4, "attn_dp_size": 2}),
}


@pytest.mark.parametrize("name", quick([(name,) for name in RANKS], [("two",)]))
def test_ranks_that_share_a_prefix_pool(on_device, name):
    """Tokens and hits are those of one process; SGLang's allocator and tree count two tokens for a row."""
    layout, options = RANKS[name]
    rows = byte_engine.DEVICE_TOKENS // 2
    names = dict.fromkeys(("RANK_1_FAULTS", "SGLANG_NCCL_SO_PATH"), os.devnull)
    names |= {"KVPOOL_PREFILL_READS_ROWS": "0", "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}
    options = {"dcp_size": 2, "max_total_tokens": rows, **options}
    found = run(on_device, "cuda", layout, options, **names)
    assert tokens(found["first"]) == tokens(found["batch"]) == golden_tokens(layout)
    assert (found["aborted"], tokens([found["after"]])) == ("abort", golden_tokens(layout)[2:])
    check_hits(found)
    assert found["info"]["max_total_num_tokens"] == str(2 * rows)
    assert "cuda graph: True" in found["log"]
    assert {line for line in found["log"].splitlines() if line.startswith("FAULT")} <= {*list_of_free_pages()}
