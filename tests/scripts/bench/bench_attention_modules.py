"""The modules of `python -m scripts.bench attention`, as `modules.cases` and so on."""

from scripts.bench import attention as modules
from scripts.bench.attention import cases, device, inputs, limits, measure, peers, program, report
from sgl_kvpool import MLAKVCacheLayout

__all__ = ["cases", "device", "fmt", "inputs", "limits", "measure", "modules", "peers", "program", "report"]


def fmt(layout):
    return MLAKVCacheLayout(layout).row_format(512, 64)
