"""Hooks of the scheduler: a census in `/server_info`, a watch of transfers, breakages of SOAK_BREAK."""

import os

from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

from scripts.soak.in_server import BREAK, CENSUS, breakages, transfers
from scripts.soak.in_server.census import take

_get_internal_state = SchedulerInternalStateController.get_internal_state


def get_internal_state(self, recv_req):
    """SGLang's answer with a census. Called between two scheduler steps, so that the state is stable."""
    output = _get_internal_state(self, recv_req)
    output.internal_state[CENSUS] = take(self.scheduler)
    return output


SchedulerInternalStateController.get_internal_state = get_internal_state
# Breakages come first, so that the watch wraps the damaged functions.
breakages.apply(os.environ.get(BREAK, "").split(","))
transfers.watch()
