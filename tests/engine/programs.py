"""Environments of servers and programs that tests start."""

import os
import subprocess


def clean_environment(**more):
    """Changes to this process's environment: variables that tests set are empty; one thread per process."""
    unwanted = [key for key in os.environ if "KVPOOL" in key or key == "TRITON_INTERPRET"]
    return {**dict.fromkeys(unwanted, ""), "OMP_NUM_THREADS": "1", **more}


def python_path(*first):
    """PYTHONPATH of this process behind some folders."""
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


def printed_by(command, limit_s, **environment):
    """What a program prints; it has to succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **clean_environment(**environment)},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout
