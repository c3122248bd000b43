"""SGLang's model classes on the device, in an Engine with CUDA graphs, against transformers' classes.

Prompts are answered alone, then at once, and with log-probabilities of their own. A distance is the mean
absolute difference of log-probabilities from transformers in float32, whose rows are rounded as the server's
are. It may be 1.3 times that of transformers in bfloat16, so that bounds are of arithmetic alone.
"""

import json
import os

import forks
import pytest
import random_deepseek
import random_hybrid
import torch

from emulated_cuda.conftest import HERE, environment
from emulated_cuda.model_engine import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CHUNK, NEW = 256, 6
SHARED, LONG = tokens(1, 300), tokens(11, 2300)
#: The second has two chunks, the third begins like it, up to the end of a chunk.
DENSE = [tokens(0, 5), SHARED, SHARED[:CHUNK] + tokens(2, 37), tokens(4, 40)]
#: Two are longer than what an indexer selects, and begin alike.
SPARSE = [tokens(0, 60), LONG, LONG[:2048] + tokens(2, 52)]
#: Prefill graphs of the sizes of the prompts' last chunks; SGLang captures 22.
OPTIONS = {"cuda_graph_bs_prefill": [64, CHUNK], "chunked_prefill_size": CHUNK}
SPARSE_OPTIONS = {"context_length": 8192, "max_total_tokens": 12288}
#: Name -> shape of the checkpoint, layout, further options.
MODELS = {
    "v3-fp4": ("deepseek_v3", "fp4", {}),
    "v3-bf16": ("deepseek_v3", "bf16", {"attention_backend": "kvpool_mla"}),
    "v32-fp4": ("deepseek_v32", "fp4", SPARSE_OPTIONS),
    "glm5-fp4": ("glm5", "fp4", SPARSE_OPTIONS),
    "kimi-fp4": ("kimi_linear", "fp4", {"max_mamba_cache_size": 64}),
}
QUICK = ("v3-fp4",)
PARAMETERS = [pytest.param(name, marks=[pytest.mark.quick] if name in QUICK else []) for name in MODELS]


def is_sparse(name):
    return MODELS[name][0] in random_deepseek.SPARSE


def prompts_of(name):
    return SPARSE if is_sparse(name) else DENSE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(shape)`: its folder."""
    root, found = tmp_path_factory.mktemp("models"), {}

    def get(shape):
        if shape not in found:
            writer = random_deepseek if shape in random_deepseek.SHAPES else random_hybrid
            found[shape] = str(writer.write(root / shape, shape))
        return found[shape]

    return get


@pytest.fixture(scope="module")
def answers(on_device, checkpoint):
    """`answers(name)`: what the Engine of one process said, and its log."""
    found = {}

    def get(name):
        if name not in found:
            shape, layout, options = MODELS[name]
            prompts = prompts_of(name)
            questions = [(f"one {number}", ids, NEW, False) for number, ids in enumerate(prompts)]
            questions += [("batch", prompts, NEW, False), ("prompts", prompts, 1, True)]
            options = {"kv_cache_layout": layout, **OPTIONS, **options}
            code = "from emulated_cuda import model_engine\n"
            code += f"model_engine.main({checkpoint(shape)!r}, {questions!r}, **{options!r})"
            sparse = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
            environment = sparse if is_sparse(name) else {"KVPOOL_PREFILL_READS_ROWS": "1"}
            done = on_device.run(code, limit_s=900, SGLANG_EXTERNAL_MODEL_PACKAGE="", **environment)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
            found[name] = {**json.loads(done.stdout.splitlines()[-1]), "log": done.stdout + done.stderr}
            found[name]["one"] = [found[name][f"one {number}"] for number in range(len(prompts))]
        return found[name]

    return get


@pytest.fixture(scope="module")
def oracle(checkpoint, tmp_path_factory):
    """`oracle(name, cases)`: by dtype, transformers' log-probabilities of cases (`model_oracle.main`)."""
    folder, on_cpu = tmp_path_factory.mktemp("oracle"), environment("cpu")
    paths = [str(HERE.parent / name) for name in ("codec", "gpu")]
    on_cpu["PYTHONPATH"] = os.pathsep.join([*paths, on_cpu["PYTHONPATH"]])
    with forks.Forks("transformers", output=folder, environment=on_cpu) as own:

        def get(name, cases):
            shape, layout, _ = MODELS[name]
            options = {"layout": layout, "chunk": CHUNK, "reads_own": not is_sparse(name)}
            code = "from emulated_cuda import model_oracle\n"
            code += f"model_oracle.main({shape!r}, {checkpoint(shape)!r}, {cases!r}, **{options!r})"
            done = own.run(code)
            assert done.returncode == 0, done.stderr[-3000:]
            found = json.loads(done.stdout.splitlines()[-1])
            return {dtype: [torch.tensor(one) for one in all_] for dtype, all_ in found.items()}

        yield get


def mean_distance(found, wanted):
    return torch.cat([(a - b).abs() for a, b in zip(found, wanted, strict=True)]).mean().item()


@pytest.mark.parametrize("name", PARAMETERS)
def test_prompts_are_transformers(name, answers, oracle):
    prompts = answers(name)["prompts"]
    said = [torch.tensor([p for p, *_ in a["meta_info"]["input_token_logprobs"][1:]]) for a in prompts]
    wanted = oracle(name, [(ids, 1, {}) for ids in prompts_of(name)])
    far = mean_distance(said, wanted["float32"])
    arithmetic = mean_distance(wanted["bfloat16"], wanted["float32"])
    print(f"{name}: {far:.4f} from transformers, bfloat16 {arithmetic:.4f}")
    assert far < 1.3 * arithmetic


@pytest.mark.parametrize("name", PARAMETERS)
def test_decoded_tokens_are_transformers(name, answers, oracle):
    """Tokens of single requests, the third with a prefix hit: what decode reads are stored rows."""
    said, cases = [], []
    for ids, answer in zip(prompts_of(name), answers(name)["one"], strict=True):
        said.append(torch.tensor([p for p, *_ in answer["meta_info"]["output_token_logprobs"]]))
        where = {"prompt": len(ids), "cached": answer["meta_info"]["cached_tokens"]}
        cases.append((ids + answer["output_ids"], len(ids), where))
    wanted = oracle(name, cases)
    far = mean_distance(said, wanted["float32"])
    arithmetic = mean_distance(wanted["bfloat16"], wanted["float32"])
    print(f"{name}: {far:.4f} from transformers, bfloat16 {arithmetic:.4f}")
    assert far < 1.3 * arithmetic


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_of_graphs_prefixes_and_batches(name, answers):
    """Alone, with a prefix hit, and at once: the same tokens, from graphs of prefill and decode."""
    found = answers(name)
    assert [a["output_ids"] for a in found["one"]] == [a["output_ids"] for a in found["batch"]]
    assert found["one"][2]["meta_info"]["cached_tokens"] >= (2048 if is_sparse(name) else CHUNK)
    assert "Decode batch" in found["log"]
    assert "self-check passed" in found["log"]
