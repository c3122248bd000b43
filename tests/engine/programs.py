"""Environments of servers and programs that tests start, and what several servers are asked."""

import os
import subprocess

#: SGLang refuses to flush while backups of what it has answered are on their way, unless it may wait.
FLUSH = "/flush_cache?timeout=30"


def clean_environment(**more):
    """Changes to this process's environment: variables that tests set are empty; one thread per process."""
    unwanted = [key for key in os.environ if "KVPOOL" in key or key == "TRITON_INTERPRET"]
    return {**dict.fromkeys(unwanted, ""), "OMP_NUM_THREADS": "1", **more}


def python_path(*first):
    """PYTHONPATH of this process behind some folders."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def printed_by(command, limit_s, **environment):
    """What a program prints; it has to succeed."""
    environment = {**os.environ, **clean_environment(**environment)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def scored(server, start=0, **prompt):
    """A prefill with log-probabilities of tokens behind `start`; rows of earlier tokens may be cached."""
    sampling = {"temperature": 0, "max_new_tokens": 1}
    return server.generate(**prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=start)
