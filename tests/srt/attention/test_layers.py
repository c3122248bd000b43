"""Models that kvpool_mla refuses, on a CPU and on CUDA."""

from types import SimpleNamespace

import pytest
import torch
from batches import radix_attention

pytestmark = pytest.mark.usefixtures("published")

HEADS, NOPE, ROPE, V_DIM, RANK, LAYER = 2, 32, 64, 32, 128, 3

POOL = SimpleNamespace(
    row_format=SimpleNamespace(head_dim=RANK + ROPE), row_pool=SimpleNamespace(layer_num=2),
    kv_lora_rank=RANK, has_rows=lambda layer_id: True,
)  # fmt: skip


def attention(**changes):
    return radix_attention(HEADS, RANK, ROPE, **{"layer_id": LAYER, "scaling": 0.1, **changes})


def multi_head(**changes):
    """The same layer in the multi-head (not absorbed) form."""
    shape = {"head_dim": NOPE + ROPE, "num_kv_heads": HEADS, "v_head_dim": V_DIM}
    return attention(**{**shape, **changes})


def check(*layers, on_cuda=True):
    from sgl_kvpool.srt.attention.layers import check_layers

    check_layers(torch.nn.ModuleList(layers), POOL, mha_form=on_cuda)


@pytest.mark.parametrize("on_cuda", [True, False])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window_size": 128}, "has a sliding window of 128"),
        ({"logit_cap": 30.0}, "caps its logits at 30.0"),
        ({"is_cross_attention": True}, "is not causal"),
        ({"head_dim": 256}, "attends keys 256 wide"),
    ],
)
def test_refused_layers(changes, text, on_cuda):
    check(attention(), on_cuda=on_cuda)
    with pytest.raises(ValueError, match=f"layer 1 of ModuleList {text}.*serve the model without"):
        check(attention(), attention(layer_id=LAYER + 1, **changes), on_cuda=on_cuda)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (list, "has no attention layer"),
        (lambda: [attention(), multi_head(sliding_window_size=128)], "layer 1 .*sliding window of 128"),
        (lambda: [attention(), multi_head(layer_id=LAYER + 1)], "layer 1 .*keys 96 wide and not rows of 192"),
        (lambda: [attention(), attention(layer_id=LAYER + 1, scaling=0.2)], r"softmax scales \[0.1, 0.2\]"),
    ],
)
def test_refused_models(layers, text):
    with pytest.raises(ValueError, match=text):
        check(*layers())


def test_two_forms_of_a_layer_and_two_scales_on_a_cpu():
    check(attention(), multi_head())
    check(attention(), attention(layer_id=LAYER + 1, scaling=0.2), on_cuda=False)


def test_sinks():
    layer = attention()
    layer.learnable_sink_param = torch.nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(ValueError, match="layer 0 .*has an attention sink.*does not compute; serve"):
        check(layer)
