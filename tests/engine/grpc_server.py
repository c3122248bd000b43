"""SMG's gRPC servicer, which spawns its schedulers without SGLang's Engine."""

import sys

from tiny_model import NEW_TOKENS, PROMPTS

from sgl_kvpool.commands.processes.local_server import LocalServer
from sgl_kvpool.commands.processes.server import cpu_arguments, free_port


def serve(model_path, folder):
    """Each prompt's greedy tokens, one request after the other, and the server's log."""
    from transformers import AutoTokenizer

    folder.mkdir()
    port, http_port = free_port(), free_port()
    arguments = [*cpu_arguments(model_path, port), "--smg-grpc-mode", "--kv-cache-layout", "fp4"]
    # Its warm-up has tokens that the model does not know. Metrics are all that it answers by HTTP.
    arguments += ["--skip-server-warmup", "--enable-metrics", "--smg-http-sidecar-port", str(http_port)]
    environment = {
        "KVPOOL_PREFILL_READS_ROWS": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sgl_kvpool.demo.models",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    log = folder / "server.log"
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with LocalServer(command, http_port, log, environment, ready="/metrics"):
        answers = [generate(port, tokenizer(prompt).input_ids) for prompt in PROMPTS]
    return {"output_ids": answers, "log": log.read_text(errors="replace")}


def generate(port, input_ids):
    import grpc
    from smg_grpc_proto import sglang_scheduler_pb2 as proto
    from smg_grpc_proto import sglang_scheduler_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        request = proto.GenerateRequest(
            request_id=str(len(input_ids)),
            tokenized=proto.TokenizedInput(input_ids=input_ids),
            sampling_params=proto.SamplingParams(
                temperature=0, top_p=1, top_k=1, repetition_penalty=1, n=1, max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
            ),
        )  # fmt: skip
        *_, answer = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel).Generate(request, timeout=300)
    return list(answer.complete.output_ids)


JOBS = {"grpc": serve}
