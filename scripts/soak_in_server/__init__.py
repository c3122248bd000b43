"""What `scripts/soak.py` puts into the scheduler of the server it drives: a census, and damages on purpose.

SGLang imports the modules of this package because SGLANG_EXTERNAL_MODEL_PACKAGE names it; it has no model.
The package `demo` in it has the demo's model too. Importing this alone imports neither torch nor SGLang.
"""

#: Key of the census in an internal state of `/server_info`.
CENSUS = "soak_census"
#: Variable with names of `breakages.BREAKAGES`, separated by commas.
BREAK = "SOAK_BREAK"
