"""One server of SmolLM2: chunked prefill, the prefix cache, and a host tier narrower than the pool."""

from pathlib import Path

from host_tier_servers import ARGUMENTS as HOST_TIER
from programs import python_path, scored

from sgl_kvpool.commands.evaluate.measure import answer, score
from sgl_kvpool.commands.processes.server import Server, cpu_arguments, free_port
from sgl_kvpool.demo import smollm2

HERE = Path(__file__).resolve().parent
PAGE_SIZE, CHUNK, WINDOW, PREFIX, DEVICE_TOKENS = 64, 128, 512, 256, 1024
#: Arguments in the server's YAML file.
YAML = f"kv-cache-layout: bf16\nkv-host-layout: fp4\npage-size: {PAGE_SIZE}\nchunked-prefill-size: {CHUNK}\n"
QUESTION = "What is the capital of France?"


def window_ids(count):
    """Token ids of the first windows of the text."""
    ids = smollm2.english_token_ids(smollm2.checkpoint())
    return [ids[start : start + WINDOW] for start in range(0, count * WINDOW, WINDOW)]


def serve(model_path, folder):
    """What the server answers; "first" is scored, found on the device, pushed out, and found on the host."""
    folder.mkdir()
    (folder / "server.yaml").write_text(YAML)
    log = folder / "server.log"
    arguments = cpu_arguments(smollm2.checkpoint(), free_port(), max_total_tokens=DEVICE_TOKENS)
    # On the command line, only what the YAML file does not set.
    page = HOST_TIER.index("--page-size")
    without_page = HOST_TIER[:page] + HOST_TIER[page + 2 :]
    arguments += ["--config", str(folder / "server.yaml"), *without_page]
    environment = {
        "OMP_NUM_THREADS": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "roomy_models",
        "PYTHONPATH": python_path(HERE),
        "KVPOOL_PREFILL_READS_ROWS": "1",
    }
    first, *others = window_ids(4)
    with Server(arguments, log, environment) as server:
        return {
            "info": server.info(),
            "whole": scored(server, input_ids=first),
            "device_hit": scored(server, PREFIX, input_ids=first),
            "behind_prefix": score(server, [first], PREFIX).log_probabilities[0],
            "answer": answer(server, QUESTION, 16),
            "others": [scored(server, input_ids=ids) for ids in others],
            "host_hit": scored(server, PREFIX, input_ids=first),
            "metrics": server.get("/metrics").decode(),
            "log": log.read_text(errors="replace"),
        }
