"""A temporary folder for each engine, which goes when the engine does.

vLLM keeps unix sockets and rendezvous files in the temporary folder and removes them when it ends by itself. A server
that is killed, or crashes, leaves them: a few with every death, for ever. So a tree gets a folder of its own as
``TMPDIR``, and whoever ends the tree (``warden.py``) removes it.

What is meant to be shared stays where it was: torch's compile cache and Ray's session lie in the temporary folder
unless told otherwise, and are told so here. vLLM's and Triton's caches lie in the home folder. A ``VLLM_RPC_BASE_PATH``
that is set already is left alone: vLLM's sockets are then its setter's to remove.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vime_rollout.errors import EngineStartError

#: Longest path of a unix socket, bytes (``sun_path`` of unix(7), less its end).
SOCKET_PATH_BYTES = 107
#: vLLM names its sockets by a UUID.
_SOCKET_NAME_BYTES = len("/") + 36


def make_scratch(environment: Mapping[str, str], *, name: str) -> tuple[Path, dict[str, str]]:
    """Make an engine's temporary folder, inside the one that its environment names.

    Args:
        environment: What the engine was to be started with.
        name: Name of the engine, for errors.

    Returns:
        The folder, and the environment with it.

    Raises:
        EngineStartError: When there can be no folder, or its path is too long for vLLM's sockets.
    """
    parent = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="vime-", dir=parent))
    except OSError as error:
        raise EngineStartError(
            "engine gets no temporary folder",
            where=f"engine {name}",
            seen=str(error),
            expected="a folder that can be written to",
            fix="set TMPDIR, or free space in it",
        ) from error
    if "VLLM_RPC_BASE_PATH" not in environment:
        _check_length(folder, name)
    # Added at the end: a process names itself (VLLM::EngineCore) in the memory before its first variable, which
    # setproctitle no longer finds once that variable is set anew, as torch does with its cache's.
    return folder, {**environment, **temporary_variables(folder, environment)}


def temporary_variables(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a process a temporary folder of its own, and leave what is shared where it was.

    Args:
        folder: The folder.
        environment: What the process would have otherwise.
    """
    parent = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    shared = {"TORCHINDUCTOR_CACHE_DIR": str(parent / f"torchinductor_{_user()}"), "RAY_TMPDIR": str(parent)}
    added = {key: value for key, value in shared.items() if key not in environment}
    return {**added, "TMPDIR": str(folder)}


def _check_length(folder: Path, name: str) -> None:
    longest = SOCKET_PATH_BYTES - _SOCKET_NAME_BYTES
    if (length := len(os.fsencode(folder))) > longest:
        folder.rmdir()
        raise EngineStartError(
            "path of the temporary folder is too long for unix sockets",
            where=f"engine {name}",
            seen=f"{length} bytes, {folder}",
            expected=f"at most {longest} bytes",
            fix="set TMPDIR, or VLLM_RPC_BASE_PATH, to a folder with a shorter path",
        )


def _user() -> str:
    """The user as torch names its default cache (``torch._inductor.runtime.cache_dir_utils``)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        return f"uid_{os.getuid()}"
