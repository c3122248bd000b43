"""Secrets among a server's arguments, which no command prints or stores."""

import argparse
import re

import pytest
from sglang.srt.server_args import ServerArgs

from sgl_kvpool.commands.arguments import SECRETS, given, without_secrets


@pytest.fixture(scope="module")
def options():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [option for action in parser._actions for option in action.option_strings]


def test_all_of_sglangs(options):
    named = [one for one in options if re.search(r"(key|passw\w*|secret\w*|credential\w*|auth\w*)$", one)]
    assert {*named, "--watermark-config"} == set(SECRETS) <= set(options)
    others = [one for one in options if given([one], SECRETS) and one not in SECRETS]
    assert others == ["--ssl-keyfile"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--admin-api-key", "a=b=", "--tp", "8"], ["--admin-api-key", "SECRET", "--tp", "8"]),
        (["--adm=a=", "--tp=8"], ["--adm=SECRET", "--tp=8"]),
        (["--ssl-keyfile", "f", "--ssl-keyfile-p", "a"], ["--ssl-keyfile", "f", "--ssl-keyfile-p", "SECRET"]),
        (["--ssl-keyfile=f", "--watermark-config={}"], ["--ssl-keyfile=f", "--watermark-config=SECRET"]),
        (['{"secret_key": "a\\"b", "bucket": "b"}'], ['{"secret_key": "SECRET", "bucket": "b"}']),
        (['--x={"access_key":"a","token_map":"f"}'], ['--x={"access_key":"SECRET","token_map":"f"}']),
        (['{"PASSWORD": 12, "a": 1}'], ['{"PASSWORD": "SECRET", "a": 1}']),
        (['{"token": ["a"], "n": [1]}'], ['{"token": "SECRET", "n": [1]}']),
        (
            ['{"AWS_SECRET_ACCESS_KEY":"a"}', '{"private_key":"b"}'],
            ['{"AWS_SECRET_ACCESS_KEY":"SECRET"}', '{"private_key":"SECRET"}'],
        ),
        (["--otlp-traces-endpoint=http://u:a@h:4/x"], ["--otlp-traces-endpoint=http://u:SECRET@h:4/x"]),
        (["--api-key"], ["--api-key"]),
    ],
)
def test_what_stands_for_them(words, shown):
    assert without_secrets(words) == shown
