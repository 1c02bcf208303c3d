"""Ports that stay ours between being chosen and being listened on.

A server imports what it needs before it listens, which takes vLLM ten seconds. A port that was free when it was chosen
may be anybody's by then: every Ray process, every rank and every connection that is opened takes one of the same range.
So it is held meanwhile, by a socket that is bound with ``SO_REUSEADDR`` and does not listen. The kernel (socket(7))
then gives it to nobody who asks for any port, and lets in who names it and sets ``SO_REUSEADDR`` as well, as servers
do.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from vime_rollout.errors import EngineStartError


@contextmanager
def held_port(host: str, port: int, what: str) -> Iterator[int]:
    """Keep a port for a server that is being started, for the length of the block.

    Args:
        host: Address that it will listen on.
        port: Which one; 0 chooses one that is free.
        what: The server's name, for errors.

    Yields:
        The port.

    Raises:
        EngineStartError: When it is busy; names the process that has it where that can be seen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is not busy either
        try:
            holder.bind((host, port))
        except OSError as error:
            busy = bool(port) and error.errno == errno.EADDRINUSE
            raise EngineStartError(
                "the port is busy" if busy else "the address cannot be listened on",
                where=f"{what} at {host}:{port}",
                seen=_user(port) if busy else str(error),
                expected="a free port",
                fix="choose another port, or 0 for a free one",
            ) from error
        yield int(holder.getsockname()[1])


def _user(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                owner = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f"process {connection.pid} ({owner}) listens on it"
    except psutil.Error:
        return "a process that cannot be seen has it"
    return "something has it"
