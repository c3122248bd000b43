"""SmolLM2 beside the byte model, whose module lifts the host tier's limit."""

from sgl_kvpool.demo.models.llama_mla import EntryClass  # noqa: F401
