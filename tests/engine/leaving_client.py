"""A client that goes away in the middle of a streamed answer."""

import http.client
import json

from sgl_kvpool.demo.cluster.servers import metric_sum, until

#: More than are read before the client goes.
NEW_TOKENS = 900
#: Lines read of the answer: each event has one, and an empty one behind it.
LINES = 12


def leave(server, text):
    """Read the first tokens of an answer and close the connection; returns once the server has noticed.

    From then on the server exposes `sglang:inter_token_latency_seconds` and
    `sglang:num_aborted_requests_total`.
    """
    before = metric_sum(server, "sglang:num_aborted_requests_total")
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = json.dumps({"text": text, "sampling_params": sampling, "stream": True})
    client.request("POST", "/generate", body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    assert answer.status == 200
    lines = [answer.readline() for _ in range(LINES)]
    assert all(line.startswith(b"data: {") for line in lines[::2]), lines
    # Close both: the answer keeps the socket open.
    answer.close()
    client.close()
    until(lambda: metric_sum(server, "sglang:num_aborted_requests_total") > before, "an aborted request")
