"""Another version of SGLang, as far as its metadata go: a folder for PYTHONPATH."""


def write(folder):
    """Make the folder; returns it."""
    metadata = folder / "sglang-0.6.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.1\n")
    return folder
