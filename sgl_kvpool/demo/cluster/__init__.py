"""Several servers on this machine over loopback: a store, prefill and decode servers, a router."""
