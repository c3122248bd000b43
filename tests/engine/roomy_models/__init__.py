"""The demo model in a process whose host tier may use what SGLang would keep free: 10 GiB of memory."""
