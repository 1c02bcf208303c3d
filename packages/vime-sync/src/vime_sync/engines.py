"""The engines of one session: asked all at once, and exchanged one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vime_sync.client import EngineClient
from vime_sync.errors import NotStartedError, SyncError, TransactionError

#: Engines that are asked at once. Threads are only made when they are needed.
_THREADS = 256
logger = logging.getLogger(__name__)

Answer = dict[str, Any] | SyncError


class Engines:
    """An ordered set of engines, each an address that occurs once."""

    def __init__(self, urls: Sequence[str], deadline_s: float) -> None:
        """Nothing is sent.

        Args:
            urls: Base URLs.
            deadline_s: Seconds that any one request may take.

        Raises:
            TransactionError: If no engine is named, or one twice.
        """
        plain = [url.rstrip("/") for url in urls]
        if not plain or len(set(plain)) != len(plain):
            raise TransactionError("give each engine once", seen=str(list(urls)))
        self._deadline, self._closed = deadline_s, False
        self._clients = [EngineClient(url, deadline_s) for url in urls]
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="vime-sync")

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, index: int) -> EngineClient:
        return self._clients[index]

    @property
    def urls(self) -> list[str]:
        """Base URLs, in order."""
        return [engine.url for engine in self._clients]

    @property
    def connected(self) -> bool:
        """Whether every engine holds the session."""
        return all(engine.connected for engine in self._clients)

    def unclear(self) -> None:
        """Nobody knows any more what the engines hold: they are to be asked before the next update."""
        for engine in self._clients:
            engine.connected = False

    def ask(self, call: Callable[[EngineClient], dict[str, Any]]) -> list[Answer]:
        """Call every engine at once.

        Args:
            call: What to ask of an engine.

        Returns:
            The answers, in order; an engine's failure is its answer.

        Raises:
            NotStartedError: After `close`.
        """
        if self._closed:
            raise NotStartedError("this session is closed", where=", ".join(self.urls), fix="make a new one")

        def one(engine: EngineClient) -> Answer:
            try:
                return call(engine)
            except SyncError as error:
                return error

        return list(self._pool.map(one, self._clients))

    def find(self, url: str) -> EngineClient:
        """The engine of an address.

        Raises:
            TransactionError: If there is none.
        """
        for engine in self._clients:
            if engine.url == url.rstrip("/"):
                return engine
        raise TransactionError("this session has no such engine", seen=url, expected=f"one of {self.urls}")

    def add(self, url: str) -> None:
        """Take one more in.

        Raises:
            TransactionError: If it is here already.
        """
        self._fresh(url)
        self._clients.append(EngineClient(url, self._deadline))

    def remove(self, url: str, session: str) -> None:
        """Let one go.

        Raises:
            TransactionError: If it is not here, or the only one.
        """
        engine = self.find(url)
        if len(self._clients) == 1:
            raise TransactionError("a session needs an engine", seen=f"the only one, {engine.url}", fix="replace it")
        self._clients.remove(engine)
        _let_go(engine, session)

    def replace(self, old_url: str, new_url: str, session: str) -> None:
        """Put one in the place of another.

        Raises:
            TransactionError: If the old one is not here, or the new one is.
        """
        old = self.find(old_url)
        if new_url.rstrip("/") == old.url:
            old.close()  # nothing is said to it: who listens there now does not know the session
        else:
            self._fresh(new_url)
            _let_go(old, session)
        self._clients[self._clients.index(old)] = EngineClient(new_url, self._deadline)

    def _fresh(self, url: str) -> None:
        if url.rstrip("/") in self.urls:
            raise TransactionError("give each engine once", seen=url, expected=f"none of {self.urls}")

    def close(self, session: str) -> None:
        """Let all go; safe to call again."""
        if self._closed:
            return
        self._closed = True
        list(self._pool.map(lambda engine: _let_go(engine, session), self._clients))
        self._pool.shutdown()


def _let_go(engine: EngineClient, session: str) -> None:
    """Tell an engine that the session is over; one that does not answer forgets it with its process."""
    try:
        if engine.known:
            engine.call("disconnect", {"session": session})
    except SyncError as error:
        logger.info("vime-sync: %s was let go without an answer: %s", engine.url, error.what)
    finally:
        engine.close()
