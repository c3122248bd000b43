"""A model that has learnt one text by heart, so that its greedy tokens are decided by wide margins.

With random weights the two best tokens are often closer than the rounding of two correct attention
kernels, and "the same greedy tokens" would test luck.
"""

import torch

TEXT = '''def parse(text, *, strict=False, limit=4096):
    """Split a text into records; blank lines and comments are skipped."""
    records = []
    for line in text.splitlines():
        body = line.partition("#")[0].strip()
        if not body:
            continue
        key, found, value = body.partition("=")
        if strict and not found:
            raise ValueError(f"no value: {body!r}")
        records.append((key.strip(), value.strip()))
    return records
'''
WINDOW = 384

#: Prompts of unequal lengths, as places in the text. The first two share 60 bytes, which the radix cache
#: finds; the last is longer than five pages of 64 tokens.
CUTS = [(0, 110), (0, 60), (52, 90), (0, 340)]
NEW_TOKENS = 24
PROMPTS = [TEXT[begin:end] for begin, end in CUTS]
KNOWN = [TEXT[end : end + NEW_TOKENS] for _, end in CUTS]


def write(folder, steps=180):
    """Train for some seconds and write the checkpoint; returns the folder."""
    from byte_model import WholeSequences, initialise, write_model

    from sgl_kvpool.demo.net import ByteMLAConfig

    ids = torch.tensor(list(TEXT.encode()))
    net = WholeSequences(ByteMLAConfig())
    initialise(net, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - step / steps)
            starts = torch.randint(0, len(ids) - WINDOW, (1,), generator=generator)
            windows = torch.stack([ids[s : s + WINDOW + 1] for s in starts])
            logits = net(windows[:, :-1]).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 0.7, f"the model has not learnt its text: {loss.item()}"
    return write_model(folder, net)
