#!/usr/bin/env python3
"""Train the model that `sgl-kvpool demo` serves, on the sources of this Python's standard library.

    python -m scripts.train_demo_model --out build/demo-model [--steps 3000]

Writes a whole checkpoint to OUT/model: weights, config, tokenizer, the held-out windows and training.json. It
took 70 minutes on two cores. To ship the result, copy that folder over sgl_kvpool/demo/byte_mla_python, whose
README.md has numbers of training.json.

The text is the library's `.py` files without tests and generated tables; the modules in HELD_OUT are not part
of the training data.
"""

import argparse
import itertools
import json
import math
import platform
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.byte_model import WholeSequences, initialise, read_model, write_model
from sgl_kvpool.demo.net import SPECIAL_TOKEN_ID, ByteMLAConfig

#: Held-out modules, chosen by hand for variety before any training.
HELD_OUT = (
    *("calendar.py", "cmd.py", "csv.py", "fractions.py", "graphlib.py", "heapq.py", "json/decoder.py"),
    *("logging/config.py", "mimetypes.py", "queue.py", "sched.py", "shlex.py", "smtplib.py"),
    *("statistics.py", "textwrap.py", "urllib/robotparser.py"),
)
#: Excluded: tests, demos, generated text, and text that is not the library's own.
EXCLUDED = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"),
    *("lib-dynload", "entities.py", "turtledemo", "__phello__"),
}
#: Licence that is shipped with the held-out text.
LICENCE = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
WINDOW_BYTES = 1024
BATCH_TOKENS, SEED, THREADS = 8192, 0, 2
#: Lengths of training windows and their frequencies: positions beyond 512 must be learnt too.
LENGTHS = {512: 0.45, 1024: 0.45, 2048: 0.10}
WARMUP = 100
#: Share of the steps at the end in which the learning rate falls to zero.
DECAY = 0.3
MUON_LR, ADAM_LR = 8e-3, 3e-3


def sources() -> dict[str, bytes]:
    """Text of every used module of the standard library, by its path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED.isdisjoint(relative.parts) and not relative.parts[0].startswith("config-"):
            found[relative.as_posix()] = path.read_bytes()
    return found


def held_out_windows(modules: dict[str, bytes]) -> list[dict[str, str | int]]:
    """Two windows of each held-out module, near one third and two thirds of it, starting at a line."""
    windows: list[dict[str, str | int]] = []
    for name in HELD_OUT:
        text = modules[name]
        for part in (1, 2):
            start = text.index(b"\n", len(text) * part // 3) + 1
            start = min(start, len(text) - WINDOW_BYTES)
            piece = text[start : start + WINDOW_BYTES]
            windows.append({"module": name, "offset": start, "text": piece.decode("ascii")})
    return windows


def training_stream(modules: dict[str, bytes]) -> Tensor:
    """Modules that are not held out, shuffled, each followed by the special token. [tokens] int64"""
    names = [name for name in modules if name not in HELD_OUT]
    random.Random(SEED).shuffle(names)
    pieces: list[int] = []
    for name in names:
        pieces.extend(modules[name])
        pieces.append(SPECIAL_TOKEN_ID)
    return torch.tensor(pieces)


def batches(stream: Tensor) -> Iterator[Tensor]:
    """Windows [B, T + 1] at random positions."""
    lengths, weights = list(LENGTHS), list(LENGTHS.values())
    for step in itertools.count():
        draw = random.Random(SEED * 1_000_003 + step)
        length = draw.choices(lengths, weights)[0]
        starts = [draw.randrange(len(stream) - length) for _ in range(BATCH_TOKENS // length)]
        yield torch.stack([stream[start : start + length + 1] for start in starts])


def rate(step: int, steps: int) -> float:
    """Factor of the learning rates: warm-up, constant, linear fall to zero."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / max(1.0, DECAY * steps))


@torch.no_grad()
def held_out_perplexity(net: WholeSequences, texts: list[str]) -> float:
    """Perplexity per byte over the windows, without the first byte of each window."""
    ids = torch.tensor([list(text.encode()) for text in texts])
    losses = []
    for piece in ids.split(8):
        logits = net(piece)
        losses.append(
            F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), piece[:, 1:].flatten(), reduction="none")
        )
    return math.exp(torch.cat(losses).mean().item())


def optimisers(net: WholeSequences) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for embeddings, output and norms."""
    matrices = [p for p in net.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in net.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(steps: int, stream: Tensor, texts: list[str]) -> tuple[WholeSequences, list[dict]]:
    """The trained model, and its history."""
    net = initialise(WholeSequences(ByteMLAConfig()), SEED)
    steppers = optimisers(net)
    history: list[dict] = []
    running = 0.0
    for step, ids in zip(range(steps), batches(stream), strict=False):
        factor = rate(step, steps)
        for stepper, peak in zip(steppers, (MUON_LR, ADAM_LR), strict=True):
            stepper.param_groups[0]["lr"] = peak * factor
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        running = loss.item() if not running else 0.95 * running + 0.05 * loss.item()
        done = step + 1
        if done % 100 == 0 or done == steps:
            perplexity = held_out_perplexity(net, texts)
            history.append({"step": done, "loss": round(running, 4), "held_out_perplexity": perplexity})
            print(f"step {done}/{steps}: loss {running:.3f}, perplexity {perplexity:.3f}", flush=True)
    return net, history


def repeated_share(texts: list[str], modules: dict[str, bytes]) -> float:
    """Share of the 64-byte strings of the held-out windows that also occur in the training text."""
    text = b"\0".join(content for name, content in modules.items() if name not in HELD_OUT)
    pieces = [t.encode()[i : i + 64] for t in texts for i in range(0, WINDOW_BYTES, 64)]
    return sum(piece in text for piece in pieces) / len(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/demo-model"))
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    arguments.out.mkdir(parents=True, exist_ok=True)

    modules = sources()
    windows = held_out_windows(modules)
    texts = [str(window["text"]) for window in windows]
    stream = training_stream(modules)
    print(f"{len(modules)} modules, {len(stream) / 1e6:.1f} MB to train on, {len(texts)} windows held out")

    net, history = train(arguments.steps, stream, texts)

    folder = write_model(arguments.out / "model", net)
    (folder / "held_out.json").write_text(json.dumps(windows, indent=1) + "\n", encoding="ascii")
    shutil.copy(LICENCE, folder / "LICENSE-held-out.txt")
    shipped = read_model(folder)
    facts = {
        "python": platform.python_version(),
        "training_bytes": len(stream),
        "steps": arguments.steps,
        "batch_tokens": BATCH_TOKENS,
        "seed": SEED,
        "training_loss": history[-1]["loss"],
        "held_out_windows": len(texts),
        "held_out_repeated_share": round(repeated_share(texts, modules), 4),
        "held_out_perplexity": {"bf16": round(held_out_perplexity(shipped, texts), 4)},
        "history": history,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="ascii")
    print(json.dumps({k: v for k, v in facts.items() if k != "history"}, indent=1))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
