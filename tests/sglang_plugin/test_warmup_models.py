"""What `sgl-kvpool warmup --model` reads from a checkpoint."""

import json
from pathlib import Path

import pytest
from hybrid_configs import LAYERS, MLA_LAYERS

from sgl_kvpool import KVArrangement, MLAKVCacheLayout
from sgl_kvpool.commands.named_model import find_model
from sgl_kvpool.commands.warmup.served import model_of


def test_shapes_of_checkpoints(checkpoints, tmp_path):
    served = model_of(find_model(str(Path(checkpoints["mla3"]) / "config.json")))
    assert served == model_of(find_model(checkpoints["mla3"]))
    assert (served.layers, served.top_k) == (3, None)
    alone = tmp_path / "a file.json"
    alone.write_text((Path(checkpoints["mla3"]) / "config.json").read_text())
    assert served == model_of(find_model(str(alone)))
    sparse = json.loads((Path(checkpoints["dsa"]) / "config.json").read_text())
    alone.write_text(json.dumps({**sparse, "index_topk": 64}))
    assert model_of(find_model(str(alone))).top_k == 64
    assert served.layouts == tuple(MLAKVCacheLayout)
    assert served.arrangement is KVArrangement.LAYER_MAJOR
    assert model_of(find_model(checkpoints["rank256"])).kv_lora_rank == 256


def test_layers_of_hybrid_models_are_those_with_rows(checkpoints):
    assert model_of(find_model(checkpoints["kda"])).layers == len(MLA_LAYERS) < LAYERS


@pytest.mark.parametrize(("name", "said"), [("mha", "multi-head latent attention"), ("rope32", "rope")])
def test_models_that_no_layout_stores(checkpoints, name, said):
    with pytest.raises(ValueError, match=said):
        model_of(find_model(checkpoints[name]))
