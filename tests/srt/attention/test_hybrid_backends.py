"""kvpool_mla over the pool of a hybrid model: the model's layer number selects the rows."""

from types import SimpleNamespace

import codec_oracle as oracle
import pytest
import torch
from cases import crossed
from hybrid_case import K_SCALES, LAYOUTS, MLA_LAYERS, PLACED, HybridCase

from sgl_kvpool.srt.pool import RowPool

pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture(params=[False, True], ids=["cpu", "cuda"])
def on_cuda(request):
    return request.param


@pytest.mark.parametrize(("layout", "placed"), crossed(LAYOUTS, PLACED))
def test_decode(layout, placed, on_cuda, monkeypatch):
    case = HybridCase(layout, [1, 40, 7, 65], [0, 39, 6, 64], monkeypatch, on_cuda=on_cuda, **placed)
    case.assert_right(case.run("DECODE", split=True), fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize(("layout", "placed"), crossed(LAYOUTS, PLACED))
@pytest.mark.parametrize("reads_rows", [False, True])
def test_absorbed_prefill(layout, placed, reads_rows, on_cuda, monkeypatch):
    more = {"reads_rows": reads_rows, "on_cuda": on_cuda, **placed}
    case = HybridCase(layout, [9, 40, 5, 33], [0, 30, 4, 0], monkeypatch, **more)
    case.assert_right(case.run("EXTEND", split=not reads_rows), fresh_as_computed=not reads_rows)
    case.assert_stored()


@pytest.mark.parametrize(("layout", "placed"), crossed(LAYOUTS, PLACED[::2]))
@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_verify_and_draft_extend(layout, placed, mode, monkeypatch):
    case = HybridCase(layout, [4, 40, 7], [0, 36, 3], monkeypatch, on_cuda=True, **placed)
    case.assert_right(case.run(mode), fresh_as_computed=False)
    case.assert_stored()


@pytest.mark.parametrize("mode", ["MIXED", "SPLIT_PREFILL"])
def test_prefill_in_chunks(mode, monkeypatch):
    case = HybridCase("fp8", [50, 61, 3], [43, 20, 2], monkeypatch, on_cuda=True, **PLACED[3])
    case.full._reader.workspace_tokens = 16
    # The last request has one new token and goes through the decode kernel.
    case.assert_right(case.run(mode), fresh_as_computed=[True, True, False])
    case.assert_stored()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_models_without_rotary_values(layout, mode, on_cuda, monkeypatch):
    """NoPE with `qk_rope_head_dim` 0, as Bailing's third version allows."""
    prefixes = [8, 29] if mode == "DECODE" else [6, 21]
    case = HybridCase(layout, [9, 30], prefixes, monkeypatch, on_cuda=on_cuda, rope=0, **PLACED[1])
    assert case.pool.row_format.rope is None
    case.assert_right(case.run(mode, split=True), fresh_as_computed=mode == "EXTEND")
    case.assert_stored()


@pytest.mark.parametrize(("layout", "placed"), crossed(LAYOUTS, PLACED))
def test_prefixes_read_back_for_the_multi_head_form(layout, placed, monkeypatch):
    """SGLang's chunked and one-shot prefills read these rows before they compute keys and values."""
    case = HybridCase(layout, [40, 7], [33, 6], monkeypatch, on_cuda=True, **placed)
    slots = torch.cat([own[:n] for own, n in zip(case.slots, case.prefixes, strict=True)])
    for layer, module in case.layers.items():
        keys = torch.cat([k[:n] for k, n in zip(case.keys[layer], case.prefixes, strict=True)])
        nope, rope = case.pool.get_mla_kv_buffer(module, slots, torch.float32)
        stored = oracle.decode(case.encoded(layer, keys), layout, nope.shape[-1], 64, K_SCALES[layer])
        assert (torch.cat([nope, rope], -1).squeeze(1).numpy() == stored).all()
        assert module.layer_id == layer


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND", "TARGET_VERIFY"])
def test_each_layer_waits_for_its_own_load(mode, monkeypatch):
    """The fence counts layers of the model, starting with the stage's first layer."""
    case = HybridCase("fp4", [9, 40], [5, 36], monkeypatch, on_cuda=True)
    waited = []
    case.pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    if mode == "DECODE":
        case.prefixes = [8, 39]
    case.run(mode)
    assert waited == list(MLA_LAYERS)


def test_row_numbers_are_worked_out_once_per_step(on_cuda, monkeypatch):
    """And again in the next step: SGLang refills the same tensor of slots."""
    case = HybridCase("fp4", [30, 9], [29, 8], monkeypatch, on_cuda=on_cuda, **PLACED[4])
    asked, original = [], RowPool.slot_to_row
    monkeypatch.setattr(RowPool, "slot_to_row", lambda self, s: asked.append(1) or original(self, s))
    batch = case.batch("DECODE")
    for _ in range(2):
        case.backend.init_forward_metadata(batch)
        for layer in MLA_LAYERS:
            case.layer_step(batch, layer)
    # On a CPU, the kv indices are converted once per step too.
    assert len(asked) == 2 * (1 if on_cuda else 2)


def test_layers_without_rows_are_not_read(monkeypatch):
    case = HybridCase("fp4", [3], [2], monkeypatch)
    for layer in (0, 2, 7):
        with pytest.raises(ValueError, match=f"layer_id={layer} not in full attention layers"):
            case.pool.get_row_buffer(layer)
