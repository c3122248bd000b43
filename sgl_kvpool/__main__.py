"""`python -m sgl_kvpool`: the command `sgl-kvpool`."""

import sys

from sgl_kvpool.cli import main

if __name__ == "__main__":
    sys.exit(main())
