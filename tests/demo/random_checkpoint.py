"""Checkpoints of the demo model with random weights."""

from pathlib import Path
from typing import Any

import torch
from byte_model import WholeSequences, initialise, write_model

from sgl_kvpool.demo.net import ByteMLAConfig


def write_random_model(folder: str | Path, seed: int = 0, layers: int = 3, **shape: Any) -> Path:
    """Write a checkpoint with random weights and return its folder.

    The weights are scaled so that the most probable byte depends on the context. It is always a
    printable ASCII character: every other token has the logit 0. The same arguments write the same
    bytes. `shape`: further fields of `ByteMLAConfig`.
    """
    net = WholeSequences(ByteMLAConfig(layers=layers, **shape))
    initialise(net, seed, score_gain=2.0, logit_gain=2.0)
    with torch.no_grad():
        # Lower a byte's logit by about 5 after itself: otherwise one byte could follow itself for ever.
        net.lm_head.weight -= net.embed_tokens.weight / 32
        net.lm_head.weight[:0x20] = 0
        net.lm_head.weight[0x7F:] = 0
    return write_model(folder, net)
