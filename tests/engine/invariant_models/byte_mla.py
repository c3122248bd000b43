"""Loaded by SGLang in the scheduler process, before it replaces torch's operators by batch-invariant ones.

SGLang has these for accelerators alone, and its deterministic servers do not start on a CPU. There, torch's
products of bf16 matrices give a row the same bits in any batch, as `test_serving.py` sees.
"""

from sglang.srt import batch_invariant_ops

from sgl_kvpool.demo.models.absorbed import EntryClass  # noqa: F401

batch_invariant_ops.enable_batch_invariant_mode = lambda: None
