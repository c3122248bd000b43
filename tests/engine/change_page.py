"""`python change_page.py KEY PLACE`: a client of Mooncake that changes a bit of a byte of a stored page.

A process of its own: Mooncake's library loads only with the LD_LIBRARY_PATH that its servers have.
"""

import os
import sys
import time

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
master = os.environ["MOONCAKE_MASTER"]
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
content = bytearray(store.get(sys.argv[1]))
assert content, f"nothing is stored under {sys.argv[1]}"
content[int(sys.argv[2])] ^= 0x10
# Mooncake does not remove a page in the first seconds after it was read.
deadline = time.monotonic() + 60
while store.remove(sys.argv[1]) != 0:
    assert time.monotonic() < deadline, "the page cannot be removed"
    time.sleep(0.5)
assert store.put(sys.argv[1], bytes(content)) == 0
store.close()
