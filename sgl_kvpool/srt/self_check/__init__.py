"""Checks of real pools, attention backends and host tiers against the codec and plain torch.

A scheduler runs them when it starts, if they are due (:mod:`sgl_kvpool.sglang_plugin.hooks.self_check`);
`sgl-kvpool doctor --self-check` runs all but `check_backend`, which needs a model. Each check writes, reads
or transfers rows through SGLang's own calls, compares the result with values that it computes by other means,
and restores the bytes that it has overwritten. It raises `Difference` if the result is wrong.
"""

from sgl_kvpool.srt.self_check.attention import check_backend, check_lists
from sgl_kvpool.srt.self_check.host_tier import check_tier
from sgl_kvpool.srt.self_check.pages import Difference
from sgl_kvpool.srt.self_check.rows import check_rows

__all__ = ["Difference", "check_backend", "check_lists", "check_rows", "check_tier"]
