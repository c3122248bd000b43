"""`sgl-kvpool plan`: capacity of each layout on a given GPU, before a server is started.

A process of its own imports SGLang, describes a Hopper GPU of the requested size, and lets SGLang's rules and
ours make the decisions of a server's start: arguments, attention, cache size. Sizes on the device come from
SGLang's own pool configurator; `planned.py` computes sizes of a host tier.
"""
