"""`sgl-kvpool evaluate` with MTP, of a checkpoint whose drafts are accepted: it has a column for them."""

import json
import random
import re
import shutil
import string
import subprocess
import sys

import copying_deepseek
import pytest

from emulated_cuda.conftest import environment
from sgl_kvpool.demo.model import model_path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

MTP = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
SERVER = (
    *("--context-length", "1024", "--max-total-tokens", "2048", "--mem-fraction-static", "0.3"),
    *("--chunked-prefill-size", "256", "--max-running-requests", "4", "--decode-log-interval", "1"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)


def test_accepted_drafts_are_a_column(tmp_path):
    """They are those of the scheduler's log, but for a step behind the end of each answer."""
    model = copying_deepseek.write(tmp_path / "model", "deepseek_v3")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # of bytes
        shutil.copy(model_path() / name, model)
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("".join(random.Random(1).choices(string.printable[:94], k=300)))
    command = [sys.executable, "-m", "sgl_kvpool", "evaluate", "--model", model, "--out", out, "--text", text]
    command += ["--layouts", "fp4", "--windows", "2", "--window-tokens", "140", "--hidden-tokens", "0"]
    done = subprocess.run(
        [*command, "--", *SERVER, *MTP], capture_output=True, text=True, env=environment("cuda"), timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    head, units, row, *_ = done.stdout.partition("\n\n")[2].splitlines()
    assert "  accepted drafts" in head
    assert "  per step (error)" in units
    [result] = json.loads((out / "evaluate.json").read_text())["results"]
    drafts = result["accepted_drafts"]
    assert f"  {sum(drafts) / 2:.3f} (" in row
    assert len(drafts) == 2
    lines = re.findall(r"#running-req: (\d).*accept len: ([\d.]+)", (out / "server-fp4.log").read_text())
    steps = [(int(requests), float(length) - 1) for requests, length in lines]
    of_both = steps[[requests for requests, _ in steps].index(2) :]  # behind SGLang's warm-up
    logged = sum(n * accepted for n, accepted in of_both) / sum(n for n, _ in of_both)
    assert sum(drafts) / 2 == pytest.approx(logged, abs=0.2)
    assert 0.5 < logged < 2.5
