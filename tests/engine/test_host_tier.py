"""The host tier and SGLang's `file` store through real servers, in every layout."""

import re

import host_tier_servers as servers
import pytest
from codec_oracle import ROW_BYTES
from host_tier import stride_bytes
from host_tier_servers import AGAIN, AGAIN_ARRANGEMENT, DAMAGED_PAGE, FIRST, LAYOUTS, PAGE_SIZE
from tiny_model import PROMPTS

from sgl_kvpool import __version__

LAYERS = 3
WRITTEN_LATER = [name for name, arguments in servers.CHOICES.items() if "--hicache-write-policy" in arguments]
#: Tokens of the whole pages of the long prompt that can be found; its last token is always computed.
LONG = (len(PROMPTS[3]) - 1) // PAGE_SIZE * PAGE_SIZE


def marked(*named):
    """Parameters (layout, name of its server) for each of `named`, marked with the servers they need."""
    return [
        pytest.param(layout, names[layout], marks=pytest.mark.engine(names[layout], FIRST[layout]))
        for layout in LAYOUTS
        for names in named
    ]


def arrangement_of(layout, name):
    return AGAIN_ARRANGEMENT[layout] if name == AGAIN[layout] else "layer_major"


def cached(answer):
    found = answer["meta_info"]["cached_tokens_details"] or {}
    return {tier: found.get(tier, 0) for tier in ("device", "host", "storage")}


def log_probabilities(answer):
    """Of the tokens that were generated."""
    return [token[0] for token in answer["meta_info"]["output_token_logprobs"]]


def metric(answers, name, **labels):
    """Value of a sample on the server's /metrics page; None if there is none."""
    for line in answers["host_tier"]["metrics"].splitlines():
        found = re.match(r"(\w+)\{(.*)\} (\S+)$", line)
        if found and found[1] == name and all(f'{k}="{v}"' in found[2] for k, v in labels.items()):
            return float(found[3])
    return None


@pytest.mark.parametrize(("layout", "name"), marked(FIRST, AGAIN))
def test_a_host_hit_gives_the_tokens_of_a_device_hit(record, layout, name):
    """The first request gives these tokens too: its prefill reads the rows that it has stored itself."""
    answers = record(name)
    found = answers["host_tier"]
    assert cached(found["device_hit"]) == {"device": LONG, "host": 0, "storage": 0}
    assert cached(found["host_hit"]) == {"device": 0, "host": LONG, "storage": 0}
    first = answers["first"][3]["output_ids"]
    if name != FIRST[layout]:
        assert first == record(FIRST[layout])["first"][3]["output_ids"]
    assert found["device_hit"]["output_ids"] == first
    assert found["host_hit"]["output_ids"] == first
    assert found["host_hit"]["text"] == found["device_hit"]["text"]
    assert log_probabilities(found["host_hit"]) == log_probabilities(found["device_hit"])


@pytest.mark.parametrize(("layout", "name"), marked(AGAIN))
def test_a_restarted_server_finds_its_pages_in_the_store(record, layout, name):
    """The same tokens, in another arrangement of the pool."""
    before, after = record(FIRST[layout]), record(name)
    assert after["in_store"][layout] == before["stored"] > LONG // PAGE_SIZE
    # Prompts 1 and 3 begin with pages that are on the device by then. SGLang finds the rest in the store
    # only if these pages are in the host tier too, and servers of `WRITTEN_LATER` have not written them yet.
    at_once = name not in WRITTEN_LATER
    asked = zip(PROMPTS, before["first"], after["first"], strict=True)
    for number, (prompt, there, here) in enumerate(asked):
        hit, whole = cached(here), (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        if number in (0, 2):
            assert hit == {"device": 0, "host": 0, "storage": whole}
        elif number == 3 and at_once:
            assert hit["storage"] == whole - hit["device"] > 0
        assert here["output_ids"] == there["output_ids"]


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        pytest.param(other, first, marks=pytest.mark.engine(FIRST[other], FIRST["bf16"]))
        for first, *others in servers.SHARED
        for other in others
    ],
)
def test_another_layout_misses(record, layout, other):
    """A store full of the same prompts in another layout: nothing of it is read, and the output is right."""
    answers = record(FIRST[layout])
    assert answers["in_store"][other] > LONG // PAGE_SIZE
    assert answers["in_store"][layout] == 0
    for answer in (*answers["first"], *answers["host_tier"]["fillers"]):
        assert cached(answer)["storage"] == 0
    # Wide margins decide these tokens: they are those of bf16 rows in every layout.
    plain = record(FIRST["bf16"])
    assert [a["output_ids"] for a in answers["first"]] == [a["output_ids"] for a in plain["first"]]


@pytest.mark.parametrize(("layout", "name"), marked(AGAIN))
def test_a_damaged_file_ends_the_prefix(record, layout, name):
    """The pages before it are served from the store, it and the rest are computed; the tokens are right."""
    before, after = record(FIRST[layout]), record(name)
    whole, damaged = before["host_tier"]["fillers"][0], after["host_tier"]["fillers"][0]
    assert cached(damaged) == {"device": 0, "host": 0, "storage": DAMAGED_PAGE * PAGE_SIZE}
    assert damaged["output_ids"] == whole["output_ids"]
    kind = "page_read" if layout == "bf16" else "page_checksum"
    assert metric(after, "sgl_kvpool_failures_total", kind=kind) == 1
    assert metric(before, "sgl_kvpool_failures_total", kind=kind) == 0
    reason = {"bf16": "Short read"}.get(layout, "its checksum does not match its bytes, format and key")
    assert reason in after["log"]
    # The others came from the store whole.
    for answer in after["host_tier"]["fillers"][1:]:
        assert cached(answer)["storage"] == 400 // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE


