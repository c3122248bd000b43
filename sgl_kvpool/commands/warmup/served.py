"""The server whose code `sgl-kvpool warmup` compiles: a model's shape and the server's arguments."""

from dataclasses import dataclass

from sgl_kvpool.commands.named_model import NamedModel
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement

#: Entries per request beyond the model's context in SGLang's request table.
_EXTRA_SLOTS = 4


@dataclass(frozen=True)
class Served:
    """A model's shape, with SGLang's names, and a server's arguments."""

    name: str
    #: Sizes of the latent, of the rotary part, of the rest of a key, and of a value in the MHA form.
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    #: Query heads of the model, over all ranks.
    num_attention_heads: int
    context_len: int
    scaling: float
    #: Layers with rows: in a hybrid model, those without linear attention.
    layers: int
    #: Rows per query of sparse attention (DSA); None for dense models.
    top_k: int | None = None
    layouts: tuple[MLAKVCacheLayout, ...] = tuple(MLAKVCacheLayout)
    arrangement: KVArrangement = KVArrangement.LAYER_MAJOR
    page_size_tokens: int = 64
    tensor_parallel: int = 1
    #: Ranks over which the rows of a sequence are spread (decode context parallelism).
    dcp_size: int = 1
    #: Tokens verified per request and step; 0 without speculative decoding.
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.tensor_parallel:
            raise ValueError(
                f"--tp {self.tensor_parallel} does not divide the {self.num_attention_heads} heads of "
                f"{self.name}; give --tp a divisor of them"
            )
        if self.tensor_parallel % self.dcp_size:
            raise ValueError(
                f"--dcp-size {self.dcp_size} does not divide --tp {self.tensor_parallel}, whose ranks it "
                "groups; give a divisor of it"
            )

    @property
    def heads_per_rank(self) -> int:
        return self.num_attention_heads // self.tensor_parallel

    @property
    def table_width(self) -> int:
        return self.context_len + _EXTRA_SLOTS + self.draft_tokens


#: Default model.
DEEPSEEK_V3 = Served(
    name="models of DeepSeek-V3's shape",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_attention_heads=128,
    context_len=163840,
    scaling=192**-0.5,
    layers=61,
)


def model_of(model: NamedModel, trust_remote_code: bool = False) -> Served:
    """Shape of a model, by SGLang's own reading of its config.json. No weights are needed.

    `trust_remote_code`: whether to run Python code of the checkpoint, as the server's --trust-remote-code.

    ValueError if no layout can store the model's rows, or Hugging Face does not send its configuration;
    OSError if SGLang cannot read the model.
    """
    from sglang.srt.configs.model_config import ModelConfig, get_dsa_mtp_topk_width

    from sgl_kvpool.sglang_plugin.rules.model import check_model
    from sgl_kvpool.sglang_plugin.server import Server

    with model.sglang_path(trust_remote_code) as path:
        try:
            config = ModelConfig(path, trust_remote_code=trust_remote_code)
        except ValueError as error:
            hint = " Give --trust-remote-code to `warmup`." if "trust_remote_code" in str(error) else ""
            raise ValueError(f"{error}{hint}") from error
    server = Server(None, layout=MLAKVCacheLayout.BF16, model_config=config)
    check_model(server)
    with_rows = server.layers_with_rows
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")
    return Served(
        name=server.model_name,
        **{name: getattr(config, name) for name in (*sizes, "context_len", "scaling")},
        layers=config.num_hidden_layers if with_rows is None else len(with_rows),
        top_k=get_dsa_mtp_topk_width(config.hf_config) if server.is_dsa else None,
    )
