"""The package that ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names; SGLang imports each module in it."""
