"""The machine on which something was measured."""

import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine() -> dict[str, Any]:
    """Processor and number of cores, and the GPU that torch sees, if any."""
    import torch

    found: dict[str, Any] = {"cpu": processor(), "cores": os.cpu_count(), "system": platform.system()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found
