"""The pool that SGLang is about to build: of which class, and with which options."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, leave_out
from sgl_kvpool.sglang_plugin import options
from sgl_kvpool.sglang_plugin.rules import attention, dsa
from sgl_kvpool.sglang_plugin.server import Server
from sgl_kvpool.srt.facts.readers import DSA_BACKEND
from sgl_kvpool.srt.pool.k_scales import checked_k_scales

if TYPE_CHECKING:
    from sgl_kvpool.srt.pool.row_pool import PoolOptions


class PoolRequest(Server):
    """A server whose KVCacheConfigurator builds a pool; the model is the target, or a draft.

    RuntimeError if its arguments were resolved before the plugin was loaded: the hooks are applied because
    the environment requests a layout, but no argument was checked, and no dtype was declared to SGLang.
    """

    def __init__(self, configurator: Any) -> None:
        super().__init__(configurator.server_args)
        self.configurator = configurator
        if not self.config.is_decided:
            raise RuntimeError(
                f"{options.LAYOUT.env} requests a layout, but the server's arguments were resolved before "
                "SGLang's plugins were loaded; call sglang.srt.plugins.load_plugins() before "
                f"ServerArgs(...), or start the server with {options.LAYOUT.flag}"
            )

    @cached_property
    def has_rows(self) -> bool:
        """Whether the pool stores rows of a layout; that of a draft without MLA is SGLang's own."""
        if self.config.layout is None or self.configurator.use_mla_backend:
            return self.config.layout is not None
        if not self.configurator.is_draft_worker:
            raise RuntimeError(
                f"--kv-cache-layout {self.layout} is set, but SGLang does not serve an MLA model"
            )
        return False

    @property
    def model_config(self) -> Any:
        """SGLang's ModelConfig of the pool's model."""
        return self.configurator.model_config

    @cached_property
    def arrangement(self) -> KVArrangement:
        """Arrangement of the rows; those of a draft are layer-major.

        It has few layers, nothing reads its pages as contiguous bytes, and with a single layer all
        arrangements have the same strides.
        """
        is_draft = self.configurator.is_draft_worker
        return KVArrangement.LAYER_MAJOR if is_draft else self.config.arrangement

    @cached_property
    def stage_rows(self) -> int:
        """Layers with rows in the pipeline stage of the pool."""
        stage, with_rows = self.configurator.layer_info, self.layers_with_rows
        if with_rows is None:
            return stage.num_effective_layers
        return sum(stage.start_layer <= layer < stage.end_layer for layer in with_rows)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a request's states in the linear layers of the stage; 0 for models without such layers."""
        states, stage = self.configurator.mambaish_config, self.configurator.layer_info
        if states is None:
            return 0
        params = states.mamba2_cache_params
        here = sum(stage.start_layer <= layer < stage.end_layer for layer in params.layers)
        return params.mamba_cache_per_req * here // len(params.layers)

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """Names of the attention backends that read the pool."""
        from sglang.srt.runtime_context import attention_backends, get_spec

        if self.is_dsa:
            return (DSA_BACKEND,)
        # As in model_runner.resolve_draft_attention_backend, a draft's explicit backend serves all its
        # phases.
        draft = get_spec().speculative_draft_attention_backend if self.configurator.is_draft_worker else None
        if draft is not None:
            return (draft,)
        return tuple(name for name in attention_backends() if name is not None)

    def k_scales(self) -> dict[int, float]:
        """k_scales of the model as it is loaded now."""
        layers = self.layers_with_rows
        if layers is not None and self.configurator.is_draft_worker:
            layers = (0,)  # a hybrid draft is one MLA layer, to which SGLang's builder gives this number
        return checked_k_scales(self.configurator.model, self.layout, self.readers, layers)

    def options(self) -> PoolOptions:
        """What the constructor of our class takes besides SGLang's own arguments."""
        from sgl_kvpool.srt.pool.row_pool import PoolOptions

        return PoolOptions(
            self.layout, self.k_scales(), self.arrangement, self.readers, self.config.host_tier
        )

    def check_draft(self) -> None:
        """Refuse a draft whose pool cannot have the rows of its target, or whose backend cannot read them."""
        from sglang.srt.runtime_context import get_spec

        if not self.configurator.is_draft_worker:
            return
        target = Server(self.server_args)
        if self.is_dsa != target.is_dsa:
            raise Refusal(
                f"{self.model_name}, the draft model, {'has' if self.is_dsa else 'has no'} sparse attention "
                f"(DSA) and its target {'has' if target.is_dsa else 'does not'}: their pools are declared to "
                "SGLang differently",
                leave_out("--kv-cache-layout", text="leave out --kv-cache-layout"),
                "use a draft of the target's kind",
            )
        check = dsa.check_draft_backend if self.is_dsa else attention.check_draft_reader
        check(self, get_spec().speculative_draft_attention_backend)
