"""Table of our server arguments, and the record of what they request and of what was decided.

The record is one underscore attribute of SGLang's `ServerArgs`. SGLang drops unknown fields when it parses
arguments, but pickles underscore attributes into every process of the server. This module imports neither
SGLang nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_kvpool import env
from sgl_kvpool.layout import MLAKVCacheLayout
from sgl_kvpool.memory.arrangement import KVArrangement
from sgl_kvpool.refusal import Refusal, shown
from sgl_kvpool.transfer.host_options import HOST_ENGINES, HOST_LAYOUTS, NODE, RANK, SAME, HostTierOptions

#: Default value: SGLang's own behaviour, or our choice.
AUTO = "auto"
#: Attribute of `ServerArgs` that holds the record.
_RECORD = "_kvpool_config"

#: Names of the options that a flag or keyword has requested on any `ServerArgs` of this process.
_requested: set[str] = set()


@dataclass(frozen=True)
class Option:
    """One argument of the server: a flag, an Engine keyword `name` and an environment variable `env`.

    `values` are those besides the default, which requests nothing; `help` is the text of `--help`.
    """

    name: str
    values: tuple[str, ...]
    help: str
    default: str = AUTO

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return f"KVPOOL_{self.name.upper()}"

    @property
    def words(self) -> str:
        """The option's name in messages."""
        return "KV " + self.name.removeprefix("kv_").replace("_", " ")

    @property
    def choices(self) -> tuple[str, ...]:
        return (self.default, *self.values)

    def parse(self, value: Any, given_as: str) -> str | None:
        """Validate a value against `choices` and strip spaces; None stays None.

        `given_as` precedes the value in the refusal: "--kv-cache-layout ", for example.
        """
        if value is None:
            return None
        text = str(value).strip() if isinstance(value, str | int) else None
        if text not in self.choices:
            raise Refusal(
                f"{given_as}{shown(value)} is not a {self.words}; choose one of: {', '.join(self.choices)}"
            )
        return text

    def from_env(self) -> str | None:
        """Value of the environment variable, None if it is unset; Refusal for a value not in `choices`."""
        value = env.text(self.env)
        return self.parse(value, f"{self.env}=")

    def resolve(self, server_args: Any) -> str:
        """Value that flag or keyword and environment request; Refusal if they contradict each other."""
        written = config_of(server_args).requested.get(self.name)
        exported = self.from_env()
        if written is not None and exported is not None and written != exported:
            raise Refusal(
                f"the {self.words} is {written!r} as argument ({self.flag} or {self.name}=) but "
                f"{exported!r} in the environment ({self.env}); give only one, or the same value in both"
            )
        if exported is None and self.name in _requested and _RECORD not in vars(server_args):
            # copy.copy, msgspec.structs.replace and ServerArgs(**fields) copy fields and nothing else.
            raise Refusal(
                f"this ServerArgs does not record a {self.words}, and another ServerArgs of this process "
                f"requested one; if it is a copy, make it with copy.deepcopy, otherwise set {self.env}="
                f"{'|'.join(self.choices)}"
            )
        return written or exported or self.default


LAYOUT = Option(
    "kv_cache_layout",
    tuple(layout.value for layout in MLAKVCacheLayout),
    "The bytes of an MLA KV cache row, which determine pool, memory budget and attention. "
    f"'{AUTO}' (as without the argument) leaves SGLang unchanged.",
)
ARRANGEMENT = Option(
    "kv_cache_arrangement",
    tuple(arrangement.value for arrangement in KVArrangement.of_rows()),
    "How the pages of all layers lie in memory, with --kv-cache-layout. layer_major is SGLang's way; in the "
    f"others a page is contiguous over all layers. '{AUTO}' (as without the argument) is layer_major.",
)
HOST_LAYOUT = Option(
    "kv_host_layout",
    HOST_LAYOUTS[1:],
    "The bytes of a row in the host tier (--enable-hierarchical-cache with --kv-cache-layout): narrower than "
    f"the device's, so that the same memory holds more tokens. '{SAME}' (as without the argument) keeps "
    "every bit.",
    default=SAME,
)
HOST_ENGINE = Option(
    "kv_host_engine",
    HOST_ENGINES,
    "The engine that moves pages between pool and host tier, with --kv-cache-layout. "
    f"'{AUTO}' (as without the argument) chooses one when the server starts.",
)
HOST_SHARING = Option(
    "kv_host_sharing",
    (NODE, RANK),
    "Whether the N tensor-parallel ranks of a machine share one copy of a page in host memory (node), so "
    "that the same memory holds N times the tokens, or keep one copy each (rank), with --kv-cache-layout. "
    f"'{AUTO}' (as without the argument) shares where that is supported.",
)
ERROR_SAMPLE = Option(
    "kv_error_sample",
    ("64", "512", "4096"),
    "One of how many prefills is compared with its stored rows, for the metrics of errors "
    "(--enable-metrics with --kv-cache-layout). 'never' (as without the argument) compares none.",
    default="never",
)
OPTIONS = (LAYOUT, ARRANGEMENT, HOST_LAYOUT, HOST_ENGINE, HOST_SHARING, ERROR_SAMPLE)
assert tuple(option.env for option in OPTIONS) == env.OPTIONS


