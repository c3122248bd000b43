#!/usr/bin/env python3
"""`sgl-kvpool bench codec` with the sgl_kvpool of this checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sgl_kvpool.commands.bench.codec import main

if __name__ == "__main__":
    sys.exit(main())
