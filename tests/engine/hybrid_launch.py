"""`python hybrid_launch.py ...`: `sglang serve ...` for a hybrid model on a CPU.

SGLang tracks states at page boundaries (`extra_buffer`) only on GPUs that it knows; elsewhere it refuses
while it reads its arguments, before code of the model is imported. Without `extra_buffer` a hybrid model's
pages are one token long and a prefix is found only at the end of a request. The tracking itself is tensor
indexing.
"""

import sys

from sglang.cli.main import main
from sglang.srt.arg_groups import mamba_hook

mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
