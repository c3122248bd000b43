"""Engines one after the other in one process.

The first is refused by its scheduler, and the program goes on. The last must not know of the layout of the
one before it.
"""

import gc
import json
import os
import sys

from tiny_model import TEXT

ARGUMENTS = {"device": "cpu", "mem_fraction_static": 0.3, "max_total_tokens": 4096, "log_level": "info"}
ARGUMENTS |= {"disable_overlap_schedule": True, "disable_cuda_graph": True}
PROMPT = TEXT[:60]
SAMPLING = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def refused(sglang, model_path):
    """The error of an Engine whose host tier needs more memory than any machine has."""
    host_tier = {"enable_hierarchical_cache": True, "hicache_size": 10**6}
    try:
        sglang.Engine(model_path=model_path, **ARGUMENTS, kv_cache_layout="fp4", **host_tier)
    except ValueError as error:
        answer = {"type": type(error).__name__, "text": str(error)}
    gc.collect()  # an Engine that was not shut down must not make the collector wait for its sockets
    return answer


def main(model_path):
    import sglang

    answers = [{"refused": refused(sglang, model_path)}]
    ours = {"kv_cache_layout": "fp4", "kv_cache_arrangement": "page_major", "page_size": 8}
    # Both are resolved before the first is launched.
    build = sglang.Engine.server_args_class
    stock = {"attention_backend": "torch_native"}
    both = [build(model_path=model_path, **ARGUMENTS, **extra) for extra in (ours, stock)]
    for server_args in both:
        server_args.resolve_once()
    for server_args in both:
        engine = sglang.Engine(server_args=server_args)
        text = engine.generate(PROMPT, SAMPLING)
        info = engine.get_server_info()
        answers.append(
            {
                "output_ids": text["output_ids"],
                "layout": info.get("kv_cache_layout"),
                "arrangement": info.get("kv_cache_arrangement"),
                "attention_backend": info["attention_backend"],
                "tokens": info["max_total_num_tokens"],
                "environment": [k for k in os.environ if "KVPOOL" in k and os.environ[k]],
            }
        )
        engine.shutdown()
    print("\n@@@" + json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
