"""What `scripts.soak` does around its servers: prompts, arguments, tolerances, a report in every case."""

import json

import pytest

from scripts.soak import __main__ as soak
from scripts.soak import leg as soak_leg
from scripts.soak import prompts as soak_prompts
from scripts.soak import servers as soak_servers
from sgl_kvpool import env
from sgl_kvpool.demo.server import ServerFailed

TEXT = list(range(9500))  # as many tokens as a real tokenizer makes of the text that is shipped


def test_a_text_too_short_is_lengthened_by_its_own_windows():
    longer = soak_prompts.lengthened(TEXT, 40_000)
    assert longer == soak_prompts.lengthened(TEXT, 40_000)
    assert len(longer) >= 40_000
    assert longer[: len(TEXT)] == TEXT
    # Every copy has the whole text, in another order.
    copies = [tuple(longer[at : at + len(TEXT)]) for at in range(0, len(longer), len(TEXT))]
    assert all(sorted(copy) == TEXT for copy in copies)
    assert len(set(copies)) == len(copies)


def test_prompts_of_a_short_text_fill_the_pool():
    prompts = soak_prompts.make_prompts(TEXT, 8192, 64, 6 * 8192, seed=0)
    assert [prompt.token_ids for prompt in prompts] == [
        prompt.token_ids for prompt in soak_prompts.make_prompts(TEXT, 8192, 64, 6 * 8192, seed=0)
    ]
    assert sum(len(prompt.token_ids) for prompt in prompts) >= 6 * 8192
    assert max(len(prompt.token_ids) for prompt in prompts) > 8192 // 2


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="has no tokens"):
        soak_prompts.make_prompts([], 2048, 64, 2048, seed=0)


@pytest.mark.parametrize("error", [ValueError("no text"), ServerFailed("no port")])
def test_a_leg_that_fails_is_reported_and_the_others_run(monkeypatch, tmp_path, error):
    asked = []

    def one(leg, *_, **__):
        asked.append(leg.name)
        if leg.name == "fp8":
            raise error
        return {"name": leg.name, "violations": []}

    report = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "soak", one)
    monkeypatch.setattr("sys.argv", ["soak.py", "--legs", "fp8", "fp4", "--json", str(report)])
    assert soak.main() == 1
    assert asked == ["fp8", "fp4"]
    found = json.loads(report.read_text())
    assert found["violations"] == 1
    assert str(error) in found["legs"][0]["violations"][0]
    assert found["legs"][1]["violations"] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"bf16": 0.05, "bf16-on-fp4_fp8_rope": 3.0}),
        ("--model some/model", {"bf16": 0.5, "bf16-on-fp4_fp8_rope": 3.0}),
    ],
)
def test_tolerance(arguments, expected):
    options = soak.parse(["--legs", *expected, *arguments.split()])
    assert {leg.name: soak_leg.tolerance(leg) for leg in options.legs} == expected


def value_of(arguments, flag):
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


@pytest.fixture
def started(tmp_path):
    """Servers, not started, with which the soak runs a model with this config.json."""

    def servers(config, *arguments):
        (tmp_path / "config.json").write_text(json.dumps(config))
        legs = soak.parse(["--model", str(tmp_path), *arguments]).legs
        return {
            leg.name: (
                soak_servers.soaked_server(leg, tmp_path, tmp_path / "store", [], []),
                soak_servers.cold_server(leg, tmp_path, []),
            )
            for leg in legs
        }

    return servers


@pytest.mark.parametrize("config", [{"index_topk": 2048}, {"text_config": {"index_topk": 2048}}])
def test_a_model_with_sparse_attention(started, config):
    servers = started(config)
    assert len(servers) == len(soak_servers.LEGS)
    for soaked, cold in servers.values():
        assert value_of(soaked.arguments, "--kv-cache-arrangement") == "layer_major"
        for server in (soaked, cold):
            assert value_of(server.arguments, "--page-size") == "64"
            assert env.PREFILL_READS_ROWS not in server.environment
        if "--hicache-storage-backend-extra-config" in soaked.arguments:
            extra = value_of(soaked.arguments, "--hicache-storage-backend-extra-config")
            assert json.loads(extra) == {"prefetch_threshold": 64}


@pytest.mark.parametrize("config", [{}, {"index_topk": None}, {"text_config": None}])
def test_another_model_is_served_as_the_table_says(started, config):
    servers = started(config)
    for leg in soak_servers.LEGS:
        soaked, cold = servers[leg.name]
        assert value_of(soaked.arguments, "--kv-cache-arrangement") == leg.arrangement
        for server in (soaked, cold):
            assert value_of(server.arguments, "--page-size") == str(leg.page_size_tokens)
            assert server.environment[env.PREFILL_READS_ROWS] == "1"


def test_a_name_on_hugging_face_counts_as_dense():
    assert not soak_servers.of_model(soak_servers.LEGS[0], "some/model").sparse


def test_a_model_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        soak.parse(["--model", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "does not exist" in capsys.readouterr().err
