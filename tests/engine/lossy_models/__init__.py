"""The demo model in a process in which no backup to the host tier succeeds."""
