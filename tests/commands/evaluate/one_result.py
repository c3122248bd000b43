"""A result of `sgl-kvpool demo`."""

from sgl_kvpool.commands.evaluate import report
from sgl_kvpool.commands.evaluate.measure import Greedy

SERVED = {"layout": "bf16", "row_bytes": 1152, "pool_bytes": 56623104, "tokens": 16384}
SERVED |= {"attention_backend": "kvpool_mla", "start_seconds": 40.0, "scoring_seconds": 9.0}
BF16 = report.Result(**SERVED, perplexity=3.0, greedy=[Greedy([9, 8], 0.5), Greedy([1], 0.25)])
