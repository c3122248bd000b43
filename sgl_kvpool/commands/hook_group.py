"""The hook group of the commands and of the demo, for `doctor` and for a look at a new SGLang."""

from sgl_kvpool.sglang_plugin.hook_points import HookGroup
from sgl_kvpool.sglang_plugin.imports import importing_sglang

#: What the commands import of SGLang besides the modules of other groups.
COMMANDS = HookGroup(
    "commands",
    "`sgl-kvpool plan`, `warmup`, `demo` and `doctor --self-check`",
    modules=tuple(importing_sglang("commands", "demo")),
)
