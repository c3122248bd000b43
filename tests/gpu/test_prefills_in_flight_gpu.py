"""FlashInfer's plans: the host plans the next prefill while the GPU has not begun the one before."""

import itertools

import pytest
import torch

pytest.importorskip("sglang")
import test_cuda_backend_gpu as backend
from test_cuda_backend_gpu import DEVICE, HEADS, LAYER, SCALE, Case, close, no_waits

pytestmark = [pytest.mark.quick, pytest.mark.gpu]
published_on_cuda = backend.published_on_cuda
TOKENS, CYCLES = 227, 300_000_000  # 150 ms of an H100, longer than the host needs for three batches


def mha_form(q, k, v, queries, keys=None):
    """Attention of requests, `[tokens, heads, 128]`, in float64: causal over own keys, or over all `keys`."""
    outputs = []
    ends = [list(itertools.accumulate(lengths, initial=0)) for lengths in (queries, keys or queries)]
    for own, its in zip(*map(itertools.pairwise, ends), strict=True):
        own, its = slice(*own), slice(*its)
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[its].double()) * SCALE
        if keys is None:
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1) if scores.shape[-1] else scores
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[its].double()))
    return torch.cat(outputs)


class Mha:
    """The MHA form, of new tokens alone: one wrapper."""

    prefixes = ([0] * 4,) * 3

    def __init__(self):
        from sglang.srt.layers.radix_attention import RadixAttention

        self.case = Case("fp4", [9, 140, 5, 73], [0] * 4)
        self.layer = RadixAttention(HEADS, 192, SCALE, HEADS, LAYER, v_head_dim=128)
        self.generator = torch.Generator().manual_seed(5)
        lengths = ([9, 140, 5, 73], [73, 5, 140, 9], [1, 200, 20, 6])
        self.batches = list(map(self.batch, lengths, self.prefixes))

    def batch(self, lengths, prefixes):
        """A batch, what is passed for its new tokens and for each chunk of prefixes, and the results."""
        batch = self.case.batch("EXTEND")
        batch.spec_info, batch.mha_one_shot, batch.mha_return_lse = None, False, False
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = lengths, prefixes
        chunks = [[n // 3 for n in prefixes], [n - n // 3 for n in prefixes]] if any(prefixes) else []
        batch.num_prefix_chunks, batch.prefix_chunk_seq_lens_cpu = len(chunks), torch.tensor(chunks)
        given, wanted = [], []
        for keys in (None, *chunks):
            counts = (TOKENS, *[sum(keys or lengths)] * 2)
            q, k, v = (
                torch.randn(n, HEADS, size, generator=self.generator).bfloat16()
                for n, size in zip(counts, (192, 192, 128), strict=True)
            )
            given.append([x.to(DEVICE) for x in (q.flatten(1), k, v)])
            wanted.append(mha_form(q, k, v, lengths, keys))
        return batch, given, torch.cat(wanted).numpy()

    def enqueue(self, number):
        (batch, given, _), backend = self.batches[number], self.case.backend
        backend.init_forward_metadata(batch)
        if batch.num_prefix_chunks:
            backend.init_mha_chunk_metadata(batch)
        found = []
        for part, values in enumerate(given):
            if batch.num_prefix_chunks:
                batch.set_attn_attend_prefix_cache(part > 0)
                batch.set_prefix_chunk_idx(part - 1)
            out = backend.forward_extend(*values, self.layer, batch, save_kv_cache=False)
            found.append((out if part == 0 else out[0]).view(TOKENS, HEADS, 128))
        return torch.cat(found)


class MhaChunks(Mha):
    """Also of prefixes: one more wrapper for each of two chunks."""

    prefixes = ([50, 7, 0, 130], [1, 90, 64, 3], [30, 30, 30, 30])


class Absorbed:
    """The absorbed form in one call, whose wrapper takes new pinned memory for each plan."""

    def __init__(self):
        case = self.case = Case("fp4", [9, 300, 5, 73], [0, 230, 4, 0])
        whole, self.batches = (case.requests, case.slots, case.keys, case.prefixes, case.lengths), []
        for chosen in ([0, 1, 2, 3], [3, 1], [1, 0, 3]):
            case.requests, case.slots, case.keys, case.prefixes, case.lengths = (
                [part[one] for one in chosen] for part in whole
            )
            self.batches.append((case.batch("EXTEND"), case.inputs(), case.wanted(fresh_as_computed=True)))

    def enqueue(self, number):
        (batch, (q, k, ropes), _), backend = self.batches[number], self.case.backend
        backend.init_forward_metadata(batch)
        found = backend.forward(q, k, k, self.case.layer, batch, **ropes)
        assert backend._extend.one_call
        return found


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", [Mha, MhaChunks, Absorbed])
def test_batches_in_flight(kind, count):
    """Each batch is attended by its own plan, and no prefill waits for the GPU."""
    prefill = kind()
    for number in range(3):
        prefill.enqueue(number)  # FlashInfer compiles
        torch.cuda.synchronize()
    for _ in range(2):  # torch pins memory for as many plans once, for which it may wait
        torch.cuda._sleep(CYCLES)
        (asleep := torch.cuda.Event()).record()
        found = [prefill.enqueue(number) for number in range(count)]
        is_asleep = not asleep.query()
        torch.cuda.synchronize()
    assert is_asleep
    for out, (*_, wanted) in zip(found, prefill.batches, strict=False):
        close(out.view(wanted.shape), wanted)


@pytest.mark.parametrize("kind", [Mha, MhaChunks])
def test_prefill_in_the_mha_form_does_not_wait_for_the_gpu(kind):
    """SGLang's own updater reads lengths back, three times per batch."""
    prefill = kind()
    prefill.enqueue(0)  # FlashInfer compiles
    with no_waits():
        found = prefill.enqueue(0)
    close(found, prefill.batches[0][-1])
