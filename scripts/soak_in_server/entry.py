"""Takes hold of the scheduler: a census in `/server_info`, a watch of transfers, and what SOAK_BREAK says."""

import os

from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

from soak_in_server import BREAK, CENSUS, breakages, transfers
from soak_in_server.census import take

_get_internal_state = SchedulerInternalStateController.get_internal_state


def get_internal_state(self, recv_req):
    """SGLang's answer with a census. Called between two steps of the scheduler: nothing changes meanwhile."""
    output = _get_internal_state(self, recv_req)
    output.internal_state[CENSUS] = take(self.scheduler)
    return output


SchedulerInternalStateController.get_internal_state = get_internal_state
# The watch is put around what is broken, as it is around what might be.
breakages.apply(os.environ.get(BREAK, "").split(","))
transfers.watch()
