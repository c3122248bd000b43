"""`sgl-kvpool evaluate`: the user's checkpoint is served once per layout, and one table compares the results.

The comparison is the demo's, with a text and server arguments of the user's; a number is hidden in a long
text besides, because narrow rows fail there first, and no perplexity shows it.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from sgl_kvpool import __version__, env
from sgl_kvpool.commands import arguments as common
from sgl_kvpool.commands.doctor.probes import machine
from sgl_kvpool.commands.evaluate import report
from sgl_kvpool.commands.evaluate.measure import (
    ENGLISH,
    FILLER,
    Scores,
    accepted_drafts,
    find_passkeys,
    score,
)
from sgl_kvpool.commands.named_model import find_model, fingerprint
from sgl_kvpool.commands.plan.plannable import check_sizes
from sgl_kvpool.commands.processes.forks import Forks
from sgl_kvpool.commands.processes.server import Server, free_port, import_once, in_turn
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.refusal import shown

#: Server arguments that this command sets itself, or that its requests lack.
_OURS = (
    *("--model-path", "--model", "--port", "--kv-cache-layout", "--nnodes", *common.SECRETS),
    *("--ssl-certfile", "--ssl-keyfile", "--smg-grpc-mode", "--grpc-mode"),
)
#: Depths at which a number is hidden; the default length of the text is the longest that fits, up to a limit.
_DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_HIDDEN_TOKENS = 131072
#: Tokens of a request besides such a text: its frame and the answer.
_BESIDES_TOKENS = 192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_layouts(parser, " (all); bf16 is the reference")
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="a checkpoint's folder, or owner/name on Hugging Face"
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=ENGLISH,
        metavar="FILE",
        help="UTF-8 text that is scored: of your users' kind (prose of Python's documentation)",
    )
    parser.add_argument(
        "--windows", type=int, default=64, metavar="N", help="windows of the text, 2 at least (64 at most)"
    )
    parser.add_argument(
        "--window-tokens", type=int, default=1024, metavar="N", help="tokens of a window (1024)"
    )
    parser.add_argument(
        "--hidden-tokens",
        type=int,
        metavar="N",
        help="tokens of the texts in which a number is hidden; 0 for none (as many as context and pool "
        f"allow, {_MOST_HIDDEN_TOKENS} at most)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("evaluate-results"),
        metavar="FOLDER",
        help="folder for evaluate.json, evaluate.png and the servers' logs; the same command continues a run "
        "that was stopped (evaluate-results)",
    )
    common.add_server_arguments(
        parser,
        "; with --speculative-algorithm, a column shows the drafts accepted per step, which narrow rows "
        "lower before answers look worse",
    )


@dataclasses.dataclass(frozen=True)
class _Subject:
    """What is served and asked, the same for every layout.

    `prefix_tokens` of a window, in whole pages, are a request of their own: sparse attention attends a
    prompt's first chunk as computed, and stored rows only behind it. `checkpoint` identifies all files.
    """

    model: str
    rank: int
    rope: int
    prefix_tokens: int
    text: str
    windows: int
    window_tokens: int
    hidden_tokens: int | None
    arguments: tuple[str, ...]
    checkpoint: str = ""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What a run must have in common with an earlier one whose results it takes over."""
        return {
            **dataclasses.asdict(self),
            "versions": [__version__, metadata.version("sglang")],
            "arguments": list(self.arguments),
            "gpu": machine().get("gpu"),  # None on a CPU
            "text": hashlib.sha256(self.text.encode()).hexdigest(),
        }

    def is_unchanged(self) -> bool:
        return self.checkpoint.startswith(fingerprint((self.model, *self.arguments)))

    def server(self, layout: MLAKVCacheLayout, log: Path) -> Server:
        arguments = ["--model-path", self.model, "--port", str(free_port())]
        # The user's --host, such as a published command's, may be another machine's.
        arguments += ["--kv-cache-layout", layout.value, *self.arguments, "--host", "127.0.0.1"]
        # The user's classes, if any, and not the demo's.
        environment = {"SGLANG_EXTERNAL_MODEL_PACKAGE": os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", "")}
        environment["SGLANG_RADIX_FORCE_MISS"] = "0"
        if not self.prefix_tokens:
            environment[env.PREFILL_READS_ROWS] = "1"
        return Server(arguments, log, environment, wait_seconds=3600)

    def windows_of(self, server: Server) -> list[list[int]]:
        """The text in windows, each after the tokens with which every text of the tokenizer begins.

        ValueError if the text has fewer than two windows: differences of one have no standard error.
        """
        before, ids = server.token_ids(""), server.token_ids(self.text)
        ids, step = ids[len(before) :], self.window_tokens - len(before)
        found = [before + ids[n * step : (n + 1) * step] for n in range(min(self.windows, len(ids) // step))]
        if len(found) < 2:
            raise ValueError(
                f"--text has {len(ids)} tokens, and two windows of {self.window_tokens} are needed; give "
                "more text or fewer --window-tokens"
            )
        return found

    def hidden_characters(self, server: Server, info: dict[str, Any]) -> int:
        """Characters of the texts in which numbers are hidden, by this tokenizer; 0 for none."""
        tokens, pages_tokens = self.hidden_tokens, 2 * info["page_size"]
        fitting = min(server.context_tokens(), info["max_total_num_tokens"] - pages_tokens) - _BESIDES_TOKENS
        if tokens is None:
            tokens = max(0, min(fitting, _MOST_HIDDEN_TOKENS))
        elif tokens > fitting:
            raise ValueError(f"--hidden-tokens {tokens}: context and pool of this server allow {fitting}")
        lines = 100
        return tokens * lines * len(FILLER) // len(server.token_ids(FILLER * lines))


class _Evaluation:
    """Results of a run, in a folder; a later run with the same facts continues it."""

    def __init__(self, subject: _Subject, folder: Path):
        self.subject, self.folder = subject, folder
        self.results: dict[str, report.Result] = {}
        self.windows: list[list[int]] = []
        self.characters = self.scored_tokens = self.prefix_tokens = 0
        self._json = folder / "evaluate.json"
        if self._json.exists():
            with self._reading(self._json):
                earlier = json.loads(self._json.read_text("utf-8"))
                before, now = earlier["evaluated"], subject.facts
                differ = [name for name in {**now, **before} if before.get(name) != now.get(name)]
                if not differ:
                    self.characters = earlier["hidden_characters"]
                    self.prefix_tokens = earlier["prefix_tokens"]
                    self.scored_tokens = earlier["held_out_tokens_scored"]
                    self.results = {one.layout: one for one in report.read_results(earlier)}
            if differ:
                raise ValueError(
                    f"{folder} has results of another {', '.join(differ)}; name another folder with --out"
                )
            for layout in self.results:
                self.scores(layout)

    def scores(self, layout: str) -> Scores:
        path = self.folder / f"scores-{layout}.json.gz"
        with self._reading(path), gzip.open(path, "rt", encoding="utf-8") as file:
            scores = Scores(**json.load(file))
            parts = scores.log_probabilities, scores.top_tokens, scores.best
            counts = {sum(map(len, part)) for part in parts}
            if counts != {self.scored_tokens}:
                raise ValueError(f"not the {self.scored_tokens} tokens of evaluate.json")
        return scores

    @contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        """Raise ValueError with the way out if a file of the folder is damaged or of another program."""
        try:
            yield
        except Exception as error:  # parsers and classes raise anything about what others have written
            raise ValueError(
                f"{file} is damaged ({type(error).__name__}: {error}); remove {self._json} to begin again, "
                "or name another folder with --out"
            ) from None

    def ask(self, server: Server, layout: MLAKVCacheLayout, start_seconds: float) -> tuple[None, str]:
        """Score the windows, then look for hidden numbers; writes at once what was found."""
        subject, info = self.subject, report.info_of(server, layout)
        if not subject.is_unchanged():
            raise ValueError("files of the checkpoint or of the arguments have changed since this run began")
        info["page_size"] *= info.get("dcp_size") or 1  # of the radix cache
        self._size(server, info)
        self.windows = self.windows or subject.windows_of(server)
        if layout not in self.results:
            began = time.monotonic()
            scores = score(server, self.windows, self.prefix_tokens)
            seconds = start_seconds, time.monotonic() - began
            self.scored_tokens = sum(map(len, scores.log_probabilities))
            path = self.folder / f"scores-{layout}.json.gz"
            with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
                json.dump(dataclasses.asdict(scores), file)
            # Together with the scores: a later run asks no server again whose scores it finds.
            drafts = accepted_drafts(server, self.windows) if info["speculative_algorithm"] else None
            row = layout.row_format(subject.rank, subject.rope)
            self.write(report.result_of(info, row, scores, *seconds, accepted_drafts=drafts))
        found = self.results[layout]
        if self.characters:
            hidden = find_passkeys(server, self.characters, _DEPTHS)
            self.write(dataclasses.replace(found, hidden=hidden))
        return None, f"{len(self.windows)} windows scored in {found.scoring_seconds:.0f} s"

    def _size(self, server: Server, info: dict[str, Any]) -> None:
        """Let the first server decide the lengths of texts; ValueError if they do not fit this one."""
        subject, page_size, window = self.subject, info["page_size"], self.subject.window_tokens
        # SGLang never schedules a prompt that leaves less than two pages.
        most = min(server.context_tokens(), info["max_total_num_tokens"] - 2 * page_size) - 1
        least = 2 * page_size if subject.prefix_tokens else 0
        if not least <= window <= most:
            raise ValueError(
                f"--window-tokens {window}: context, pool and pages here allow {least} to {most}"
            )
        characters = subject.hidden_characters(server, info)
        if all(result.hidden is None for result in self.results.values()):
            self.characters = characters
        if self.characters > characters:
            raise ValueError("the pool is too small for other layouts' hidden texts; give another --out")
        if not self.results:
            self.prefix_tokens = subject.prefix_tokens // page_size * page_size

    def compare(self) -> list[report.Result]:
        """Results in the layouts' order, with their differences to bf16 if it was served."""
        self.write(*report.with_differences(self.ordered, self.scores))
        return self.ordered

    @property
    def ordered(self) -> list[report.Result]:
        return [self.results[name] for name in map(str, MLAKVCacheLayout) if name in self.results]

    @property
    def facts(self) -> dict[str, Any]:
        return {
            **report.measured_on(),
            "evaluated": self.subject.facts,
            "prefix_tokens": self.prefix_tokens,
            "hidden_characters": self.characters,
            "token": "token",
            "held_out_tokens_scored": self.scored_tokens,
        }

    def write(self, *results: report.Result) -> None:
        self.results.update({one.layout: one for one in results})
        report.write_json(self._json, self.ordered, self.facts)


def run(arguments: argparse.Namespace) -> int:
    """Serve, ask, print, write; returns 1 if a server failed.

    ValueError if an argument is invalid, model or text cannot be read, or the folder has damaged results or
    those of another run; OSError if the results cannot be written.
    """
    subject = _subject(arguments)
    with common.naming("--out", arguments.out):
        arguments.out.mkdir(parents=True, exist_ok=True)
    evaluation = _Evaluation(subject, arguments.out)
    # The widest rows come first: they have the smallest pool, which every hidden number must fit.
    layouts = arguments.layouts or list(MLAKVCacheLayout)
    layouts.sort(key=lambda one: -one.row_format(subject.rank, subject.rope).row_bytes)
    found, hides = evaluation.results, evaluation.characters
    left = [one for one in layouts if one not in found or (hides and found[one].hidden is None)]
    for layout in (one for one in layouts if one not in left):
        print(f"{layout}: taken from {arguments.out}")
    on_cpu = "--device cpu" in " ".join(subject.arguments).replace("--device=", "--device ")
    if not left:
        print("nothing is left to serve", flush=True)
    with ExitStack() as stack:
        # A process that has initialized CUDA cannot be forked.
        forks = import_once(stack.enter_context(Forks())) if on_cpu and left else None
        _, failed = in_turn(
            left,
            lambda layout: subject.server(layout, arguments.out / f"server-{layout}.log"),
            evaluation.ask,
            forks,
        )
    if failed and evaluation.results and subject.is_unchanged():
        print("The same command goes on from here; --layouts leaves a layout out.")
    if not evaluation.results:
        return 1
    results = evaluation.compare()
    print(f"\n{report.table(results, 'token')}\n\nall numbers: {arguments.out / 'evaluate.json'}", flush=True)
    plot = arguments.out / "evaluate.png"
    without_plot = report.plot_or_reason(plot, results, Path(subject.model).name, evaluation.facts)
    print(without_plot or f"plot:        {plot}")
    return int(failed)


def _subject(arguments: argparse.Namespace) -> _Subject:
    for flag, count, least in (
        ("--windows", arguments.windows, 2),
        ("--window-tokens", arguments.window_tokens, 128),
        ("--hidden-tokens", arguments.hidden_tokens or 0, 0),
    ):
        if not least <= count < 1 << 31:
            raise ValueError(f"{flag} {shown(count)} is not a number from {least} to {(1 << 31) - 1}")
    with common.naming("--model", arguments.model):
        if Path(arguments.model).is_file():
            raise ValueError(f"--model {arguments.model} is a file; a server needs the checkpoint's folder")
        with find_model(arguments.model).sglang_path() as path:
            config = json.loads((Path(path) / "config.json").read_text("utf-8", errors="replace"))
    check_sizes(config)
    texts = config.get("text_config")
    config = {**config, **(texts if isinstance(texts, dict) else {})}
    if missing := [name for name in ("kv_lora_rank", "qk_rope_head_dim") if config.get(name) is None]:
        raise ValueError(
            f"--model {arguments.model} is not an MLA model: its config.json has no {' and '.join(missing)}"
        )
    words, is_sparse = arguments.server_arguments, "index_topk" in config
    if name := common.given(words, (*_OURS, "--disable-radix-cache") if is_sparse else _OURS):
        raise ValueError(f"{name} is set by this command, or unfit for it; leave it out of what follows --")
    if kept := [word for word in common.without_secrets(words) if word not in words]:
        raise ValueError(f"{kept[0]}: the logs would keep this secret; leave it out, or give a @FILE")
    parser = argparse.ArgumentParser("sglang serve", add_help=False)
    parser.add_argument("--context-length", type=common.whole, default=config.get("max_position_embeddings"))
    context_tokens = parser.parse_known_args(words)[0].context_length or _MOST_HIDDEN_TOKENS
    if (window := arguments.window_tokens) >= context_tokens:
        raise ValueError(f"--window-tokens {window}: a context of {context_tokens} allows one less, at most")
    with common.naming("--text", arguments.text):
        text = arguments.text.read_text("utf-8")
    return _Subject(
        model=arguments.model,
        rank=config["kv_lora_rank"],
        rope=config["qk_rope_head_dim"],
        prefix_tokens=arguments.window_tokens // 2 if is_sparse else 0,
        text=text,
        windows=arguments.windows,
        window_tokens=arguments.window_tokens,
        hidden_tokens=arguments.hidden_tokens,
        arguments=tuple(words),
        checkpoint=fingerprint((arguments.model, *words)) + Path(path).name,  # a hub's commit
    )
