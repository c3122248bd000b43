"""Code of `scripts.soak` in a server's scheduler: census, comparison of transfers, deliberate breakages.

SGLang imports this package because SGLANG_EXTERNAL_MODEL_PACKAGE names it; it contains no model.
Its subpackage `demo` adds the demo's model. Importing this module imports neither torch nor SGLang.
"""

#: Key of the census in an internal state of `/server_info`.
CENSUS = "soak_census"
#: Variable with names of `breakages.BREAKAGES`, separated by commas.
BREAK = "SOAK_BREAK"
