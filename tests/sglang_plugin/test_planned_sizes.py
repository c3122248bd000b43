"""`sgl-kvpool plan` against SGLang's pool configurator in this process.

The planner's process answers for a GPU by itself; here SGLang's arguments are resolved with the patches of
the other tests of this folder, and its KVCacheConfigurator is made without a model runner.
"""

import json
from pathlib import Path

import pytest
import torch
from codec_oracle import ROW_BYTES
from configurators import sizes_of
from refused import EAGLE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_schedule

from sgl_kvpool.commands.plan import ask
from sgl_kvpool.commands.plan.plannable import IncompleteConfig, check_geometry

# The planner's process imports SGLang, for 15 s, and forks for each server.
pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parents[1] / "commands" / "plan" / "configs"
MACHINE = {"gpu_gib": 140.4, "gpu_count": 8, "taken_gib": 3.0, "weights_gib": 300.0}
NO_DRAFT = {"index_bytes": 0, "draft_bytes": 0, "spread_ranks": 1}
FRACTION = 0.8
#: model: ranks, layers.
MODELS = {"deepseek_v32": (8, 61), "kimi_k2": (8, 61), "kimi_linear": (4, 27)}
ROWS = {None: 1152, **ROW_BYTES}
TILELANG = ["--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"]
#: Bytes of a request in one linear layer on one of 4 ranks: three positions of q, k and v of 8 heads of 128
#: in bf16, and 8 matrices of 128 x 128 in float32.
STATE_BYTES = 3 * 3 * 1024 * 2 + 8 * 128 * 128 * 4
TIER = ["--enable-hierarchical-cache", "--hicache-size", "7"]
GROUPS = ["--tp-size", "8", "--attn-dp-size", "4"]
#: name: model, layout, arguments of further plans.
OTHERS = {
    "heuristic": ("deepseek_v32", "fp4", ["--tp-size", "8"]),
    "fp8 without tilelang": ("deepseek_v32", "fp8", ["--tp-size", "8"]),
    "tier": ("deepseek_v32", "fp4", ["--tp-size", "8", *TIER]),
    "narrow": ("kimi_linear", "bf16", ["--tp-size", "4", *TIER, "--kv-host-layout", "fp4"]),
    "no mtp": ("kimi_k2", "fp4", ["--tp-size", "8", *EAGLE]),
    "dp attention": ("kimi_k2", "fp4", ["--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"]),
    "replicas": ("kimi_k2", "fp4", ["--tp-size", "4", "--dp-size", "2"]),
    "pipeline": ("kimi_k2", "fp4", ["--tp-size", "4", "--pp-size", "2"]),
    "capped": ("kimi_k2", "fp4", ["--tp-size", "8", "--max-total-tokens", "1000"]),
    "more stages than layers": ("kimi_k2", None, ["--tp-size", "1", "--pp-size", "62"]),
    "more nodes than ranks": ("kimi_k2", None, ["--tp-size", "2", "--pp-size", "2", "--nnodes", "8"]),
    "parts of groups": ("kimi_k2", None, [*GROUPS, "--dcp-size", "2"]),
    "parts above a group": ("kimi_k2", None, [*GROUPS, "--dcp-size", "4"]),
    "unequal groups": ("kimi_k2", None, ["--tp-size", "8", "--dp-size", "3", "--enable-dp-attention"]),
    "whole": ("kimi_k2", None, ["--tp-size", "8"]),
    "parts": ("kimi_k2", None, ["--tp-size", "8", "--dcp-size", "2"]),
    "parts with a layout": ("kimi_k2", "fp4", ["--tp-size", "8", "--dcp-size", "2"]),
    "sparse parts": ("deepseek_v32", "fp4", ["--tp-size", "8", "--dcp-size", "8", *EAGLE, *TIER]),
    "hybrid pipeline": ("kimi_linear", None, ["--tp-size", "2", "--pp-size", "2"]),
    "heavy pipeline": ("kimi_k2", None, ["--tp-size", "1", "--pp-size", "2"]),
    "too heavy": ("kimi_k2", "fp4", ["--tp-size", "2"]),
    "small part": ("kimi_k2", None, ["--tp-size", "8", "--mem-fraction-static", "0.2"]),
    "mha": ("mha", None, []),
    "name with a colon": ("kimi_k2", None, ["--tp-size", "8", "--served-model-name", "team:k2"]),
    "parts of pages": ("kimi_k2", None, ["--page-size", "64", "--chunked-prefill-size", "1000"]),
    "parts of our pages": ("kimi_k2", "fp4", [*TIER, "--chunked-prefill-size", "1000"]),
    "no share": ("kimi_k2", None, ["--tp-size", "8", "--mem-fraction-static", "1.5"]),
}


