"""Keep the garbage collector from pausing a rollout.

Modules, tokenizer, data and graders leave a million objects that live as long as the process. CPython's collector walks
through all of them whenever enough young ones have survived, which answers of engines see to every few steps: 0.25 to
0.3 s each time, while every engine waits to be read from. What is there once a process is ready is set apart instead;
what comes later is collected as ever.
"""

from __future__ import annotations

import gc


def set_apart() -> None:
    """Collect once, and let later collections leave out all that lives now.

    For a process that is about to begin its work, after it has loaded what it keeps.
    """
    gc.collect()
    gc.freeze()
