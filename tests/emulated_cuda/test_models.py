"""SGLang's model classes on the device, in an Engine with CUDA graphs, against transformers' classes.

Prompts are answered alone and then at once. A distance is the mean absolute difference of log-probabilities
from transformers in float32, whose rows and index keys are rounded as the server's are. It may be 1.3 times
that of transformers in bfloat16, so that bounds are of arithmetic alone.
"""

import math
import os
import re
from typing import NamedTuple

import forks
import pytest
import random_deepseek
import random_hybrid
import torch

from emulated_cuda import conftest
from emulated_cuda.conftest import HERE, environment
from emulated_cuda.model_engine import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

CHUNK, NEW = 128, 6
SHARED, LONG = tokens(1, 172), tokens(11, 400)
#: The second has two chunks, the third begins like it, up to the end of a chunk; where logarithms begin.
DENSE = [(tokens(0, 5), 0), (SHARED, 0), (SHARED[:CHUNK] + tokens(2, 37), CHUNK), (tokens(4, 40), 0)]
#: A prefill graph of the size of the prompts' last chunks; SGLang captures 22, for seconds each.
OPTIONS = {"cuda_graph_bs_prefill": [64], "chunked_prefill_size": CHUNK}


class Model(NamedTuple):
    """A checkpoint's shape and changes, a layout of rows, further options, and the layout of a host tier."""

    shape: str
    layout: str
    options: dict = {}  # noqa: RUF012 (never changed)
    written: dict = {}  # noqa: RUF012
    host: str | None = None

    @property
    def is_sparse(self):
        return self.shape in random_deepseek.SPARSE

    @property
    def is_spread(self):
        """Whether ranks share a prefix pool."""
        return "dcp_size" in self.options

    @property
    def graphs(self):
        """Batches that SGLang runs as graphs: prefills of ranks and, as its log says, of KDA are eager."""
        return ("Prefill", "Decode")[self.is_spread or self.shape == "kimi_linear" :]

    @property
    def stored_from(self):
        """`model_oracle.Oracle`'s: where a prompt's chunks begin to attend their own tokens as stored.

        Dense ranks that share a prefix pool store them on several, so they attend what was computed.
        """
        if self.is_sparse:
            return 0 if self.is_spread else 1
        return len(LONG) if self.is_spread else 0

    @property
    def prompts(self):
        """Prompts, each with the first token whose log-probability is asked for.

        Two of a sparse model are longer than what its indexer selects, and begin alike; of ranks, all end
        within a group.
        """
        if not self.is_sparse:
            return DENSE
        selected, own = self.written["index_topk"], 52 + self.is_spread
        long, other = LONG[: selected + own], LONG[:selected] + tokens(2, own)
        return [(tokens(0, 60 + self.is_spread), 0), (long, selected // 2), (other, selected)]


BY_US = {"attention_backend": "kvpool_mla"}
K_SCALES = (0.0127, 0.0413, 0.0231)
#: Of the long prompts of test_sparse_mtp.py.
SPARSE_OPTIONS = {"context_length": 8192, "max_total_tokens": 12288, "chunked_prefill_size": 256}
RANKS = {"tp_size": 2, "dcp_size": 2, "max_total_tokens": 512}
#: The pool has room for all prompts, and is filled by two of `LONGEST`.
TIERED = {
    **RANKS, "max_mamba_cache_size": 64, "enable_hierarchical_cache": True, "hicache_ratio": 4,
    "hicache_write_policy": "write_through",
}  # fmt: skip
LONGEST = 600
MODELS = {
    "v3-fp4": Model("deepseek_v3", "fp4"),
    "v3-bf16": Model("deepseek_v3", "bf16", BY_US),
    "v3-fp8": Model("deepseek_v3", "fp8", BY_US, {"k_scales": K_SCALES}),
    "v3-fp8_block_scale": Model("deepseek_v3", "fp8_block_scale"),
    # A selection from fewer tokens, so that prompts can be short.
    "v32-fp4": Model("deepseek_v32", "fp4", {}, {"index_topk": 256}),
    "v32-fp4-ranks": Model("deepseek_v32", "fp4", RANKS, {"index_topk": 256}),
    "glm5-fp4": Model("glm5", "fp4", {}, {"index_topk": 256}),
    "glm5-fp8_block_scale-ranks": Model("glm5", "fp8_block_scale", RANKS, {"index_topk": 256}),
    "kimi-fp4": Model("kimi_linear", "fp4", {"max_mamba_cache_size": 64}),
    "kimi-fp4-ranks": Model("kimi_linear", "fp4", TIERED),
}
QUICK = ("v3-fp4", "v32-fp4")
PARAMETERS = [pytest.param(name, marks=[pytest.mark.quick] if name in QUICK else []) for name in MODELS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(shape, writer, **changes)`: its folder."""
    root, found = tmp_path_factory.mktemp("models"), {}

    def get(shape, writer=None, **changes):
        key = (shape, writer, *changes)
        if key not in found:
            write = writer or (random_deepseek if shape in random_deepseek.SHAPES else random_hybrid).write
            found[key] = str(write(root / str(len(found)), shape, **changes))
        return found[key]

    return get


@pytest.fixture(scope="module")
def ask(on_device):
    """`ask(model, folder, questions, **options)`: what the Engine of one process said, and its log."""

    def get(model, folder, questions, **options):
        options = {"kv_cache_layout": model.layout, **OPTIONS, **model.options, **options}
        code = "from emulated_cuda import model_engine\n"
        code += f"model_engine.main({folder!r}, {questions!r}, **{options!r})"
        environment = {"KVPOOL_PREFILL_READS_ROWS": str(int(model.stored_from == 0))}
        if model.is_sparse:
            environment = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
        if model.is_spread:
            environment |= {"SGLANG_NCCL_SO_PATH": os.devnull, "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS": "1"}
        found, log = conftest.said(on_device, code, SGLANG_EXTERNAL_MODEL_PACKAGE="", **environment)
        return {**found, "log": log}

    return get


@pytest.fixture(scope="module")
def answers(ask, checkpoint):
    """`answers(name)`: of one of MODELS."""
    found = {}

    def get(name):
        if name not in found:
            model = MODELS[name]
            questions = [(str(number), ids, NEW, first) for number, (ids, first) in enumerate(model.prompts)]
            questions.append(("batch", [ids for ids, _ in model.prompts], NEW, -1))
            if model.options is TIERED:
                questions += [(f"other {seed}", tokens(seed, LONGEST), 1, -1) for seed in (20, 21)]
                questions.append(("host hit", *questions[2][1:]))
            found[name] = ask(model, checkpoint(model.shape, **model.written), questions)
            found[name]["one"] = [found[name][str(number)] for number in range(len(model.prompts))]
        return found[name]

    return get


@pytest.fixture(scope="module")
def oracle(checkpoint, tmp_path_factory):
    """`oracle(model, cases)`: by dtype, transformers' log-probabilities of cases (`model_oracle.main`)."""
    folder, on_cpu = tmp_path_factory.mktemp("oracle"), environment("cpu")
    paths = [str(HERE.parent / name) for name in ("codec", "gpu")]
    on_cpu["PYTHONPATH"] = os.pathsep.join([*paths, on_cpu["PYTHONPATH"]])
    with forks.Forks("transformers", output=folder, environment=on_cpu) as own:

        def get(model, cases, chunk=CHUNK):
            written = {name: value for name, value in model.written.items() if name != "k_scales"}
            options = {"layout": model.layout, "chunk": chunk, "stored_from": model.stored_from}
            options["k_scales"] = model.written.get("k_scales")
            code = "from emulated_cuda import model_oracle\n"
            folder = checkpoint(model.shape, **written)
            code += f"model_oracle.main({model.shape!r}, {folder!r}, {cases!r}, **{options!r})"
            found, _ = conftest.said(own, code, 600)
            return {dtype: [torch.tensor(one) for one in all_] for dtype, all_ in found.items()}

        yield get


def likeliest(answer, *parts):
    """Of each position of the prompt and of decoded tokens: (log-probability, token) of the likeliest 20."""
    found = [likely for part in parts for likely in answer["meta_info"][f"{part}_top_logprobs"]]
    return [[(p, token) for p, token, *_ in likely] for likely in found if likely]


def said(answer, part):
    return torch.tensor([[p for p, _ in likely] for likely in likeliest(answer, part)])


def at_once(alone, other, tie):
    """Of an answer alone and one at once: how far apart their likeliest tokens are, and expected tokens.

    They are compared up to the first other token, which may be one less than `tie` below the likeliest.
    """
    far, expected = [], list(alone["output_ids"])
    for step, (own, others) in enumerate(zip(*(likeliest(a, "output") for a in (alone, other)), strict=True)):
        odds, others = ({token: p for p, token in found} for found in (own, others))
        far += [abs(odds[token] - others[token]) for token in odds.keys() & others.keys()]
        token = other["output_ids"][step]
        if token != expected[step]:
            if odds[expected[step]] - odds.get(token, -math.inf) < tie:
                expected[step:] = other["output_ids"][step:]
            break
    return sum(far) / len(far), expected


def case_of(ids, answer, **where):
    """What `model_oracle.main` needs for an answer."""
    where |= {"prompt": len(ids), "cached": answer["meta_info"]["cached_tokens"]}
    tokens = [[token for _, token in likely] for likely in likeliest(answer, "input", "output")]
    return ids + answer["output_ids"], tokens, where


def mean_distance(found, wanted):
    return torch.cat([(a - b).abs() for a, b in zip(found, wanted, strict=True)]).mean().item()


@pytest.fixture(scope="module")
def distances(answers, oracle):
    """`distances(name)`: by part, how far a server and bfloat16 arithmetic are from transformers."""
    found = {}

    def get(name):
        if name not in found:
            model, one = MODELS[name], answers(name)["one"]
            cases = [case_of(ids, answer) for (ids, _), answer in zip(model.prompts, one, strict=True)]
            wanted, found[name] = oracle(model, cases), {}
            for part, cut in (("input", slice(0, -NEW)), ("output", slice(-NEW, None))):
                exact, rounded = ([x[cut] for x in wanted[dtype]] for dtype in ("float32", "bfloat16"))
                own = [said(answer, part) for answer in one]
                found[name][part] = mean_distance(own, exact), mean_distance(rounded, exact)
                pairs = zip(rounded, exact, strict=True)
                found[name][part, "each"] = [mean_distance([a], [b]) for a, b in pairs]
                print(f"{name} {part}: %.4f from transformers, bfloat16 %.4f" % found[name][part])
        return found[name]

    return get


@pytest.mark.parametrize("part", ["input", "output"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_log_probabilities_are_transformers(name, part, distances):
    """Of prompts, and of decoded tokens, for which stored rows are read; the third has a prefix hit.

    With more tokens than an indexer selects they depend on its e4m3 queries and keys: the control of an
    oracle that selects in float32 is lower, and V3.2's decoded tokens were over its bound.
    """
    far, arithmetic = distances(name)[part]
    assert far < 1.3 * arithmetic


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_of_graphs_prefixes_and_batches(name, answers, distances):
    """Alone, with a prefix hit, and at once: the same tokens, from graphs of prefill and decode.

    Sums of batches of other sizes are rounded otherwise, on one kind of CPU more than on another, and FP4
    takes other codes then: a request may be twice as far from itself as bfloat16 puts it from float32, and
    tokens that are nearer are a tie. Beside a prompt that has a prefix, dense ranks attend in another form,
    and SGLang gathers a sparse model's rows of all requests as they are stored (RAGGED).
    """
    found, model = answers(name), MODELS[name]
    rounds, (_, arithmetic) = model.is_sparse and not model.is_spread, distances(name)["output"]
    bounds = [(7 if rounds else 2) * each for each in distances(name)["output", "each"]]
    pairs = zip(found["one"], found["batch"], strict=True)
    far, expected = zip(*(at_once(*pair, 2 * arithmetic) for pair in pairs), strict=True)
    print(f"{name} at once:", *(f"{a:.4f} of {b:.4f}" for a, b in zip(far, bounds, strict=True)))
    assert all(a < b for a, b in zip(far, bounds, strict=True))
    assert list(expected) == [a["output_ids"] for a in found["batch"]]
    assert found["one"][2]["meta_info"]["cached_tokens"] == model.prompts[2][1]
    for batch in model.graphs:
        assert re.search(f"{batch} batch.*cuda graph: True", found["log"])
    assert "self-check passed" in found["log"]


def test_a_host_hit_says_what_a_device_hit_says(answers):
    """Rows of both ranks, and their states, come back from the host."""
    found = answers("kimi-fp4-ranks")
    device, host = found["one"][2], found["host hit"]
    assert host["meta_info"]["cached_tokens_details"] == {"device": 0, "host": CHUNK}
    assert host["output_ids"] == device["output_ids"]
    assert likeliest(host, "output") == likeliest(device, "output")
