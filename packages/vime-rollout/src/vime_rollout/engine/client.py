"""The HTTP side of an engine: vLLM's generate and RL routes, with bounded concurrency, deadlines and retries.

A generation has no side effect, and with a seed it is a function of its request and the weights, so sending it again
after a lost connection or an HTTP 5xx can neither duplicate nor change a sample. Retries are few, wait longer each
time, and live inside the request's one deadline. An HTTP 4xx is an answer, not a failure: it is never retried.

When the server is replaced (``move``) or given up (``cut``), what is in flight ends at once with an ``EngineBusyError``
instead of waiting for an answer that cannot come; ``incarnation`` tells such an end from an ordinary failure.

A client may be used from one event loop after another (each ``asyncio.run`` makes one): connections belong to the loop
they were opened in, and a new loop gets new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import httpx

from vime_rollout.engine.lanes import Lanes
from vime_rollout.engine.request import GenerateRequest, Generation, parse_generations
from vime_rollout.engine.window import NEWEST_DIALECT
from vime_rollout.errors import EngineBusyError, EngineRequestError, EngineResponseError, EngineTimeoutError
from vime_rollout.together import Slots, all_of

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.2
_CONNECT_S = 10.0
_KEEPALIVE_S = 2.0
_GENERATE = "/inference/v1/generate"
_PASSING_STATUS = frozenset({408, 425, 429})


class EngineClient:
    """Talks to one vLLM server.

    Args:
        url: Such as ``http://127.0.0.1:8000``.
        name: Name of the engine, for errors.
        max_concurrency: Most samples in flight; more wait.
        request_deadline_s: Seconds for one generation in the engine, retries included. Waiting for a slot is not
            counted: it is bounded by the deadlines of those who hold the slots.
        control_deadline_s: Seconds for a control call.
        retries: Further attempts after a failure that may pass.
        alive: Answers whether a retry makes sense at all (is the process there?).
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        max_concurrency: int = 256,
        request_deadline_s: float = 600.0,
        control_deadline_s: float = 120.0,
        retries: int = 2,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Keep the settings; nothing is opened before the first call."""
        self.url = url.rstrip("/")
        self.name = name
        self.in_flight = 0
        self.incarnation = 0
        self.dialect = NEWEST_DIALECT
        self.request_deadline_s = request_deadline_s
        self._max_concurrency = max_concurrency
        self._control_deadline_s = control_deadline_s
        self._retries = retries
        self._alive = alive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._slots = Slots(max_concurrency)
        self._scopes: set[asyncio.Timeout] = set()

    def _session(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            # The slots bound the generations; control calls do not wait behind them.
            # vLLM closes a connection that was idle for 5 s: give it up well before, or a call meets the closing.
            lanes = Lanes(self._max_concurrency, keepalive_s=_KEEPALIVE_S)
            timeout = httpx.Timeout(None, connect=_CONNECT_S)  # the deadline is set around the whole call
            self._http = httpx.AsyncClient(base_url=self.url, transport=lanes, timeout=timeout, trust_env=False)
            self._slots = Slots(self._max_concurrency)
            self._loop = loop
        return self._http

    async def close(self) -> None:
        """Close the connections of the running loop."""
        # Given up before it is closed: closing takes a while, and a call meanwhile must not get what is being closed.
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    async def cut(self) -> None:
        """End all generations in flight, waiting ones too, and close the connections of the running loop.

        Each ends with ``EngineBusyError``; none is sent again from here, because the server that had it is gone.
        """
        self.incarnation += 1
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)
        await self.close()  # the next call makes new connections and new slots

    async def move(self, url: str) -> None:
        """Cut what is in flight, and send everything from now on to another address.

        Args:
            url: Such as ``http://127.0.0.1:8000``.
        """
        self.url = url.rstrip("/")  # before anything is waited for: a call meanwhile makes its connections anew
        await self.cut()

    async def generate(self, request: GenerateRequest, *, deadline_s: float | None = None) -> Generation:
        """Generate one response; see ``generate_many``."""
        (generation,) = await self.generate_many(request, 1, deadline_s=deadline_s)
        return generation

    async def generate_many(
        self, request: GenerateRequest, count: int, *, deadline_s: float | None = None
    ) -> tuple[Generation, ...]:
        """Generate several responses: in one request, or in one each where the engine cannot.

        It cannot at temperature 0, where vLLM refuses to answer the same thing twice, and before vLLM 0.29, which
        answers with the last one to end. All these requests have one ``request_id``, by which vLLM aborts all of them.

        Args:
            request: What to generate.
            count: How many; the i-th is what ``request.alone(i)`` makes.
            deadline_s: Seconds from leaving the queue to the answer; ``None`` takes the configured deadline.

        Returns:
            The responses, in the order of their seeds.

        Raises:
            EngineTimeoutError: When the deadline passed.
            EngineRequestError: When the engine refused the request (too long, bad parameter).
            EngineResponseError: When the answer is not a valid completion.
            EngineBusyError: When the connection or the engine kept failing.
        """
        together = request.sampling.temperature > 0 and self.dialect.many_samples
        self.in_flight += count
        try:
            if count == 1 or together:
                return await self._generate(request, count, deadline_s)
            singles = (self._generate(request.alone(index), 1, deadline_s) for index in range(count))
            return tuple(generation for answer in await all_of(singles) for generation in answer)
        finally:
            self.in_flight -= count

    async def _generate(self, request: GenerateRequest, count: int, deadline_s: float | None) -> tuple[Generation, ...]:
        limit = self.request_deadline_s if deadline_s is None else deadline_s
        headers = {"x-session-id": request.session_id} if request.session_id else {}
        incarnation = self.incarnation
        attempts = 0

        async def send() -> httpx.Response:
            nonlocal attempts
            attempts += 1
            body = request.to_wire(count)
            return await self._answer(self._session(), "POST", _GENERATE, json=body, headers=headers)

        self._session()  # the slots belong to the running loop from here on
        started = time.monotonic()
        async with self._slots.hold(count):
            sent = time.monotonic()
            response = await self._uncut(limit, incarnation, send)
        done = time.monotonic()
        most, stamped = request.sampling.max_tokens, self.dialect.stamps_tokens
        spent = {"queue_s": sent - started, "seconds": done - sent, "attempts": attempts}
        with _no_collection():
            return parse_generations(
                _json(response, self._where("POST", _GENERATE)),
                count,
                engine=self.name,
                max_tokens=most,
                stamped=stamped,
                **spent,
            )

    async def _uncut(self, limit: float, incarnation: int, send: Callable[[], Awaitable[_T]]) -> _T:
        """Send within the deadline, unless the server is cut off before or meanwhile."""
        scope = asyncio.timeout(limit)
        try:
            if self.incarnation != incarnation:
                raise self._cut_error()
            async with scope:
                self._scopes.add(scope)
                return await self._retrying(send, "generate", incarnation)
        except TimeoutError as error:
            if self.incarnation != incarnation:
                raise self._cut_error() from error
            raise self._timeout_error(limit, "generate") from error
        finally:
            self._scopes.discard(scope)

    async def control(self, method: str, path: str, *, deadline_s: float | None = None, **options: Any) -> Any:
        """Make one control call within the control deadline; it is not retried, because it may have side effects.

        Args:
            method: ``"GET"`` or ``"POST"``.
            path: Route, such as ``"/pause"``.
            deadline_s: Seconds; ``None`` takes the configured deadline.
            options: ``text=True`` where the answer is no JSON; the rest for httpx (``json``, ``params``).

        Returns:
            The decoded answer, ``None`` for an empty one.
        """
        limit = self._control_deadline_s if deadline_s is None else deadline_s
        return await self.within(limit, self._once(self._session(), method, path, **options), f"{method} {path}")

    async def read(self, path: str, *, deadline_s: float | None = None) -> Any:
        """Ask for something within the control deadline; again after a failure that may pass, for it changes nothing.

        Args:
            path: Route, such as ``"/weight_info"``.
            deadline_s: Seconds, where they are fewer than the control deadline's.
        """
        limit = self._control_deadline_s if deadline_s is None else min(deadline_s, self._control_deadline_s)
        what = f"GET {path}"
        asked = self._retrying(lambda: self._once(self._session(), "GET", path), what, self.incarnation)
        return await self.within(limit, asked, what)

    async def within(self, limit: float, call: Awaitable[_T], what: str) -> _T:
        """Await ``call`` for at most ``limit`` seconds.

        Raises:
            EngineTimeoutError: When that was not enough; names ``what``.
        """
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as error:
            raise self._timeout_error(limit, what) from error

    def _timeout_error(self, limit: float, what: str) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"engine passed the deadline of {what}",
            where=f"engine {self.name} at {self.url}",
            seen=f"no answer after {limit:g} s, {self.in_flight} samples in flight",
            fix="raise the deadline, lower max_tokens or max_concurrency, or look at the engine's log",
        )

    def _cut_error(self) -> EngineBusyError:
        return EngineBusyError(
            "engine was given up or replaced while a request was in flight",
            where=f"engine {self.name}",
            fix="send the request again",
        )

    async def _retrying(self, send: Callable[[], Awaitable[_T]], what: str, incarnation: int) -> _T:
        for attempt in range(self._retries + 1):
            try:
                return await send()
            except EngineBusyError as error:
                if attempt == self._retries or not self._alive() or self.incarnation != incarnation:
                    error.add_note(f"{what}: {attempt + 1} attempts")
                    raise
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(
        self, session: httpx.AsyncClient, method: str, path: str, *, text: bool = False, **options: Any
    ) -> Any:
        response = await self._answer(session, method, path, **options)
        return (response.text or None) if text else _json(response, self._where(method, path))

    def _where(self, method: str, path: str) -> str:
        return f"engine {self.name}, {method} {self.url}{path}"

    async def _answer(self, session: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response:
        where = self._where(method, path)
        try:
            response = await session.request(method, path, **options)
        except (httpx.TransportError, OSError, AttributeError) as error:
            # A server that dies while a connection is being opened closes the socket under anyio, which then asks the
            # absent socket for its peer's name: an AttributeError, seen with anyio 4 and httpcore 1.
            raise EngineBusyError(
                "connection to the engine failed", where=where, seen=f"{type(error).__name__}: {error}"
            ) from error
        if response.status_code == 404:
            raise EngineRequestError(
                "engine lacks a route",
                where=where,
                seen=_message(response),
                fix="start it with VLLM_SERVER_DEV_MODE=1 and, from vLLM 0.30 on, --enable-scale-out (VLLMEngine does)",
            )
        if response.is_client_error and response.status_code not in _PASSING_STATUS:
            raise EngineRequestError("engine refused the request", where=where, seen=_message(response))
        if not response.is_success:
            raise EngineBusyError("engine failed on the request", where=where, seen=_message(response))
        return response


def _json(response: httpx.Response, where: str) -> Any:
    """Return the decoded answer, ``None`` for an empty one."""
    try:
        return response.json() if response.content else None
    except ValueError as error:
        raise EngineResponseError(
            "engine answered something that is no JSON", where=where, seen=response.text[:200]
        ) from error


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running meanwhile; nothing may be waited for.

    An answer has three containers of JSON for each token, of which nothing is left a moment later. Their number alone
    has the collector look at everything that lives in the process, again and again: for longer than decoding takes.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _message(response: httpx.Response) -> str:
    """Return status and the message inside vLLM's error body, or the body's beginning."""
    text = response.text[:500]
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, Mapping):
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, Mapping) else error)
    return f"HTTP {response.status_code}: {text}"
