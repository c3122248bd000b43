"""Write `sglang_plugin/fingerprint.json` for the installed SGLang: `python -m scripts.fingerprint`."""

import json

from sgl_kvpool.commands.doctor.probes import hook_groups
from sgl_kvpool.sglang_plugin import fingerprint

if __name__ == "__main__":
    text = json.dumps(fingerprint.take(hook_groups()), indent=0)
    fingerprint.FILE.write_text(text + "\n", encoding="utf-8")
