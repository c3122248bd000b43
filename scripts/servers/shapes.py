"""Served models and their arguments: small random models on a GPU, the demo's on a CPU.

The random models' arguments follow tests/gpu/test_server_gpu.py, with other sizes of batches and pools.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts import ROOT
from scripts.kit.environment import Machine
from sgl_kvpool import KVArrangement, MLAKVCacheLayout, env
from sgl_kvpool.srt.facts.readers import SGLANG_READERS
from sgl_kvpool.srt.facts.topk_transform import working_pairs

LAYOUTS = tuple(layout.value for layout in MLAKVCacheLayout)
ARRANGEMENTS = tuple(arrangement.value for arrangement in KVArrangement.of_rows())
PAGE_SIZE = 64

_SEED_AND_PAGE = ("--random-seed", "0", "--page-size", str(PAGE_SIZE))
_HOST_TIER = (
    *("--enable-hierarchical-cache", "--enable-cache-report"),
    *("--hicache-write-policy", "write_through", "--hicache-ratio", "6"),
)


@dataclass(frozen=True)
class Load:
    """What servers of a model are asked.

    `prompts`: Prompts that are scored for accuracy, lists of tokens.
    `vocabulary`: First and last token id of random prompts.
    `hit_tokens`: Length of the prompts whose first token is timed; for hybrid models see `HYBRID_HIT_TOKENS`.
    `concurrency`, `request_tokens`, `new_tokens`: For throughput: concurrent requests, prompt length, and
      generated tokens per request.
    `is_sparse`: Whether the model has sparse attention (DSA).
    """

    prompts: Sequence[list[int]]
    vocabulary: Sequence[int] = (3, 511)
    hit_tokens: int = 1920
    concurrency: int = 16
    request_tokens: int = 256
    new_tokens: int = 128
    is_sparse: bool = False


@dataclass(frozen=True)
class Shape:
    """A model with the arguments and requests of its servers.

    `name`: Name in steps and in `limits.LIMITS`.
    `path`: Path of the checkpoint; "{models}" in it is the run's folder of models.
    `arguments`: Arguments of every server.
    `pool_tokens`: Size of the pool, unless a step leaves it to SGLang.
    `stock`: Arguments of the peer without a layout.
    `by_layout`: More arguments, by layout.
    `arrangements`: Arrangements in which it can be served.
    `writer`: Module of tests/gpu and shape of a random checkpoint to write.
    `needs`: Additional needs by layout; "stock" for the peer.
    `wait_s`: Time limit of a start; long on a GPU, since SGLang, FlashInfer and DeepGEMM compile with cold
      caches.
    """

    name: str
    path: str
    arguments: tuple[str, ...]
    load: Load
    pool_tokens: int
    stock: tuple[str, ...] = ()
    by_layout: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arrangements: tuple[str, ...] = ARRANGEMENTS
    writer: tuple[str, str] | None = None
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wait_s: float = 1200.0
    on_cpu: bool = False

    def server_arguments(
        self, layout: str | None, arrangement: str = "layer_major", *, host_tier: bool, capped: bool = True
    ) -> list[str]:
        """Arguments of one server, without model and port; `layout` None for the peer."""
        found = [*self.arguments]
        if layout is None:
            found += self.stock
        else:
            found += ["--kv-cache-layout", layout, *self.by_layout.get(layout, ())]
            if arrangement != "layer_major":
                found += ["--kv-cache-arrangement", arrangement]
        if capped:
            found += ["--max-total-tokens", str(self.pool_tokens)]
        if host_tier:
            found += _HOST_TIER
        return found

    def server_environment(self, layout: str | None) -> dict[str, str]:
        """Environment of one server; with a layout, all log-probabilities of a prompt depend on stored rows.

        Sparse attention always reads stored rows; a server with it refuses KVPOOL_PREFILL_READS_ROWS.
        """
        asked = {env.PREFILL_READS_ROWS: "1"} if layout is not None and not self.load.is_sparse else {}
        # The demo's class would replace SGLang's for every checkpoint of the architecture
        # DeepseekV2ForCausalLM.
        classes = {} if self.name == "demo" else {"SGLANG_EXTERNAL_MODEL_PACKAGE": ""}
        return {**classes, **self.environment, **asked}

    def written(self, models: Path) -> str:
        return self.path.replace("{models}", str(models))


def tokens(seed: int, count: int, vocabulary: Sequence[int] = (3, 511)) -> list[int]:
    """Random tokens that depend only on the seed."""
    return random.Random(seed).choices(range(vocabulary[0], vocabulary[1] + 1), k=count)


_GPU = (
    *("--skip-tokenizer-init", "--mem-fraction-static", "0.3", "--random-seed", "0"),
    *("--page-size", str(PAGE_SIZE), "--chunked-prefill-size", "256", "--cuda-graph-max-bs-decode", "16"),
)
_SHARED, _LONG = tokens(1, 600), tokens(11, 2608)
#: Prompts of unequal lengths; two share a prefix, three are longer than a chunk.
_PROMPTS = (tokens(0, 5), _SHARED, _SHARED[:512] + tokens(2, 77), tokens(3, 900), tokens(4, 40))
#: All but the first are longer than the 2048 tokens that an indexer selects.
_SPARSE_PROMPTS = (tokens(0, 48), _LONG, _LONG[:2304] + tokens(2, 304), tokens(3, 4000), tokens(4, 2112))


#: SGLang keeps a hybrid's state after each chunk and after the last full page. A repeated prompt is matched
#: without its last token: a prompt of 1920 tokens ends on a state that it may not use, and falls back to
#: 1792. So the length exceeds a chunk and is not a multiple of a page.
HYBRID_HIT_TOKENS = 1900


def _dense(name: str, writer: tuple[str, str], *more: str, hit_tokens: int = 1920) -> Shape:
    return Shape(
        name=name,
        path=f"{{models}}/{name}",
        arguments=(*_GPU, "--context-length", "4096", *more),
        load=Load(_PROMPTS, hit_tokens=hit_tokens),
        pool_tokens=8192,
        by_layout=dict.fromkeys(LAYOUTS, ("--attention-backend", "kvpool_mla")),
        writer=writer,
    )


def _sparse(machine: Machine) -> Shape:
    # fa3 is SGLang's choice for BF16 rows on Hopper.
    bf16: tuple[str, ...] = () if machine.has_fa3 else ("--dsa-decode-backend", "flashmla_sparse")
    by_layout = {layout.value: bf16 for layout in MLAKVCacheLayout if layout.is_sglang_native}
    needs = {}
    for layout in MLAKVCacheLayout:
        if SGLANG_READERS[layout].dsa_paired:  # SGLang's default does not read it: `fp8`, by tilelang
            pair = prefill, decode = next(working_pairs(layout))
            by_layout[layout.value] = ("--dsa-prefill-backend", prefill, "--dsa-decode-backend", decode)
            needs[layout.value] = tuple(dict.fromkeys(pair))
    torch_indexer = {} if "deep_gemm" in machine.modules else {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
    return Shape(
        name="v32",
        path="{models}/v32",
        arguments=(*_GPU, "--context-length", "8192"),
        load=Load(_SPARSE_PROMPTS, hit_tokens=3840, is_sparse=True),
        pool_tokens=16384,
        stock=("--kv-cache-dtype", "bfloat16", *bf16),
        by_layout=by_layout,
        environment={"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0", **torch_indexer},
        # The kernels of sparse attention need contiguous rows of a layer.
        arrangements=("layer_major",),
        writer=("random_deepseek", "deepseek_v32"),
        needs=needs,
    )


def random_shapes(machine: Machine) -> list[Shape]:
    """Random models with the shapes of DeepSeek-V3, V3.2 and Kimi-Linear."""
    return [
        _dense("v3", ("random_deepseek", "deepseek_v3")),
        _sparse(machine),
        # The number of states is limited, because SGLang would use half of the memory for them; a running
        # request has five.
        _dense(
            "kimi", ("random_hybrid", "kimi_linear"),
            "--max-running-requests", "16", "--max-mamba-cache-size", "128", hit_tokens=HYBRID_HIT_TOKENS,
        ),
    ]  # fmt: skip


def demo_shape() -> Shape:
    """The small trained model that comes with the package, served on a CPU."""
    from sgl_kvpool.commands.processes.server import cpu_arguments
    from sgl_kvpool.demo.model import held_out_windows, model_path

    # Without --model-path, --port and the pool size, which are added later.
    arguments = cpu_arguments("", 0)[4:]
    at = arguments.index("--max-total-tokens")
    return Shape(
        name="demo",
        path=str(model_path()),
        arguments=(*arguments[:at], *arguments[at + 2 :], *_SEED_AND_PAGE),
        load=Load(
            # One window of every second module.
            [window.token_ids for window in held_out_windows()[::4]],
            vocabulary=(32, 126), hit_tokens=960, concurrency=4, request_tokens=128, new_tokens=32,
        ),
        pool_tokens=4096,
        arrangements=("layer_major",),
        wait_s=540.0,
        on_cpu=True,
    )  # fmt: skip


def write_checkpoint(module: str, shape: str, folder: Path) -> None:
    """Write a random checkpoint with a writer of tests/gpu."""
    import importlib
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    importlib.import_module(module).write(folder, shape)
