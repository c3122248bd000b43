"""`sgl-kvpool plan`: what a layout buys on a given GPU, before a server is started.

A process of its own imports SGLang, answers for a Hopper GPU of the size that was requested, and lets
SGLang's rules and ours decide what they decide when a server starts: arguments, attention, cache size.
Nothing is computed twice: the numbers are those of SGLang's own pool configurator.
"""
