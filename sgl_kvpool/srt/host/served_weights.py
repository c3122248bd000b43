"""The weights that a process serves, and their name in the keys of stores."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

#: Versions that name no weights; "default" is SGLang's for servers that give none.
_UNNAMED = (None, "", "default")
#: Hexadecimal digits of a key that name the weights.
_DIGITS = 16


class ServedWeights:
    """The weights that this process serves, and their name in the keys of stores.

    All ranks see the same updates, so they agree on names without a message. The version that an update gives
    names the weights if it differs from the one before; otherwise the number of updates and a random part,
    which the ranks have in common, do. After an update that failed or loaded nothing, the random part is that
    of one replica, since another one's weights may differ. Without an update and a version, keys contain no
    name.

    `digits`: The name as the last digits of a key; empty for none.
    `unsettled`: Whether the weights may have changed since they were named. SGLang's threads for stores read
      both.
    `has_store`: Whether a store was attached.
    `first_operation`: Id of the first operation of SGLang's for a store that can have rows of these weights.
    """

    def __init__(self) -> None:
        self.digits = ""
        self.unsettled = self.has_store = False
        self.first_operation = 0
        self._thread = threading.local()
        self._random: str | None = None
        self._of_replica: str | None = None
        self._updates = 0
        #: Version that the last update gave, and the one before it.
        self._version: str | None = None
        self._before: str | None = None
        # Of a session: whether one is open, its last call has loaded weights, one has failed, and SGLang's
        # caches were flushed after the last.
        self._is_open = self._loaded = self._failed = self._flushed = False

    def key(self, key: str) -> str:
        """Key of a page of these weights, as long as SGLang's, because names of files are limited.

        The last digits of the hash make room for those of the weights. A key of these weights stays as it is.
        """
        digits = getattr(self._thread, "digits", self.digits)
        return key[: len(key) - len(digits)] + digits

    def keys(self, keys: Sequence[str]) -> list[str]:
        return [self.key(key) for key in keys]

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Keep the name for this thread inside the block, in which the weights may get another one."""
        self._thread.digits = self.digits
        try:
            yield
        finally:
            del self._thread.digits

    def start(self, version: str, random: str, of_replica: str, k_scales: str) -> None:
        """Name the weights before a store is attached, by the server's `--weight-version`.

        `random` and `of_replica` are the random part, and that of this replica alone.
        """
        self._random, self._of_replica, self.has_store = random, of_replica, True
        if not self._updates:
            self._version = version
        if not self.unsettled:
            self._name(k_scales)

    def begin(self, version: str, *, session: bool = False) -> None:
        """Weights change from now on, in this call or until `end`; `version` is the one before."""
        self.unsettled = True
        self._updates += 1
        self._version, self._before = None, version
        # SGLang accepts an update of one call within a session, which goes on.
        self._failed = self._is_open and self._failed
        self._is_open = self._is_open or session
        self._loaded = self._flushed = False

    def begin_load(self) -> None:
        """A call of a session loads weights next."""
        self._loaded = self._flushed = False

    def loaded(self, version: str | None) -> None:
        """Weights were loaded, and the request gave this version; or it gave a version alone."""
        self._loaded = True
        if version not in (None, self._before) and not self._failed:
            self._version = version

    def end_load(self) -> None:
        """A call of a session ends. If it loaded no weights, no version names what the session leaves."""
        if not self._loaded:
            self._failed, self._version = True, None

    def renamed(self, version: str, before: str) -> None:
        """A request gave a version alone, as after weights that arrived by RDMA."""
        if version == before:
            return
        if not self._is_open:
            self.begin(before)
        self.loaded(version)

    def end(self) -> bool:
        """A session ends; whether SGLang's caches were flushed after its last load."""
        self._is_open = False
        return self._flushed

    def flushed(self, k_scales: Callable[[], str]) -> bool:
        """SGLang's caches are empty: name the weights if they may have changed. False if that has to wait."""
        self._flushed = True
        if self._is_open or not self.unsettled:
            return False
        self._name(k_scales())
        self.unsettled = False
        return True

    def _name(self, k_scales: str) -> None:
        name = f"{self._version} {k_scales}"
        if self._version in _UNNAMED:
            random = self._random if self._loaded and not self._failed else self._of_replica
            name = f"{random} {self._updates}" if self._updates else ""
        # A version of the command line may be no UTF-8.
        encoded = name.encode(errors="surrogatepass")
        self.digits = hashlib.blake2b(encoded, digest_size=_DIGITS // 2).hexdigest() if name else ""


#: The weights of this process, which has one scheduler.
SERVED = ServedWeights()
