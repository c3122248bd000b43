"""transformers' classes, on a CPU, as an oracle of what SGLang's classes answer with stored rows.

The cache passes latents and rope keys through the tests' codec oracle where a server reads stored rows: a
host hit's also in the host's layout, a first chunk's with `KVPOOL_PREFILL_READS_ROWS` only. Sparse attention
reads a first chunk as computed, and selects by queries and keys in e4m3, as SGLang's indexers do.
In bfloat16 instead of float32 it says how far arithmetic alone moves the log-probabilities.

A prefix of several cases is computed once, and products of bfloat16 in float32: torch's own take ten times as
long on a CPU without such instructions. A prompt above 2,048 tokens then takes seconds, not minutes.

It runs in a process of its own, without a device.
"""

import copy
import json
from pathlib import Path

import codec_oracle
import ml_dtypes
import random_hybrid
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

RANK, ROPE = 512, 64
INDEX_KEY = 128


def _rounded(latent, rope, layout, k_scale):
    """Latents and rope keys `[1, 1, tokens, ...]`, as rows of a layout hold them."""
    if layout is None:
        return latent, rope
    size = codec_oracle.row_bytes(layout)
    parts = latent[0, 0].bfloat16(), rope[0, 0].bfloat16()
    rows = codec_oracle.encode(*parts, layout, RANK, ROPE, size, k_scale)
    values = torch.from_numpy(codec_oracle.decode(rows, layout, RANK, ROPE, k_scale)).to(latent.dtype)
    return values[None, None, :, :RANK], values[None, None, :, RANK:]


class _Products(TorchDispatchMode):
    """Products of bfloat16 matrices, added in float32 and rounded once, as on a GPU."""

    ADDED = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)

    def __torch_dispatch__(self, function, types, args=(), options=None):
        if function in self.ADDED and args[0].dtype is torch.bfloat16:
            return function(*(x.float() for x in args), **(options or {})).bfloat16()
        return function(*args, **(options or {}))


class _Scores(TorchFunctionMode):
    """An indexer's products, of queries and keys that are rounded to e4m3 with a scale each.

    SGLang's indexers of half-split RoPE (V3.2) rotate both by a Hadamard matrix before, and their scales are
    powers of two; those of interleaved pairs (GLM-5) do neither.
    """

    def __init__(self, dtype, config):
        self._dtype, self._interleaved = dtype, getattr(config, "indexer_rope_interleave", False)
        self._hadamard = torch.ones(1, 1)
        while len(self._hadamard) < INDEX_KEY:
            self._hadamard = torch.kron(self._hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))

    def _rounded(self, x):
        if not self._interleaved:
            x = (x @ self._hadamard * INDEX_KEY**-0.5).to(self._dtype).float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        if not self._interleaved:
            scale = scale.log2().ceil().exp2()
        return torch.from_numpy((x / scale).numpy().astype(ml_dtypes.float8_e4m3fn).astype("f4")) * scale

    def __torch_function__(self, function, types, args=(), options=None):
        if function is torch.matmul and args[0].shape[-1] == INDEX_KEY:
            query, keys = args
            args = self._rounded(query), self._rounded(keys.transpose(-1, -2)).transpose(-1, -2)
        return function(*args, **(options or {}))


class _Rows(transformers.DynamicCache):
    """A cache of what a pool holds; states of linear attention are kept as they are."""

    def __init__(self, config, layout, k_scales):
        super().__init__(config=config)
        self.layout, self._k_scales = layout, k_scales
        #: Whether the tokens at hand are attended as stored, or as computed.
        self.reads_own = True

    def update(self, keys, values, layer, *more, **options):
        if keys.shape[-1] != RANK:
            return super().update(keys, values, layer, *more, **options)
        stored = _rounded(keys, values, self.layout, self.k_scale(layer))
        found = super().update(*stored, layer, *more, **options)
        if self.reads_own:
            return found
        old = found[0].shape[2] - keys.shape[2]
        pairs = zip(found, (keys, values), strict=True)
        return tuple(torch.cat([all_[:, :, :old], own], 2) for all_, own in pairs)

    def k_scale(self, layer):
        return self._k_scales[layer] if self._k_scales else 1.0

    def load(self, layout):
        """All rows come back from a host tier of a layout, None for the same one."""
        for number, layer in enumerate(self.layers):
            loaded = _rounded(layer.keys, layer.values, layout, self.k_scale(number))
            layer.keys, layer.values = _rounded(*loaded, self.layout, self.k_scale(number))


def _within(context, function):
    def call(*args, **options):
        with context:
            return function(*args, **options)

    return call


class Oracle:
    """A checkpoint of `random_deepseek` or `random_hybrid`, and the layout of a server's rows.

    `k_scales` are those of the layers; chunks of a prompt that begin before `stored_from` attend their own
    tokens as computed, later ones and decoded tokens as stored.
    """

    def __init__(self, shape, folder, layout, *, chunk, stored_from, dtype=torch.float32, k_scales=None):
        self._layout, self._chunk, self._stored_from, self._k_scales = layout, chunk, stored_from, k_scales
        if shape == "kimi_linear":
            model = random_hybrid.kimi_model().to(dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder), dtype=dtype, attn_implementation="eager"
            )
        self._model = model.eval()
        for layer in model.model.layers:
            if (indexer := getattr(layer.self_attn, "indexer", None)) is not None:
                indexer.forward = _within(_Scores(dtype, model.config), indexer.forward)
        #: Caches and log-probabilities of prefixes, by their ids and the rest of what they depend on.
        self._prefixes = {}

    @torch.no_grad()
    def log_probabilities(self, ids, prompt=None, *, cached=0, host=0, host_layout=None):
        """`[tokens, vocabulary]` after each token.

        The first `prompt` tokens are prefilled, `cached` of them by earlier requests, the others decoded one
        by one; the rows of the first `host` come from a host tier.
        """
        prompt = len(ids) if prompt is None else prompt
        cache = _Rows(self._model.config, self._layout, self._k_scales)
        chunks = (*range(0, cached, self._chunk), *range(cached, prompt, self._chunk))
        found, at = [], 0
        for end in sorted({*chunks, cached, host, prompt, *range(prompt, len(ids) + 1)} - {0}):
            cache.reads_own = at >= min(self._stored_from, prompt)
            key = (*ids[:end], host, host_layout) if end <= prompt and end % self._chunk == 0 else None
            if key in self._prefixes:
                found, cache = copy.deepcopy(self._prefixes[key])
            else:
                with _Products():
                    out = self._model(torch.tensor([ids[at:end]]), past_key_values=cache, use_cache=True)
                found.append(out.logits[0].float().log_softmax(-1))
                if end == host:
                    cache.load(host_layout)
                if key:
                    self._prefixes[key] = copy.deepcopy((found, cache))
            at = end
        return torch.cat(found)


def main(shape, folder, cases, dtypes=("float32", "bfloat16"), **options):
    """Print, for each dtype, log-probabilities of each case: `[positions, tokens]`, the last id's last.

    A case is (ids, tokens of each position, arguments of `log_probabilities`), `options` are an oracle's.
    """
    transformers.logging.set_verbosity_error()
    found = {}
    for dtype in dtypes:
        oracle = Oracle(shape, folder, dtype=getattr(torch, dtype), **options)
        found[dtype] = []
        for ids, tokens, arguments in cases:
            after = oracle.log_probabilities(ids, **arguments)[-len(tokens) - 1 : -1]
            found[dtype].append(after.gather(1, torch.tensor(tokens)).tolist())
    print("\n" + json.dumps(found))