def arguments(model, layout):
    words = ["--tp-size", str(MODELS[model][0]), "--mem-fraction-static", str(FRACTION)]
    words += ["--kv-cache-layout", layout] if layout else []
    return words + (TILELANG if (model, layout) == ("deepseek_v32", "fp8") else [])


@pytest.fixture(scope="session")
def folders(tmp_path_factory, checkpoints):
    root = tmp_path_factory.mktemp("planned")
    for model in MODELS:
        (root / model).mkdir()
        (root / model / "config.json").write_text((CONFIGS / f"{model}.json").read_text())
    return {**{model: str(root / model) for model in MODELS}, "mha": checkpoints["mha"]}


@pytest.fixture(scope="session")
def planned(folders):
    """`planned[key]`: the answers of the planner's process, which is started once for all."""
    keys = [(model, layout) for model in MODELS for layout in ROWS]
    servers = [
        {"model_path": folders[model], "layout": layout, "arguments": arguments(model, layout)}
        for model, layout in keys
    ]
    for name, (model, layout, words) in OTHERS.items():
        keys.append(name)
        asked = ["--kv-cache-layout", layout] if layout else []
        servers.append({"model_path": folders[model], "layout": layout, "arguments": [*asked, *words]})
    return dict(zip(keys, ask(MACHINE, servers), strict=True))


@pytest.fixture
def sglang(configured, folders):
    """`sglang(model, layout)`: KVCacheConfigurator of a server whose arguments are resolved here."""

    def build(model, layout):
        # The dtype that SGLang sees: another one for sparse attention.
        eight_bits = layout == "fp8" or (model, layout) == ("deepseek_v32", "fp8_block_scale")
        dtype = torch.float8_e4m3fn if eight_bits else torch.bfloat16
        argv = arguments(model, layout)
        fields = {"device": "cuda", "dtype": dtype, "stage": (0, MODELS[model][1])}
        return configured(folders[model], None, *argv, **fields)

    return build


def rest_gib(ranks, fraction):
    """Memory of a rank for rows and states, in GiB."""
    free = MACHINE["gpu_gib"] - MACHINE["taken_gib"]
    return free - MACHINE["weights_gib"] / ranks - free * (1 - fraction)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ROWS)
def test_sizes_are_those_of_sglangs_configurator(planned, sglang, model, layout):
    found = planned[model, layout]
    kvc = sglang(model, layout)
    rest = rest_gib(MODELS[model][0], FRACTION)
    if kvc.mambaish_config is not None:
        rest = kvc._handle_max_mamba_cache(rest)
        assert found["state_slots"] == get_schedule().max_mamba_cache_size > 0
        assert found["state_slot_bytes"] == 20 * STATE_BYTES
    sizes = sizes_of(kvc)  # which the tests of budgets compare with hand arithmetic
    assert (found["cell_bytes"], found["workspace_bytes"]) == (sizes._cell_size, sizes._fixed_overhead_bytes)
    assert (found["caches"], found["ranks_per_node"]) == (1, MODELS[model][0])
    config = kvc.config_from_budget(int(rest * 2**30))
    assert found["tokens"] == config.max_total_num_tokens
    assert found["page_size"] == get_schedule().page_size
    assert found["max_running_requests"] == kvc.resolve_max_num_reqs(config.max_total_num_tokens)


