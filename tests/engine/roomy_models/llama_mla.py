"""SmolLM2 beside the byte model; the host tier's limit is lifted there."""

from sgl_kvpool.demo.models.llama_mla import EntryClass  # noqa: F401
