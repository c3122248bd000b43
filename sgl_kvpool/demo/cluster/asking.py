"""Requests to a server or a router, and its metrics. Imports neither torch nor SGLang."""

from __future__ import annotations

from typing import Any

from sgl_kvpool.demo.local_server import LocalServer

__all__ = ["ask", "metric_sum"]

_NEW_TOKENS = 8


def ask(server: LocalServer, text: str) -> dict[str, Any]:
    """Generate eight tokens after a text, greedily.

    Returns
    -------
    dict
        `ids` and `logprobs` of the tokens, logarithms to 6 digits; `cached`, the number of the text's tokens
        that were found in a cache, and `details`, SGLang's `cached_tokens_details` by place.
    """
    greedy = {"temperature": 0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
    # The plain /generate, which the router serves too.
    answer = server.post("/generate", text=text, sampling_params=greedy, return_logprob=True)
    meta = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "logprobs": [round(entry[0], 6) for entry in meta["output_token_logprobs"]],
        "cached": meta["cached_tokens"],
        "details": meta.get("cached_tokens_details"),
    }


def metric_sum(server: LocalServer, name: str) -> float:
    """Sum of a server's metric over its labels; 0 for a metric that the server does not have."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)