def environment_problems() -> list[str]:
    """One line for each unknown or invalid environment variable; no process with the plugin accepts these."""
    found = []
    for option in OPTIONS:
        try:
            option.from_env()
        except Refusal as refusal:
            found.append(str(refusal))
    return found + env.problems()


@dataclass(frozen=True)
class KVPoolConfig:
    """What the user of a server requests, and what was decided; each step of the decision stores a new one.

    `requested`: Values by option's name: those of flags or keywords, after `decide` all.
    `is_command_line`: Whether the `ServerArgs` was parsed from a command line, and not built by a program.
    `is_decided`: Whether SGLang has resolved the `ServerArgs` with the plugin.
    `layout`: Layout of the rows; None for SGLang's own pool.
    `host_tier`: Options of the host tier, if there is one, whose sharing is chosen by `rules.host_sharing`.
    `hook_groups`: Names of the schedulers' hook groups; None without a layout.
    `weights_random`: Random part of the names of weights, for the ranks of all replicas.
    """

    requested: Mapping[str, str | None] = field(default_factory=dict)
    is_command_line: bool = False
    is_decided: bool = False
    layout: MLAKVCacheLayout | None = None
    arrangement: KVArrangement = KVArrangement.LAYER_MAJOR
    host_tier: HostTierOptions = field(default_factory=HostTierOptions)
    hook_groups: str | None = None
    weights_random: str | None = None

    def requests(self, option: Option) -> str:
        """The requested value of an option, or its default."""
        return self.requested.get(option.name) or option.default


def config_of(server_args: Any) -> KVPoolConfig:
    return getattr(server_args, _RECORD, None) or KVPoolConfig()


def store(server_args: Any, config: KVPoolConfig) -> None:
    setattr(server_args, _RECORD, config)


def record(server_args: Any, **changes: Any) -> None:
    store(server_args, replace(config_of(server_args), **changes))


def request(server_args: Any, values: Mapping[Option, str | None]) -> None:
    _requested.update(option.name for option, value in values.items() if value not in (None, option.default))
    record(server_args, requested={option.name: value for option, value in values.items()})


def decided(server_args: Any) -> KVPoolConfig:
    """The record of a `ServerArgs` with the values of all options; Refusal if they contradict each other."""
    values = {option: option.resolve(server_args) for option in OPTIONS}
    layout, sharing = values[LAYOUT], values[HOST_SHARING]
    return replace(
        config_of(server_args),
        requested={option.name: value for option, value in values.items()},
        is_decided=True,
        layout=None if layout == AUTO else MLAKVCacheLayout(layout),
        arrangement=choose_arrangement(values[ARRANGEMENT]),
        host_tier=HostTierOptions(
            values[HOST_LAYOUT], values[HOST_ENGINE], RANK if sharing == AUTO else sharing
        ),
    )


def choose_arrangement(requested: str) -> KVArrangement:
    if requested != AUTO:
        return KVArrangement(requested)
    # Layer-major rows lie as in SGLang's own pool, and all readers support them. Reads of the other two have
    # not been measured on a GPU.
    return KVArrangement.LAYER_MAJOR
