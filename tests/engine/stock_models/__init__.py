"""The demo model in a prefill server without a layout, over Mooncake on a CPU."""