@pytest.mark.engine(servers.LOSSY, FIRST["fp4"])
def test_lost_backups_are_misses(record):
    """Every backup fails: what was pushed out is computed again, rightly, and the server goes on."""
    answers = record(servers.LOSSY)
    found = answers["host_tier"]
    assert cached(found["device_hit"]) == {"device": LONG, "host": 0, "storage": 0}
    assert cached(found["host_hit"]) == {"device": 0, "host": 0, "storage": 0}
    first = record(FIRST["fp4"])["first"][3]["output_ids"]
    assert found["device_hit"]["output_ids"] == found["host_hit"]["output_ids"] == first
    assert metric(answers, "sgl_kvpool_failures_total", kind="backup_lost") > 0
    assert metric(answers, "sgl_kvpool_failures_total", kind="load_pages") > 0
    assert not metric(answers, "sgl_kvpool_transfer_bytes_total", direction="to_device")
    assert "a host page of the list was lost in its backup" in answers["log"]


@pytest.mark.parametrize(("layout", "name"), marked(FIRST, AGAIN))
def test_metrics(record, layout, name):
    answers = record(name)
    labels = {"layout": layout, "host_layout": layout, "arrangement": arrangement_of(layout, name)}
    labels |= {"backend": "kvpool_mla", "dcp_size": "1", "version": __version__}
    assert metric(answers, "sgl_kvpool_info", **labels) == 1
    page_bytes = PAGE_SIZE * LAYERS * ROW_BYTES[layout]
    for direction in ("to_host", "to_device"):
        engine = {"direction": direction, "engine": "cpu"}
        size_bytes = metric(answers, "sgl_kvpool_transfer_bytes_total", **engine)
        seconds = metric(answers, "sgl_kvpool_transfer_seconds_total", **engine)
        assert size_bytes % page_bytes == 0
        # After a restart few pages are new to the store.
        assert size_bytes >= (LONG if direction == "to_device" else PAGE_SIZE) * page_bytes // PAGE_SIZE
        assert 0 < seconds < 5
        assert metric(answers, "sgl_kvpool_transfer_gigabytes_per_second", **engine) > 0
    # SGLang counts the same transfers with padding and checksum, which stay on the host.
    pages = metric(answers, "sgl_kvpool_transfer_bytes_total", direction="to_host") / page_bytes
    pages -= 2 if name == servers.SELF_CHECKED else 0  # those of the self-check
    assert pages * stride_bytes(LAYERS, PAGE_SIZE, ROW_BYTES[layout]) == sum(
        float(line.rpartition(" ")[2])
        for line in answers["host_tier"]["metrics"].splitlines()
        if line.startswith("sglang:hicache_backup_bytes_total")
    )
    for kind in ("engine_build", "load_pages", "load", "backup_pages", "backup", "backup_lost", "page_write"):
        assert metric(answers, "sgl_kvpool_failures_total", kind=kind) == 0


@pytest.mark.parametrize(("layout", "name"), marked(FIRST, AGAIN))
def test_the_log_says_what_the_tier_is(record, layout, name):
    row_bytes = ROW_BYTES[layout]
    run_bytes = {
        "layer_major": PAGE_SIZE * row_bytes,
        "token_major": row_bytes,
        "page_major": LAYERS * PAGE_SIZE * row_bytes,
    }
    label = "page_first_direct" if name in (FIRST["bf16"], FIRST["fp8"]) else "page_first"
    line = (
        f"sgl-kvpool: host tier of 513 pages of 16 tokens ({PAGE_SIZE * LAYERS * ROW_BYTES[layout]} bytes, "
        f"all 3 layers), {label}, rows {layout}-r512-p64-b{ROW_BYTES[layout]}-v1, engine cpu, runs of "
        f"{run_bytes[arrangement_of(layout, name)]} bytes"
    )
    assert record(name)["log"].count(line) == 1


@pytest.mark.engine(servers.SELF_CHECKED)
def test_a_server_on_an_untested_sglang_checks_itself(record):
    """Once, before it serves, in negligible time; its answers are tested above."""
    (line,) = [line for line in record(servers.SELF_CHECKED)["log"].splitlines() if "self-check" in line]
    passed = r"sgl-kvpool: self-check passed in (\S+) s \(this SGLang is not a tested one\): (.*)"
    found = re.search(passed, line)
    assert float(found[1]) < 5
    rows, *attention, tier = found[2].split(", ")
    assert rows == f"rows of {LAYERS} of {LAYERS} layers"
    assert len(attention) == 2
    assert all(re.match(r"attention of 3 requests with a largest error of \d", one) for one in attention)
    assert tier == "2 pages to the host tier and back"


@pytest.mark.engine(servers.PAUSED)
def test_a_paused_server_can_be_flushed(record):
    """Its backups end and are acknowledged while it is paused, so that it becomes idle."""
    statuses = record(servers.PAUSED)["paused"]
    assert statuses[-1] == 200
    assert set(statuses[:-1]) <= {400}
