"""Random latents, and forms in which values are stored: those of the layouts and of other formats."""

from collections.abc import Callable

import torch

from sgl_kvpool.codec import decode_rows, encode_rows
from sgl_kvpool.codec.scalars import E2M1_MAX, E4M3_MAX, round_to_e2m1
from sgl_kvpool.layout import MLAKVCacheLayout

ROWS, RANK = 4096, 512
#: Values that share a scale in 4-bit formats.
BLOCK = 16
#: Channels of a latent that are 30 times as large as the others.
OUTLIERS, OUTLIER_FACTOR = 8, 30.0

#: Function from values [rows, any] to the values that are read back, float32.
Form = Callable[[torch.Tensor], torch.Tensor]


def _normal(sigma: float) -> Callable[[torch.Generator, int], torch.Tensor]:
    return lambda generator, rows: sigma * torch.randn(rows, RANK, generator=generator)


def _student(generator: torch.Generator, rows: int) -> torch.Tensor:
    squares = sum(torch.randn(rows, RANK, generator=generator).square() for _ in range(3))
    return torch.randn(rows, RANK, generator=generator) / (squares / 3).sqrt()


def _log_normal_channels(generator: torch.Generator, rows: int) -> torch.Tensor:
    channels = torch.randn(RANK, generator=generator).exp()
    return torch.randn(rows, RANK, generator=generator) * channels


def _outlier_channels(generator: torch.Generator, rows: int) -> torch.Tensor:
    channels = torch.ones(RANK)
    channels[torch.randperm(RANK, generator=generator)[:OUTLIERS]] = OUTLIER_FACTOR
    return torch.randn(rows, RANK, generator=generator) * channels


#: Name in the table to a function of a generator and a number of rows.
DISTRIBUTIONS = {
    "N(0, 0.003)": _normal(0.003),
    "N(0, 0.02)": _normal(0.02),
    "N(0, 1)": _normal(1.0),
    "Student's t, 3 degrees": _student,
    "log-normal channels": _log_normal_channels,
    f"{OUTLIERS} channels x{OUTLIER_FACTOR:.0f}": _outlier_channels,
}


def latents(name: str, rows: int = ROWS) -> torch.Tensor:
    """Random latents [rows, 512], bfloat16; the same for the same arguments.

    `name`: Name in `DISTRIBUTIONS`.
    """
    generator = torch.Generator().manual_seed(list(DISTRIBUTIONS).index(name))
    return DISTRIBUTIONS[name](generator, rows).bfloat16()


def stored_as(layout: MLAKVCacheLayout, rank: int = RANK, *, fitted_scale: bool = False) -> Form:
    """Latents of a layout, through the codec that servers use.

    `fitted_scale`: Whether k_scale is the largest magnitude divided by 448 instead of 1.
    """
    fmt = layout.row_format(rank, 0)

    def through_rows(values: torch.Tensor) -> torch.Tensor:
        k_scale = values.abs().max().item() / E4M3_MAX if fitted_scale else 1.0
        rows = encode_rows(values, None, fmt, k_scale=k_scale)
        return decode_rows(rows, fmt, torch.float32, k_scale=k_scale)

    return through_rows


def sglang_fp4(values: torch.Tensor) -> torch.Tensor:
    """Latents encoded and decoded by SGLang's FP4 functions (``--kv-cache-dtype fp4_mx_block16``)."""
    from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil as Law

    # Use the functions without torch.compile, which takes 20 s and gives the same numbers.
    with torch.compiler.set_stance("force_eager"):
        codes, scales = Law.batched_quantize(values.unsqueeze(1))
        return Law.batched_dequantize(codes, scales, torch.float32).squeeze(1)


def nvfp4_without_global_scale(values: torch.Tensor) -> torch.Tensor:
    """NVFP4 in torch, since its kernels need a GPU: e2m1 values, 16 to an e4m3 scale of amax / 6."""
    blocks = values.float().view(len(values), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(max=E4M3_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    scaled = torch.where(scales > 0, blocks / scales, torch.zeros(()))
    return (round_to_e2m1(scaled.abs()) * scaled.sign() * scales).view(values.shape)


#: One layout per latent encoding: the first of those that share an encoding.
LATENTS = {layout.latent: layout for layout in reversed(MLAKVCacheLayout)}.values()

#: Columns of the table: functions from latents to decoded latents.
FORMS: dict[str, Form] = {
    **{f"`{layout}`": stored_as(layout) for layout in reversed(LATENTS)},
    **{
        f"`{layout}`, k_scale fitted": stored_as(layout, fitted_scale=True)
        for layout in LATENTS
        if layout.latent.uses_k_scale
    },
    "SGLang's `fp4_mx_block16`": sglang_fp4,
    "NVFP4, no global scale": nvfp4_without_global_scale,
}


def relative_error(values: torch.Tensor, back: torch.Tensor) -> float:
    """Root of the sum of squared errors divided by that of squared values, in float64."""
    wanted = values.double()
    return ((back.double() - wanted).norm() / wanted.norm()).item()
