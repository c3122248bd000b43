"""Implementations, dtype and refusals of a server whose model has sparse attention (DSA).

SGLang has one attention backend for such models and, in it, implementations for prefill and decode.
`sgl_kvpool.srt.facts.topk_transform` decides which of them work with a layout. Before SGLang chooses, this
module declares those that the user left open, if SGLang would choose wrongly; afterwards it checks the pair.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.attention.decode_config import MAX_LATENT_RANK
from sgl_kvpool.layout import POOL_ALIGN_BYTES, MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, Way, leave_out, use_words
from sgl_kvpool.sglang_plugin.options import ARRANGEMENT, LAYOUT
from sgl_kvpool.sglang_plugin.registry import uses
from sgl_kvpool.sglang_plugin.rules.attention import check_gpu
from sgl_kvpool.sglang_plugin.rules.features import BACKEND_FIELDS, READER_FEATURES, check_features, flag_of
from sgl_kvpool.sglang_plugin.server import Server, is_rocm
from sgl_kvpool.srt.facts.readers import DSA_BACKEND, PHASES, SGLANG_READERS, sglang_dsa_reads, stock_layout
from sgl_kvpool.srt.facts.topk_transform import (
    IMPLEMENTATIONS,
    KVPOOL_DECODE,
    MODE_FIELDS,
    SPARSE_BF16,
    UnsupportedCombination,
    check_pair,
    is_ours,
    nearest_pair,
)

#: SGLang's names of the backend; the second is the old one.
_NAMES = (DSA_BACKEND, "nsa")
_THEN = f", and SGLang uses {DSA_BACKEND}"
_IMPLEMENTATION_FIELDS = ("dsa_prefill_backend", "dsa_decode_backend")

uses("sglang.srt.configs.model_config.get_dsa_index_kpool", "model rules", takes=("config",))


def check_server(server: Server) -> None:
    """Refuse devices, arrangements and backends that sparse attention does not work with."""
    name = server.model_name
    if server.device_name != "cuda":
        raise Refusal(
            f"{LAYOUT.flag} {server.layout} serves models with sparse attention, such as {name}, on NVIDIA "
            f"GPUs only, and the device is {server.device_name}",
            leave_out(LAYOUT.flag, text=f"serve it without {LAYOUT.flag}"),
        )
    if server.arrangement is not KVArrangement.LAYER_MAJOR:
        raise Refusal(
            f"{ARRANGEMENT.flag} {server.arrangement} does not work with {name}: the kernels of sparse "
            "attention need the rows of a layer to be adjacent",
            leave_out(ARRANGEMENT.flag),
        )
    if wrong := _given(BACKEND_FIELDS, server.server_args, lambda value: value not in _NAMES):
        raise _not_sparse(" and ".join(wrong), name, _leave_out(wrong, _THEN))
    if not server.has_own_draft:
        check_draft_backend(server, server.server_args.speculative_draft_attention_backend)


def declare_implementations(server: Server) -> dict[str, str | bool] | None:
    """Implementations that the user left open, for rows that our decode attends."""
    ranks = server.view.dcp_size
    if not is_ours(server.layout, ranks):
        return None
    _check_reader(server)
    if wrong := _given(_IMPLEMENTATION_FIELDS, server.server_args, lambda value: value != SPARSE_BF16):
        prefill = f"prefill uses {SPARSE_BF16} over decoded rows, and decode uses {KVPOOL_DECODE}"
        used = prefill if ranks == 1 else f"both phases use {KVPOOL_DECODE}"
        raise UnsupportedCombination(
            f"{' and '.join(wrong)} cannot read rows of {_rows(server)}",
            _leave_out(wrong, f", and {used}, under SGLang's name {SPARSE_BF16}"),
        )
    if server.server_args.dcp_replicate_q_proj:
        raise Refusal(
            f"--dcp-replicate-q-proj does not work with {_rows(server)}: SGLang allocates the weights of all "
            "heads after it has sized the pool",
            leave_out("--dcp-replicate-q-proj"),
        )
    # On Hopper SGLang would choose fa3 for decode, which attends rows as they are stored; with ranks, trtllm,
    # and those weights.
    declared: dict[str, str | bool] = dict.fromkeys(_IMPLEMENTATION_FIELDS, SPARSE_BF16)
    return declared if ranks == 1 else {**declared, "dcp_replicate_q_proj": False}


def _rows(server: Server) -> str:
    """Arguments because of which our decode attends the rows."""
    ranks = server.view.dcp_size
    return f"{LAYOUT.flag} {server.layout}" + (f" with --dcp-size {ranks}" if ranks > 1 else "")


def _given(fields: tuple[str, ...], view: Any, is_wrong: Callable[[str], bool]) -> list[str]:
    """The arguments among `fields` whose values are wrong, as the user writes them."""
    values = {field: getattr(view, field) for field in fields}
    return [
        f"{flag_of(name)} {value}" for name, value in values.items() if value is not None and is_wrong(value)
    ]


def _leave_out(arguments: list[str], then: str = "") -> Way:
    them = "it" if len(arguments) == 1 else "them"
    return leave_out(*(argument.split()[0] for argument in arguments), text=f"leave {them} out{then}")


def check_draft_backend(server: Server, backend: str | None) -> None:
    """Refuse a draft's explicit backend that does not support sparse attention.

    A separate draft model is checked when its pool is built, since its attention is not known before.
    """
    if backend not in (None, *_NAMES):
        what = f"--speculative-draft-attention-backend {backend}"
        raise _not_sparse(what, server.model_name, _leave_out([what], _THEN))


def _not_sparse(what: str, name: str, way: Way) -> Refusal:
    return Refusal(f"{what} cannot compute the sparse attention (DSA) of {name}", way)


def _check_reader(server: Server) -> None:
    import torch
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    ranks, model_config, name = server.view.dcp_size, server.model_config, server.model_name
    without = () if ranks == 1 else ("--dcp-size",)
    plain = use_words(f"{LAYOUT.flag}={MLAKVCacheLayout.BF16}", without=without)
    if sglang_dsa_reads(server.layout):
        plain = leave_out(*without, text="leave out --dcp-size")
    rank, row_bytes = model_config.kv_lora_rank, server.row_format.row_bytes
    if rank > MAX_LATENT_RANK or row_bytes % POOL_ALIGN_BYTES:
        raise Refusal(
            f"{name} has kv_lora_rank={rank}, whose rows of {_rows(server)} have {row_bytes} bytes; "
            f"{KVPOOL_DECODE} supports up to kv_lora_rank {MAX_LATENT_RANK}, and rows of multiples of "
            f"{POOL_ALIGN_BYTES} bytes",
            plain,
        )
    if model_config.dtype != torch.bfloat16:
        raise Refusal(
            f"--dtype {str(model_config.dtype).removeprefix('torch.')} does not work with {_rows(server)} "
            "and sparse attention, whose kernels multiply bfloat16",
            use_words("--dtype=bfloat16"),
        )
    check_gpu(_rows(server), plain)
    # SGLang reads `hf_config` when it resolves arguments and `hf_text_config` when it builds attention.
    configs = (model_config.hf_config, model_config.hf_text_config)
    if any(getattr(config, "learnable_sink", False) for config in configs):
        raise Refusal(
            f"{name} has learnable attention sinks, which are not computed over rows of {_rows(server)}",
            plain,
        )
    index_kpool = get_dsa_index_kpool(model_config.hf_config)
    check_pair(server.layout, SPARSE_BF16, SPARSE_BF16, index_kpool=index_kpool, ranks=ranks)


def check_backends(server: Server) -> None:
    if env.flag(env.PREFILL_READS_ROWS):
        raise Refusal(
            f"{env.PREFILL_READS_ROWS}=1 does nothing for the attention backend {DSA_BACKEND}", "leave it out"
        )
    for phase, backend in zip(PHASES, server.backends, strict=True):
        if backend not in _NAMES:
            # If the user names the backend of one phase, SGLang sets the other.
            flags = tuple(map(flag_of, BACKEND_FIELDS))
            way = leave_out(*flags, text=f"leave out {', '.join(flags)}{_THEN}")
            raise _not_sparse(f"the {phase} attention backend, {backend},", server.model_name, way)


def check_implementations(server: Server) -> None:
    """Refuse implementations with which some batch would fail, or read wrong rows."""
    try:
        _check_modes(server.layout, server)
    except UnsupportedCombination as error:
        other = _other_layout(server)
        if other is None:
            raise
        raise UnsupportedCombination(
            error.problem, use_words(f"{LAYOUT.flag}={other}"), *error.ways
        ) from None


def check_context_parallelism(server: Server) -> None:
    """Refuse a split of prompts over ranks for which SGLang does not gather the keys."""
    view = server.view
    if view.enable_prefill_cp and view.cp_strategy == "zigzag":
        raise Refusal(
            "--cp-strategy zigzag does not work with sparse attention, whose keys SGLang gathers from "
            "interleaved ranks only",
            use_words("--cp-strategy=interleave"),
        )


def check_features_of_reader(server: Server) -> None:
    import torch

    if is_ours(server.layout, server.view.dcp_size):
        # SGLang's default is trtllm on Blackwell and flashmla_kv before.
        read = MLAKVCacheLayout.FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE
        if torch.cuda.get_device_capability() >= (10, 0):
            read = MLAKVCacheLayout.FP8_NOPE_FP8_ROPE
        without = () if server.view.dcp_size == 1 else ("--dcp-size",)
        narrow = use_words(
            f"{LAYOUT.flag}={read}", without=without, then=", whose rows SGLang's kernels read"
        )
        check_features(READER_FEATURES, server, _rows(server), lambda flag: (narrow, leave_out(flag)))


def check_copies(server: Server) -> None:
    """Refuse implementations that copy a whole pool."""
    layout = server.layout
    copied = SGLANG_READERS[layout].dsa_copied
    if wrong := _given(_IMPLEMENTATION_FIELDS, server.view, lambda value: value in copied):
        other = _other_layout(server)
        raise Refusal(
            f"{' and '.join(wrong)} would quantise the whole pool of a layer in every call with "
            f"{LAYOUT.flag} {layout}, however few rows the batch refers to",
            *(() if other is None else (use_words(f"{LAYOUT.flag}={other}"),)),
            _leave_out(wrong),
        )


def _other_layout(server: Server) -> MLAKVCacheLayout | None:
    """Another narrow layout whose rows the resolved implementations read, or None."""
    for other in MLAKVCacheLayout:
        if other is server.layout or not other.is_narrow or not sglang_dsa_reads(other):
            continue
        with suppress(UnsupportedCombination):
            _check_modes(other, server)
            return other
    return None


def check_stock(server: Server) -> None:
    """Check the implementations over SGLang's own pool, with KVPOOL_FIX_TOPK=1 and no layout."""
    view = server.view
    if view.use_ray:
        raise Refusal(
            f"--use-ray does not work with {env.FIX_TOPK}=1: Ray actors do not load SGLang plugins",
            leave_out("--use-ray", text="leave out one of the two"),
        )
    layout = stock_layout(view)
    if layout is not None and view.device == "cuda" and not is_rocm() and not view.enable_hisparse:
        _check_modes(layout, server)


def _check_modes(layout: MLAKVCacheLayout, server: Server) -> None:
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    view = server.view
    for field in _IMPLEMENTATION_FIELDS:
        value = getattr(view, field)
        if value not in IMPLEMENTATIONS:
            pair = view.dsa_prefill_backend, view.dsa_decode_backend
            raise UnsupportedCombination(
                f"{flag_of(field)} {value} is not for NVIDIA GPUs", nearest_pair(layout, *pair)
            )
    check_pair(
        layout,
        view.dsa_prefill_backend,
        view.dsa_decode_backend,
        modes=tuple(mode for mode, field in MODE_FIELDS.items() if getattr(view, field) not in (None, False)),
        index_kpool=get_dsa_index_kpool(server.model_config.hf_config),
        ranks=1 if server.config.layout is None else view.dcp_size,
    )
