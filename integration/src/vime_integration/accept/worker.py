"""The process of one stage: ``python -m vime_integration.accept.worker REQUEST``.

REQUEST is a JSON object with ``function``, ``answer`` (the file to write) and ``acceptance``. What the function
returns, or why it failed, goes to the file in one rename; a process that dies on the way leaves none, which its
supervisor sees.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from vime_integration.accept.record import Acceptance


def main(request: str) -> int:
    """Run one stage.

    Args:
        request: The JSON object.

    Returns:
        0 where the stage reported, 1 where it raised.
    """
    asked = json.loads(request)
    module, _, name = asked["function"].partition(":")
    answer: dict[str, Any]
    try:
        report = getattr(import_module(module), name)(Acceptance.from_json(asked["acceptance"]))
        answer = asdict(report)
    except Exception as error:  # noqa: BLE001 - the edge of the process: the cause is kept in file and log
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    target = Path(asked["answer"])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(answer, default=str), encoding="utf-8")
    partial.rename(target)
    return int("error" in answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
