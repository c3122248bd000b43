"""A model as SGLang describes it."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sgl_kvpool.layout import MLAKVCacheLayout, RowFormat


class Model:
    """The facts that follow from SGLang's ModelConfig, each computed when it is first asked for."""

    model_config: Any

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    @cached_property
    def model_name(self) -> str:
        """Name of the model's class, for messages."""
        return (getattr(self.model_config.hf_config, "architectures", None) or ["this model"])[0]

    @cached_property
    def is_dsa(self) -> bool:
        """Whether the model has sparse attention."""
        from sglang.srt.configs.model_config import is_deepseek_dsa

        return is_deepseek_dsa(self.model_config.hf_config)

    @property
    def is_dense(self) -> bool:
        """Whether every token attends all earlier ones, in the layers with rows."""
        return not self.is_dsa

    @cached_property
    def layers_with_rows(self) -> Sequence[int] | None:
        """Layers of a hybrid model that store rows; None for other models."""
        from sglang.srt.configs.hybrid_arch import mambaish_config

        hybrid = mambaish_config(self.model_config)
        return None if hybrid is None else hybrid.full_attention_layer_ids

    @property
    def is_hybrid(self) -> bool:
        """Whether the model mixes MLA with linear attention."""
        return self.layers_with_rows is not None

    def row_format_in(self, layout: MLAKVCacheLayout) -> RowFormat:
        """Format of the model's rows in some layout; ValueError for a geometry that it does not store."""
        config = self.model_config
        return layout.pool_row_format(config.kv_lora_rank, config.qk_rope_head_dim, is_dsa=self.is_dsa)
