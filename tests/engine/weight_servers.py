"""Servers whose weights change while they serve, over one folder of SGLang's `file` store."""

import base64
import json
import shutil
import threading
import time
import urllib.error
from pathlib import Path

from cluster_questions import PROMPTS, failures, with_store
from host_tier_servers import wait_for_store
from programs import FLUSH

from sgl_kvpool.commands.evaluate.measure import ask
from sgl_kvpool.demo.cluster.servers import metric_sum
from sgl_kvpool.demo.model import model_path

NAME = ("--served-model-name", "served")
#: Tokens of an answer that is interrupted.
LONG = 600


def write_other_weights(folder):
    """A checkpoint of the shipped model's shape that takes each byte for the one before it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_path(), folder)
    weights = load_file(folder / "model.safetensors")
    (embedding,) = [name for name in weights if "embed" in name]
    weights[embedding] = weights[embedding].roll(1, 0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def buckets(folder):
    """The weights of a checkpoint as two requests' `serialized_named_tensors`."""
    import torch.multiprocessing
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer

    weights = [(f"model.{name}", tensor) for name, tensor in load_file(folder / "model.safetensors").items()]
    halves = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    before = torch.multiprocessing.get_sharing_strategy()
    # Descriptors are passed only between a process and its children.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return [[base64.b64encode(MultiprocessingSerializer.serialize(half)).decode()] for half in halves]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Asked:
    """What a server answered in each step, and the files that its store then got."""

    def __init__(self, server, store):
        self.server, self.store, self.found = server, store, {}

    def files(self):
        return sorted(path.name for path in self.store.glob("*.bin"))

    def post(self, path, **fields):
        """SGLang's answer, also to a request that it refuses."""
        try:
            return self.server.post(path, **fields)
        except urllib.error.HTTPError as error:
            return json.loads(error.read() or "{}")

    def update(self, folder, **fields):
        return self.post("/update_weights_from_disk", model_path=str(folder), **fields)

    def flush(self):
        self.server.get(FLUSH)

    def step(self, name, prompt=0):
        """Ask a prompt; once the store is quiet, flush and ask again."""
        before, found = set(self.files()), {"first": ask(self.server, PROMPTS[prompt])}
        wait_for_store(self.store, quiet_seconds=1.0)
        found["stored"] = sorted(set(self.files()) - before)
        found["lost"] = metric_sum(self.server, "sgl_kvpool_uncached_pages_total")
        self.flush()
        # From the store, if it has the pages: the host tier and the pool are empty.
        found["again"] = ask(self.server, PROMPTS[prompt])
        wait_for_store(self.store, quiet_seconds=1.0)
        self.found[name] = {**found, "failures": failures(self.server)}


def weights(_model_path, folder):
    """A job: a server is updated in the ways that need no GPU and no trainer; a replica shares its pages."""
    folder.mkdir()
    old, new = model_path(), write_other_weights(folder / "new")
    store = folder / "store"
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    with with_store(folder, "updated", "fp4", environment, "file", *NAME) as server:
        asked = Asked(server, store)
        asked.step("start")
        answers = {"update": asked.update(new)}
        asked.step("new weights")
        asked.update(new, weight_version="v2")
        asked.step("v2")
        asked.update(old)
        asked.step("old weights")

        asked.update(new, flush_cache=False)
        asked.step("not flushed", prompt=1)

        # A request runs through the update, and SGLang refuses the flush.
        long = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
        running = threading.Thread(
            target=lambda: server.generate(text="import ", sampling_params=long), daemon=True
        )
        running.start()
        while not metric_sum(server, "sglang:num_running_reqs"):
            time.sleep(0.05)
        asked.post("/pause_generation", mode="in_place")
        answers["refused"] = asked.update(old)
        asked.post("/continue_generation")
        running.join()
        asked.step("refused", prompt=1)

        asked.post("/pause_generation", mode="retract")
        answers["paused"] = asked.update(new, weight_version="v3")
        asked.post("/continue_generation")
        asked.step("paused", prompt=1)

        answers["failed"] = asked.update(folder / "nothing")
        asked.step("failed", prompt=1)

        (first, last), path = buckets(old), "/update_weights_from_tensor"
        answers["session"] = [
            asked.post("/begin_weight_update"),
            asked.post(path, serialized_named_tensors=first, load_format="direct", flush_cache=False),
            asked.post(path, serialized_named_tensors=last, load_format="direct"),
        ]
        asked.step("in a session", prompt=1)
        answers["session"].append(asked.post("/end_weight_update"))
        asked.step("session", prompt=2)

        answers["version"] = asked.post("/update_weight_version", new_version="v4", abort_all_requests=False)
        asked.step("version alone", prompt=2)
        answers["updated"] = asked.found
    answers["log"] = Path(folder / "updated.log").read_text(errors="replace")

    # A replica with the new weights and their version, and a server that knows of no version.
    model = ("--model-path", str(new))
    options = (*NAME, *model, "--weight-version", "v2")
    with with_store(folder, "replica", "fp4", environment, "file", *options) as server:
        asked = Asked(server, store)
        asked.step("v2")
        asked.step("alone", prompt=1)
        answers["replica"] = asked.found
    return answers


JOBS = {"weights": weights}
