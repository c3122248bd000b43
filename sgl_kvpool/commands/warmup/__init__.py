"""`sgl-kvpool warmup`: compiles a server's code in advance, so that the server finds it on disk."""

import argparse
from collections import Counter
from dataclasses import replace

from sgl_kvpool.commands.arguments import whole
from sgl_kvpool.commands.named_model import NamedModel, find_model
from sgl_kvpool.commands.processes.progress import progress
from sgl_kvpool.commands.warmup.served import DEEPSEEK_V3, Served, model_of
from sgl_kvpool.commands.warmup.steps import VARIABLES, carry_out, steps_on_cpu, steps_on_cuda
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.sglang_plugin import options

EPILOG = f"""
Compiled code is kept in folders, which are printed. A server finds it there if it runs as the same user, or
with the same variables, on the same kind of machine, with the same versions of all packages. The variables
that move the folders, on a CPU: {", ".join(VARIABLES["cpu"])}. On CUDA: {", ".join(VARIABLES["cuda"])};
SGLang puts the last two into SGLANG_CACHE_DIR (~/.cache/sglang) unless they are set. The CUDA part has not
been run yet.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        metavar="PATH_OR_CONFIG",
        help="a checkpoint's folder, a config.json alone, or owner/name (DeepSeek-V3's shape)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the checkpoint")
    for option, choices, effect in (
        (options.LAYOUT, options.LAYOUT.values, "only this layout (all)"),
        (options.ARRANGEMENT, options.ARRANGEMENT.choices, "memory order of the pages (layer_major)"),
    ):
        parser.add_argument(option.flag, choices=choices, help=f"{effect}. Also {option.env}")
    parser.add_argument("--tp", type=whole, default=1, metavar="N", help="ranks that share the heads (1)")
    parser.add_argument("--dcp-size", type=whole, default=1, metavar="N", help="the server's --dcp-size (1)")
    parser.add_argument("--page-size", type=whole, default=64, metavar="N", help="tokens per page (64)")
    parser.add_argument(
        "--draft-tokens", type=whole, default=0, metavar="N",
        help="the server's --speculative-num-draft-tokens (no drafts)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="server's device (cuda if torch sees a GPU)"
    )


def run(arguments: argparse.Namespace) -> int:
    model = None if arguments.model is None else find_model(arguments.model)
    with progress("importing SGLang"):
        import sglang  # noqa: F401  # first: it sets cache folders that other imports read
        import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        way = "run warmup once where it does, with these variables' folders on a volume that servers mount"
        raise ValueError(f"--device cuda: torch sees no GPU here; {way}: {', '.join(VARIABLES['cuda'])}")

    served = _served(model, arguments)
    steps = steps_on_cpu() if device == "cpu" else steps_on_cuda(served)
    print(f"for a server on {device}" + ("" if device == "cpu" else f": {served.name}"))
    for cache in dict.fromkeys(cache for step in steps for cache in step.caches):
        print(f"  {cache.name} in {cache.folder()} ({cache.variable})")
    counts = Counter(carry_out(steps))
    print(f"{counts['compiled']} compiled, {counts['cached']} cached, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


def _served(model: NamedModel | None, arguments: argparse.Namespace) -> Served:
    shape = DEEPSEEK_V3 if model is None else model_of(model, arguments.trust_remote_code)
    layout = arguments.kv_cache_layout or options.LAYOUT.from_env()
    arrangement = arguments.kv_cache_arrangement or options.ARRANGEMENT.from_env()
    return replace(
        shape,
        layouts=tuple(MLAKVCacheLayout) if layout in (None, options.AUTO) else (MLAKVCacheLayout(layout),),
        arrangement=options.choose_arrangement(arrangement or options.AUTO),
        page_size_tokens=arguments.page_size,
        tensor_parallel=arguments.tp,
        dcp_size=arguments.dcp_size,
        draft_tokens=arguments.draft_tokens,
    )