def test_arguments_that_a_refusal_names_are_added(planned):
    found = planned["fp8 without tilelang"]
    assert found["added"] == ["--dsa-prefill-backend=tilelang", "--dsa-decode-backend=tilelang"]
    assert (found["attention"]["prefill"], found["attention"]["decode"]) == ("dsa/tilelang", "dsa/tilelang")


def padded_token_bytes(layers, key_bytes=0):
    """Bytes of an `fp4` token on the host: page of 64 tokens and checksum, padded to a multiple of 4096."""
    return -(-(layers * 64 * (416 + key_bytes) + 16) // 4096) * 4096 // 64


def test_a_host_tier(planned):
    """Its bytes on the host; on the device the tier's engine needs page buffers."""
    tier, plain = planned["tier"], planned["heuristic"]
    kept = {"token_bytes": padded_token_bytes(61, key_bytes=132), "slot_bytes": 0, "sharing_ranks": 8}
    assert tier["host"] == {**kept, **NO_DRAFT}
    assert plain["host"] is None
    buffers = 128 << 20  # 8 slots of 16 MiB, the limit: 16 pages of 1.6 MB would need more
    assert tier["workspace_bytes"] - plain["workspace_bytes"] == pytest.approx(buffers, rel=0.1)
    narrow = planned["narrow"]
    states = {"slot_bytes": 20 * STATE_BYTES + 16, "sharing_ranks": 1}  # with a checksum
    assert narrow["host"] == {"token_bytes": padded_token_bytes(7), **states, **NO_DRAFT}
    assert narrow["cell_bytes"] == 7 * 1152


@pytest.mark.parametrize(("name", "caches", "tp_size"), [("dp attention", 4, 8), ("replicas", 2, 4)])
def test_caches_of_data_parallelism(planned, name, caches, tp_size):
    """Each cache has the memory that a rank's weights leave; DP attention has its weights once per cache."""
    found = planned[name]
    assert found["attention_copies"] == (caches if name == "dp attention" else 1)
    assert (found["caches"], found["ranks_per_node"]) == (caches, 8)
    assert found["row_copies"] == 8 // caches
    assert abs(found["available_bytes"] - rest_gib(tp_size, found["mem_fraction_static"]) * 2**30) <= 64


def test_stages_of_a_pipeline(planned):
    """61 layers are 30 and 31; the stage of 31 has fewer tokens, and the pipeline has as many."""
    found = planned["pipeline"]
    assert found["cell_bytes"] == 31 * 416
    rows_bytes = rest_gib(8, found["mem_fraction_static"]) * 2**30 - found["workspace_bytes"]
    assert abs(found["tokens"] - rows_bytes / (31 * 416)) <= found["page_size"] + 1
    assert (found["stages"], found["caches"], found["ranks_per_node"]) == (2, 1, 8)
    assert found["model"]["layers_with_rows"] == 61
    # Layers with rows of Kimi-Linear (0-based: 3, 7, 11, 15, 19, 23, 26) in stages of 13 and 14.
    hybrid = planned["hybrid pipeline"]
    assert (hybrid["cell_bytes"], hybrid["model"]["layers_with_rows"]) == (4 * 1152, 7)
    assert hybrid["state_slot_bytes"] == 10 * 2 * STATE_BYTES  # of 14 layers, on one of 2 ranks


def test_a_cap_of_the_tokens(planned):
    assert 1000 - planned["capped"]["page_size"] < planned["capped"]["tokens"] <= 1000
    assert planned["capped"]["is_capped"]
    assert not planned["whole"]["is_capped"]


def test_ranks_that_keep_parts_of_the_tokens(planned):
    """Two ranks of decode context parallelism hold twice the tokens, of the same bytes a rank."""
    parts, whole = planned["parts"], planned["whole"]
    assert whole["tokens"] == whole["available_bytes"] // (61 * 1152)
    assert parts["tokens"] == 2 * (parts["available_bytes"] // (61 * 1152))
    assert (parts["row_copies"], whole["row_copies"]) == (4, 8)
    of_groups = planned["parts of groups"]
    assert of_groups["tokens"] == 2 * (of_groups["available_bytes"] // (61 * 1152))
    assert (of_groups["caches"], of_groups["row_copies"]) == (4, 1)
    packed, layer_bytes = planned["parts with a layout"], ROWS["fp4"]
    of_rows = packed["available_bytes"] - packed["workspace_bytes"]
    assert packed["tokens"] == 2 * (of_rows // (61 * layer_bytes))
    assert packed["attention"]["decode"] == "kvpool_mla"
    sparse, key_bytes = planned["sparse parts"], 132  # every rank has all keys, and a draft's rows
    assert sparse["cell_bytes"] == 61 * layer_bytes + 8 * (62 * key_bytes + layer_bytes)
    of_rows = sparse["available_bytes"] - sparse["workspace_bytes"]
    assert sparse["tokens"] == 8 * 64 * (of_rows // sparse["cell_bytes"] // 64)
    assert sparse["host"]["spread_ranks"] == 8
    assert {sparse["attention"][phase] for phase in ("prefill", "decode")} == {"dsa/kvpool_mla"}


TOO_HEAVY = "300 GiB of weights do not fit 2 x 140.4 GiB: each GPU would hold 150.0 GiB of them"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heavy pipeline", TOO_HEAVY),
        ("more stages than layers", "--pp-size 62 is more than the 61 layers; give 61 at most"),
        ("more nodes than ranks", "--nnodes 8 does not divide 4 ranks; give a divisor of 4"),
        ("parts above a group", "--dcp-size 4 does not divide 2 attention ranks; give a divisor of 2"),
        # SGLang's assertion has no text.
        ("unequal groups", "'assert cfg.tp_size % cfg.attn_dp_size == 0' (tp_size 8, attn_dp_size 3)"),
        ("no mtp", "DeepseekV3ForCausalLM has no MTP layers (num_nextn_predict_layers"),
        # 4 ranks hold 75 GiB each.
        ("too heavy", TOO_HEAVY),
        ("too heavy", "and has 137.4 GiB before they are loaded (--taken-gb 3); 4 GPUs are enough (--tp 4)"),
        # A rank holds 37.5 GiB and has 0.2 x 137.4; half of 37.5 would fit. 37.5 / 137.4 is 0.273.
        ("small part", "rows 27.5 GiB together; the fraction that the weights need, above 0.273, would"),
        ("small part", "; 16 GPUs are enough (--tp 16, more than a node of eight has)"),
        ("mha", "no multi-head latent attention"),
        # Of `ServerArgs.check_server_args`, which SGLang's launcher calls.
        ("name with a colon", "served_model_name cannot contain a colon"),
        ("parts of pages", "chunked_prefill_size must be divisible by page_size"),
        ("parts of our pages", "not whole pages of 64 (--page-size); use --chunked-prefill-size 960"),
        (
            "no share",
            "--mem-fraction-static 1.5 is not a valid share of the memory; give a number above 0, at",
        ),
    ],
)
def test_refusals(planned, name, message):
    assert message in planned[name]["refused"]
    assert "tokens" not in planned[name]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("removed", ["kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers"])
def test_sizes_that_config_json_leaves_out(model, removed, tmp_path):
    """transformers would fill in DeepSeek-V3's sizes, such as a latent of 512."""
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    # SGLang's own configuration class: the code named by "auto_map" is not in the folder.
    model_config = ModelConfig(str(tmp_path), trust_remote_code=False)
    check_geometry(model_config, tmp_path)
    file.write_text(json.dumps({"text_config": config}))
    check_geometry(model_config, tmp_path)  # a model that also takes images
    for lacking in ({**config, removed: None}, {k: v for k, v in config.items() if k != removed}):
        file.write_text(json.dumps(lacking))
        text = f"config.json of {config['architectures'][0]} lacks {removed}, which"
        with pytest.raises(IncompleteConfig, match=text):
            check_geometry(model_config, tmp_path)
