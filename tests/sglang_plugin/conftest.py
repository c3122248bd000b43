"""Small checkpoints' configurations, and SGLang's argument resolution with the plugin loaded."""

import json
import os

import foreign_version
import forks
import pytest
from hybrid_configs import HYBRIDS, SPARSE
from managers import bootstrap, manager_of, no_groups  # noqa: F401  # fixtures

from sgl_kvpool import env
from sgl_kvpool.sglang_plugin import hook_groups
from sgl_kvpool.sglang_plugin import options as record


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """`launcher.run(code)`: a process after the imports that precede SGLang's loading of plugins."""
    ours = ("KVPOOL", "TRITON_INTERPRET")
    environment = {name: v for name, v in os.environ.items() if not any(word in name for word in ours)}
    # The first SGLang module that loads plugins.
    folder = tmp_path_factory.mktemp("launcher")
    with forks.Forks("sglang.srt.plugins", output=folder, environment=environment) as process:
        process.environment = environment
        yield process


@pytest.fixture
def other_sglang(tmp_path):
    """A folder that makes Python's metadata say that SGLang 0.6.1 is installed."""
    return foreign_version.write(tmp_path)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders with a config.json each: MLA, DSA, hybrid, MHA and odd geometries. No test loads weights."""
    from random_checkpoint import write_random_model

    root = tmp_path_factory.mktemp("checkpoints")
    mla = root / "mla"
    write_random_model(mla, layers=1)
    base = json.loads((mla / "config.json").read_text())

    def variant(name, **changes):
        folder = root / name
        folder.mkdir()
        for file in mla.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        (folder / "config.json").write_text(json.dumps({**base, **changes}))
        return str(folder)

    dsa = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **SPARSE}
    three = {"num_hidden_layers": 3, "first_k_dense_replace": 3}
    dsa3 = {**dsa, **three}
    return {
        "mla": str(mla),
        "mla3": variant("mla3", **three),
        **{f"mtp{n}": variant(f"mtp{n}", num_nextn_predict_layers=n) for n in range(3)},
        "norope": variant("norope", qk_rope_head_dim=0),
        "glm-lite": variant("glm-lite", architectures=["Glm4MoeLiteForCausalLM"]),
        "rank256": variant("rank256", kv_lora_rank=256),
        "rank448": variant("rank448", kv_lora_rank=448),
        "rope32": variant("rope32", qk_rope_head_dim=32),
        "dsa": variant("dsa", **dsa),
        "dsa-rank256": variant("dsa-rank256", **dsa, kv_lora_rank=256, qk_rope_head_dim=0),
        "dsa3": variant("dsa3", **dsa3),
        # The second layer reuses the first layer's top-k.
        "dsa3-shared": variant("dsa3-shared", **dsa3, indexer_types=["full", "shared", "full"]),
        "dsa3-norope": variant("dsa3-norope", **dsa3, qk_rope_head_dim=0),
        "dsa3-rank256": variant("dsa3-rank256", **dsa3, kv_lora_rank=256, qk_rope_head_dim=0),
        "dsa-rank1024": variant("dsa-rank1024", **dsa, kv_lora_rank=1024),
        "dsa-rank384": variant("dsa-rank384", **dsa, kv_lora_rank=384),
        "dsa-kpool": variant("dsa-kpool", **dsa, index_kpool=4),
        "dsa-glm": variant("dsa-glm", **{**dsa, "architectures": ["GlmMoeDsaForCausalLM"]}),
        "dsa-sinks": variant("dsa-sinks", **dsa, learnable_sink=True),
        "mha": variant("mha", architectures=["LlamaForCausalLM"], model_type="llama", head_dim=64),
        **{name: variant(name, **changes) for name, changes in HYBRIDS.items()},
    }


@pytest.fixture
def resolve(kept_context, monkeypatch):
    """`resolve(model, *argv)`: the resolved ServerArgs of `sglang serve`, before processes start.

    For "cuda", the resolution reads of a GPU only its capability, by default that of Hopper, and whether
    the platform can snapshot states.
    """
    import torch
    from sglang.srt.arg_groups import mamba_hook

    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "sgl_kvpool.demo.models")
    monkeypatch.setenv("_KVPOOL_CHILD_HOOK_GROUPS", "")  # resolution exports it, to later tests too
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    # Requests that other tests' records have left.
    monkeypatch.setattr(record, "_requested", set())
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()

    def run(model, *argv, device="cpu", capability=(9, 0)):
        if device == "cuda":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
            monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
        args = ["--model-path", model, "--device", device, "--mem-fraction-static", "0.3", *argv]
        server_args = prepare_server_args(args)
        server_args.resolve_once()
        server_args.check_server_args()
        return server_args

    return run


@pytest.fixture
def serve(resolve, checkpoints):
    """`serve(model, layout, *argv)`: a resolving view of a server, by default on Hopper."""
    from sglang.srt.arg_groups.overrides import resolving_view

    def run(model, layout, *argv, device="cuda", **gpu):
        asked = ("--kv-cache-layout", layout) if layout else ()
        return resolving_view(resolve(checkpoints[model], *asked, *argv, device=device, **gpu))

    return run


@pytest.fixture
def arranged(resolve, checkpoints):
    """`arranged(arrangement, ..., layout=)`: a resolved record of a server with both arguments."""

    def run(arrangement, *argv, layout="bf16", **gpu):
        named = ["--kv-cache-arrangement", arrangement] if arrangement else []
        return resolve(checkpoints["mla"], "--kv-cache-layout", layout, *named, *argv, **gpu)

    return run


@pytest.fixture
def configured(published, resolve, monkeypatch):
    """`configured(folder, layout, ...)`: SGLang's KVCacheConfigurator of a resolved server, with our hooks.

    On "cuda" a Hopper GPU answers. `draft` is the ModelConfig of a draft, whose configurator it then is;
    `fields` are those of the configurator.
    """
    import torch
    from configurators import configurator
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

    from sgl_kvpool.srt.attention import decode_verify, sparse

    # All hook groups of a scheduler at once, because the tests build one model after the other.
    elsewhere = ("arguments", "model rules", "launcher", "commands")
    hook_groups.apply(group for group in hook_groups.GROUPS if group.name not in elsewhere)
    for module in (decode_verify, sparse):
        monkeypatch.setattr(module, "sm_count_of", lambda device: 132)

    def build(folder, layout, *argv, device="cpu", dtype=None, draft=None, **fields):
        asked = ("--kv-cache-layout", layout) if layout else ()
        args = resolve(folder, *asked, *argv, device=device)
        get_parallel().clear_stamp()  # set for the previous server
        publish(args, role="scheduler", ranks=SpawnRanks(0, None, 0))
        dtype = dtype or (torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16)
        config = draft or model_config_of(args)
        return configurator(args, config, dtype, draft=draft is not None, **fields)

    return build
