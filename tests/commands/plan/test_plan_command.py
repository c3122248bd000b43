"""The command `sgl-kvpool plan`: what is requested, what is printed; a run from the shell."""

import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from codec_oracle import ROW_BYTES
from live_processes import ended

from sgl_kvpool.cli import main
from sgl_kvpool.commands import plan as command
from sgl_kvpool.commands.named_model import find_model
from sgl_kvpool.commands.plan import Candidate, report
from sgl_kvpool.commands.plan.planned import Plan

CONFIGS = Path(__file__).resolve().parent / "configs"
V32 = str(CONFIGS / "deepseek_v32.json")
NO_GPU = "is not the memory of one GPU in GiB (MiB divided by 1024); give a number above 0, at most 1000"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpu-gb", "80"], "--model"),
        (["--model", V32], "--gpu-gb"),
        (["--model", V32, "--gpu-gb", "80 GB"], "--gpu-gb: '80 GB' is not a number; give the memory of one"),
        *(
            (["--model", V32, *f"--gpu-gb 80 {argv}".split()], message)
            for argv, message in (
                ("--gpu-gb 81559", f"--gpu-gb: 81559 {NO_GPU}"),  # nvidia-smi's of an H100
                ("--gpu-gb nan", f"--gpu-gb: nan {NO_GPU}"),
                ("--host-gb 0", "--host-gb: 0 is not memory of one node in GB"),
                ("--weights-gb -1", "--weights-gb: -1 is not memory in GiB; give a number of 0 or more, at"),
                ("--tp 0", "--tp: 0 is not a whole number from 1 to 2147483647"),
            )
        ),
    ],
)
def test_numbers_that_make_no_sense(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere/at/all"], "'nowhere/at/all' does not exist; name"),
        (["--model", "/"], "/ has no config.json"),
        (["--model", __file__], "is not JSON"),
        (["--model", V32, "--tp", "8", "--", "--tp-size=4"], "--tp 8 is 4 after --; leave out one"),
        (["--model", V32, "--", "--tp", "no"], "--tp: no is not a whole number from 1"),
        (
            ["--model", V32, "--", "vllm", "serve-it", "--tp", "8"],
            "'vllm serve-it' is no program that serves",
        ),
        (["--model", V32, "--", "--page-size", "64", "--tp"], "--tp after -- has no value; give one, or"),
        (["--model", V32, "--", "--config", "/no/file"], "--config '/no/file': No such file or directory"),
        (["--model", V32, "--", "--speculative-draft-model-path", "/no"], "draft-model-path: '/no' does not"),
        (["--model", V32, "--pp-size", "2", "--", "--pp-size=2"], "--pp-size 2 is given after -- too"),
        (["--model", V32, "--dcp-size", "2", "--", "--decode-context-parallel-size", "4"], "--dcp-size 2 is"),
        (["--model", V32, "--host-gb", "9", "--", "--hicache-ratio", "2"], "--hicache-ratio is set by this"),
        (["--model", V32, "--", "--kv-cache-layout", "fp4"], "--kv-cache-layout is set by this command"),
        (["--model", V32, "--", "--kv-cache-lay", "fp4"], "--kv-cache-lay is set by this command"),
        (["--model", V32, "--by-ranks", "--dcp-size", "8"], "--dcp-size is set by this command"),
        (["--model", V32, "--by-ranks", "--", "--enable-dp-attention"], "--enable-dp-attention is set by"),
        (["--model", V32, "--taken-gb", "81"], "--taken-gb 81 leaves no memory on a GPU of 80 GiB"),
    ],
)
def test_bad_input_is_refused_before_sglang_is_asked(argv, message, capsys):
    behind = argv.index("--") if "--" in argv else len(argv)
    argv = [*argv[:behind], "--gpu-gb", "80", *argv[behind:]]
    assert main(["plan", *argv]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "asking SGLang" not in said.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page-size: 64\ntp_size: 4\n", "--tp-size is set by this command"),
        ("kv-cache-layout: fp4\n", "--kv-cache-layout is set by this command"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_arguments_of_a_file_are_looked_at(text, message, tmp_path, capsys):
    (tmp_path / "server.yaml").write_text(text)
    argv = ["plan", "--model", V32, "--gpu-gb", "80", "--", "--config", str(tmp_path / "server.yaml")]
    assert main(argv) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: [config], "contains a list"),
        (lambda config: config | {"num_hidden_layers": 0}, "num_hidden_layers 0; it must be a whole number"),
        (lambda config: config | {"kv_lora_rank": "512"}, "kv_lora_rank '512'; it must be a whole number"),
        (lambda config: config | {"qk_rope_head_dim": -64}, "qk_rope_head_dim -64; it must be a whole"),
    ],
)
def test_invalid_config_json_is_refused_before_sglang_is_asked(change, message, tmp_path, capsys):
    """SGLang would plan 0 bytes per token or fail in transformers."""
    (tmp_path / "config.json").write_text(json.dumps(change(json.loads(Path(V32).read_text()))))
    assert main(["plan", "--model", str(tmp_path), "--gpu-gb", "80", "--weights-gb", "1"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "asking SGLang" not in said.out + said.err


def test_forms_of_model_names_and_folders(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).weights_gib is None
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(3 << 29)
    assert find_model(str(tmp_path)).weights_gib == 3.0
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize {1 << 29}\n"
    (tmp_path / "model-1.safetensors").write_text(pointer)
    assert find_model(str(tmp_path)).weights_gib == 2.0
    # The size of an index counts if one of its files is missing.
    for number, found in ((1, 2.0), (2, 2.5)):
        index = {"metadata": {"total_size": 5 << 29}, "weight_map": {"w": f"model-{number}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert find_model(str(tmp_path)).weights_gib == found
    assert find_model(str(tmp_path)).launch_path == str(tmp_path)
    assert find_model(str(tmp_path / "config.json")).launch_path == str(tmp_path)
    assert find_model(V32).launch_path == "MODEL"
    assert find_model("deepseek-ai/DeepSeek-V3.2").launch_path == "deepseek-ai/DeepSeek-V3.2"
    assert find_model("deepseek-ai/DeepSeek-V3.2").config is None


HOST = {"token_bytes": 25376, "index_bytes": 0, "slot_bytes": 0, "sharing_ranks": 1}


def answer(tokens=100_000, most=2048, **changes):
    """What SGLang answers, in the form of `sizing.size_server`."""
    return {
        "page_size": 64, "tokens": tokens, "max_running_requests": most, "state_slots": 0,
        "state_slot_bytes": 0, "cell_bytes": 25376, "draft_pool_bytes": 0,
        "workspace_bytes": 0, "available_bytes": 0,
        "mem_fraction_static": 0.88, "kv_cache_dtype": "bfloat16", "caches": 1, "ranks_per_node": 8,
        "is_capped": False, "stages": 1,
        "attention_copies": 1, "row_copies": 8, "draft_weights_gib": None, "requested_running_requests": None,
        "attention": {"prefill": "a", "decode": "b", "why": "c"}, "host": None,
        "model": {"name": "M", "kind": "dense", "linear_layers": 0, "layers_with_rows": 61,
                  "kv_lora_rank": 512, "qk_rope_head_dim": 64, "context_len": 131072},
        **changes,
    }  # fmt: skip


def plan(*servers, context=1000, host_gb=None, others=()):
    machine = {"gpu_gib": 80.0, "gpu_count": 8, "taken_gib": 3.0, "weights_gib": 0.0}
    return Plan.of(
        model="M/N", machine=machine, weights_known=True, tp_size=8, host_gb=host_gb,
        context_tokens=context, servers=servers, others=others,
    )  # fmt: skip


def test_requests_take_whole_pages():
    """1000 tokens are 16 pages of 64."""
    [server] = plan((Candidate("fp4"), answer(tokens=1024 * 5 + 960))).servers
    assert (server.requests, server.limit) == (5, "memory for rows")
    [server] = plan((Candidate("fp4"), answer(tokens=1024 * 5, caches=3))).servers
    assert (server.tokens, server.requests) == (3 * 1024 * 5, 15)


def test_what_bounds_requests():
    [server] = plan((Candidate("fp4"), answer(most=7))).servers
    assert (server.requests, server.limit) == (7, "--max-running-requests")
    made = plan((Candidate("fp4"), answer(most=7, state_slots=35)))
    assert made.servers[0].limit.startswith("states of linear layers")
    assert "states of linear layers" in report.text(made)
    [server] = plan((Candidate("fp4"), answer(most=7, state_slots=35, requested_running_requests=7))).servers
    assert server.limit == "--max-running-requests"
    [server] = plan((Candidate("fp4"), answer(most=7, state_slots=35, requested_running_requests=8))).servers
    assert server.limit.startswith("states of linear layers")


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ValueError, match=r"--context 131073 is longer .* 131072 tokens"):
        plan((Candidate("fp4"), answer()), context=131073)
    assert plan((Candidate("fp4"), answer()), context=None).context_tokens == 32768


def test_the_command_is_what_was_planned():
    server = Candidate("bf16", "fp4"), answer(host=HOST, added=["--dsa-decode-backend=x"])
    made = plan(server, host_gb=810.0, others=["--chat-template", "a b"])
    words = shlex.split(made.servers[0].command)
    assert words[:4] == ["sglang", "serve", "--model-path", "M/N"]
    pairs = dict(itertools.pairwise(words))
    assert pairs["--kv-cache-layout"] == "bf16"
    assert pairs["--kv-host-layout"] == "fp4"
    assert pairs["--tp-size"] == "8"
    assert pairs["--hicache-size"] == "101"  # of 101.25 GB of each of 8 ranks
    assert pairs["--chat-template"] == "a b"
    assert pairs["--dsa-decode-backend"] == "x"
    assert made.servers[0].host_tokens == (int(101e9) // 25376 // 64 + 1) * 64


def test_requests_on_the_host():
    """Each cache takes whole pages, and each request a slot where there are states."""
    rows = {**HOST, "token_bytes": 1 << 20}
    [server] = plan((Candidate("fp4"), answer(host=rows)), host_gb=8.0, context=1).servers
    tokens = (int(1e9) // (1 << 20) // 64 + 1) * 64
    assert (server.host_tokens, server.host_requests) == (tokens, tokens // 64)
    made = plan((Candidate("fp4"), answer(host=rows, caches=8)), host_gb=8.0, context=600)
    assert made.servers[0].host_requests == 8 * (tokens // 640)
    states = {**HOST, "token_bytes": 100, "slot_bytes": 1 << 24}
    hybrid = answer(host=states, tokens=100_000, state_slots=35)
    [server] = plan((Candidate("fp4"), hybrid), host_gb=8.0, context=64).servers
    assert server.host_requests == server.host_slots < server.host_tokens // 64


@pytest.mark.parametrize(
    "program",
    [(), ("sglang", "serve"), ("python3", "-m", "sglang.launch_server")],
    ids=["", "serve", "module"],
)
def test_a_published_command_is_taken_as_it_is(program, monkeypatch, capsys):
    asked = []

    def ask(machine, servers):
        asked.extend([machine["gpu_count"], *(server["arguments"] for server in servers)])
        return [answer() for _ in servers]

    monkeypatch.setattr(command, "ask", ask)
    published = ["--model-path", "deepseek-ai/DeepSeek-V3.2", "--tp=16"]
    ours, theirs = ["--pp-size", "2", "--max-total-tokens", "100"], ["--nnodes", "2", "--hicache-ratio", "2"]
    argv = ["plan", "--model", V32, "--gpu-gb", "80", *ours]
    assert main([*argv, "--", *program, *published, *theirs]) == 0
    gpus, stock, bf16, *_ = asked
    passed_on = [*ours, *theirs]
    assert gpus == 16
    assert stock == ["--tp-size", "16", *passed_on]
    assert bf16 == ["--tp-size", "16", "--kv-cache-layout", "bf16", *passed_on]


def test_ways_in_which_ranks_share_rows(monkeypatch, capsys):
    """One call plans each layout in three ways, with the arguments of drafts in each."""
    asked = []

    def ask(machine, servers):
        asked.extend(server["arguments"] for server in servers)
        ways = [answer(), answer(caches=8, row_copies=1), answer(tokens=800_000, row_copies=1)]
        return ways * (len(servers) // 3)

    monkeypatch.setattr(command, "ask", ask)
    drafts = ["--speculative-algorithm", "EAGLE"]
    assert main(["plan", "--model", V32, "--gpu-gb", "80", "--tp", "8", "--by-ranks", "--", *drafts]) == 0
    ways = [[], ["--attn-dp-size", "8"], ["--dcp-size", "8"]]
    assert asked[-3:] == [
        ["--tp-size", "8", *way, "--kv-cache-layout", "fp4_fp8_rope", *drafts] for way in ways
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for way, tokens in (("TP", "100000"), ("DP attention", "800000"), ("DCP", "800000")):
        of_way = [line for line in lines if line[: 1 + len(way.split())] == ["fp4,", *way.split()][:3]]
        (line,) = [line for line in of_way if tokens in line]
        assert "25376" in line


def test_a_reason_of_all_servers_is_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(command, "ask", lambda machine, servers: [{"refused": "why"}] * len(servers))
    assert main(["plan", "--model", V32, "--gpu-gb", "80"]) == 1
    said = capsys.readouterr()
    assert said.out.count("why") == 1
    assert "no server starts, with a layout or without: why" in said.out
    assert "mem-fraction-static" not in said.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_running(number, tmp_path):
    """The process that asks SGLang forks for each server; the signal goes to the command alone."""
    (tmp_path / "sglang.py").write_text("raise SystemExit('imported from the current folder')\n")
    program = Path(sys.executable).parent / "sgl-kvpool"
    with subprocess.Popen(
        [program, "plan", "--model", V32, "--gpu-gb", "80"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Background jobs of a script, and their children, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        started = []
        deadline = time.monotonic() + 300
        while len(started) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            started = [each.pid for each in family if _asks_sglang(each)]
        assert len(started) == 2, "no fork was seen"
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
        assert "Traceback" not in process.stderr.read()
    assert all(ended(pid, 3) for pid in started)  # a plan takes half a minute


def _asks_sglang(process):
    """Whether this is the planner's child or a fork of it; imports start other programs for a moment."""
    try:
        return "sgl_kvpool.commands.plan.child" in process.cmdline()
    except psutil.Error:
        return False


def test_too_little_for_a_host_tier():
    made = plan((Candidate("fp4"), answer(host=HOST)), host_gb=7.9)
    assert made.servers[0].hicache_size_gb == 0
    assert "--enable-hierarchical-cache" not in made.servers[0].command


def test_ranks_that_share_a_tier_hold_more_tokens():
    """The same --hicache-size, and eight times the tokens: each rank has an eighth of the one copy."""
    servers = [(Candidate("fp4"), answer(host={**HOST, "sharing_ranks": n})) for n in (1, 8)]
    (alone,), (shared,) = (plan(one, host_gb=1000.0).servers for one in servers)
    assert alone.hicache_size_gb == shared.hicache_size_gb == 125
    assert shared.host_tokens == (8 * 125 * 10**9 // 25376 // 64 + 1) * 64
    assert alone.host_tokens == (125 * 10**9 // 25376 // 64 + 1) * 64


def test_a_run_from_the_shell():
    """A hybrid model with a host tier, as JSON."""
    command = [
        *(Path(sys.executable).parent / "sgl-kvpool", "plan", "--model", CONFIGS / "kimi_linear.json"),
        *("--gpu-gb", "79.6", "--tp", "2", "--weights-gb", "91", "--host-gb", "200"),
        *("--context", "131072", "--json"),
        *("--", "--mamba-full-memory-ratio", "0.3", "--admin-api-key", "5ecret="),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert (made["schema"], made["tp_size"], made["context_tokens"]) == (1, 2, 131072)
    servers = {(server["layout"], server["host_layout"]): server for server in made["servers"]}
    # SGLang as it is, layouts, and those wider than the narrowest host tier.
    wider = [name for name, size in ROW_BYTES.items() if size > min(ROW_BYTES.values())]
    assert len(servers) == 1 + len(ROW_BYTES) + len(wider)
    in_order = sorted(ROW_BYTES, key=ROW_BYTES.get, reverse=True)
    tokens = [servers[name, None]["tokens"] for name in in_order]
    assert tokens == sorted(tokens)
    assert all(server["refused"] is None for server in made["servers"])
    fp4 = servers["fp4", None]
    assert fp4["token_bytes"] == 7 * 416
    assert fp4["hicache_size_gb"] == 100
    assert fp4["host_slots"] > 0
    assert "--mamba-full-memory-ratio 0.3 --admin-api-key SECRET" in fp4["command"]
    assert "5ecret" not in done.stdout + done.stderr
    assert servers["bf16", in_order[-1]]["host_tokens"] > servers["bf16", None]["host_tokens"]
