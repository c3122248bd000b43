"""The demo model in a process whose matrix products on a CPU do not depend on the batch."""
