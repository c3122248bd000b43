"""The modules of `sgl-kvpool bench attention`, as `modules.cases` and so on."""

from sgl_kvpool import MLAKVCacheLayout
from sgl_kvpool.commands.bench import attention as modules
from sgl_kvpool.commands.bench.attention import cases, device, inputs, limits, measure, peers, program, report

__all__ = ["cases", "device", "fmt", "inputs", "limits", "measure", "modules", "peers", "program", "report"]


def fmt(layout):
    return MLAKVCacheLayout(layout).row_format(512, 64)
