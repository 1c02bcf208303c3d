"""Checks that import: each in a fresh interpreter, and all together in either order.

Three passes find three kinds of fault. Alone: the module or a symbol is missing. Forward and reverse: an import fails,
or the process aborts, only because another came first; for any two modules, one of the two orders has each first. The
last two also say which libraries are mapped at the end (``libraries.py`` judges them).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util

from flavours import normalise

from verify.context import NO_DEVICE, Context
from verify.distributions import parse_requirement
from verify.probe import DUPLICATE_LLVM, Answer, ask
from verify.report import Result, passed, skipped
from verify.scan import Need, Symbol

_ABSENT = re.compile(r"ModuleNotFoundError: No module named '(\w+)[.\w]*'")
# Interpreters at a time: each may hold a whole vLLM.
WORKERS = 2
IMPORT_NAMES = {"megatron-core": "megatron"}
SHOWN = 4

RESOLVE = """
import importlib, types
def missing(module, name):
    try:
        found = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            if not isinstance(found, (types.ModuleType, type)):
                return ""
            if not hasattr(found, part):
                if isinstance(found, type):
                    return f"{found.__name__} has no {part}"
                try:
                    found = importlib.import_module(found.__name__ + "." + part)
                    continue
                except ModuleNotFoundError:
                    return f"{found.__name__} has no {part}"
            found = getattr(found, part)
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
answer([missing(module, name) for module, name in ARGUMENT])
"""

IN_ORDER = """
import importlib, pathlib
failed = {}
for module in ARGUMENT:
    try:
        importlib.import_module(module)
    except BaseException as error:
        failed[module] = f"{type(error).__name__}: {error}"
mapped = sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line})
answer({"failed": failed, "mapped": mapped})
"""

ENTRY_POINTS = """
from importlib import metadata
failed = {}
for distribution in metadata.distributions():
    if not (distribution.metadata["Name"] or "").lower().startswith("vime"):
        continue
    for point in distribution.entry_points:
        try:
            point.load()
        except BaseException as error:
            failed[f"{point.group}:{point.name}"] = f"{type(error).__name__}: {error}"
answer(failed)
"""


@dataclass(frozen=True, slots=True)
class Orders:
    """Results of the ordered passes, and the libraries each of them had mapped.

    Attributes:
        results: One for each order.
        mapped: Paths of shared libraries, by order; an order that died has none.
        duplicate_llvm: Whether a pass died of two copies of LLVM.
    """

    results: list[Result]
    mapped: dict[str, list[str]]
    duplicate_llvm: bool


def check_imports(context: Context) -> Iterator[Result]:
    """Check every module and symbol that our source needs, each top-level package in its own interpreter.

    Args:
        context: The environment.

    Yields:
        ``api:<package>`` for each third-party package, ``import:<package>`` for each of ours, ``entry-points``.
    """
    by_root: dict[str, list[Need]] = defaultdict(list)
    for need in context.needs:
        # A need stands with the package of its first choice: alternatives of one need are judged together.
        by_root[need.branches[0][0].root].append(need)
    roots = required_roots(), extra_roots()
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [(root, pool.submit(_api, context, root, by_root[root], *roots)) for root in sorted(by_root)]
        ours = [(name, pool.submit(_ours, context, name)) for name in context.packages]
        for _, job in [*jobs, *ours]:
            yield job.result()
    reply = ask(ENTRY_POINTS, deadline_s=context.deadline_s)
    wrong = [reply.problem] if reply.problem else [f"{name}: {text}" for name, text in reply.value.items()]
    yield judged(context, "entry-points", wrong, "all load", "every entry point of ours loads")


def check_orders(context: Context) -> Orders:
    """Import everything that our source needs in one interpreter, forward and in reverse.

    Args:
        context: The environment.

    Returns:
        ``order:forward`` and ``order:reverse``, with what was mapped.
    """
    required, extras = required_roots(), extra_roots()
    # Alternatives are left to the other check: here each module has to import, and of them one may be missing.
    modules = {s.module for need in context.needs if len(need.branches) == 1 for s in need.branches[0]}
    names = sorted(m for m in modules if m.partition(".")[0] in required or _exists(m.partition(".")[0]))
    # Ours come last in both: each imports several of the others, in an order that would be the same both times.
    ours = list(context.packages)
    orders = {"forward": names + ours, "reverse": names[::-1] + ours[::-1]}
    with ThreadPoolExecutor(WORKERS) as pool:
        deadline_s = 2 * context.deadline_s
        replies = dict(zip(orders, pool.map(lambda n: ask(IN_ORDER, n, deadline_s=deadline_s), orders.values()),
                           strict=True))  # fmt: skip
    results = [_order(context, name, orders[name], reply, extras) for name, reply in replies.items()]
    mapped = {name: reply.value["mapped"] for name, reply in replies.items() if reply.value is not None}
    return Orders(results, mapped, any(DUPLICATE_LLVM in reply.stderr for reply in replies.values()))


def required_roots() -> set[str]:
    """Find the third-party packages that must be there.

    Returns:
        Import names of what a vime distribution requires outside its extras, and vLLM, which an image or a
        dependency group provides. The rest (``amdsmi``, an extra) is checked where it is installed.
    """
    return _roots(of_extras=False) | {"vllm"}


def extra_roots() -> set[str]:
    """Find the third-party packages that only an extra of a vime distribution brings.

    Returns:
        Import names. Our code says by name what to install where it asks for one of them; a module of another package
        that needs it, such as ``torch.utils.tensorboard``, is no fault of an image without the extra.
    """
    return _roots(of_extras=True) - required_roots()


def _roots(*, of_extras: bool) -> set[str]:
    wanted: set[str] = set()
    for distribution in metadata.distributions():
        if normalise(distribution.metadata["Name"] or "").startswith("vime-"):
            parsed = [parse_requirement(text) for text in distribution.requires or []]
            wanted |= {name for name, _, marker in parsed if ("extra" in marker) is of_extras}
    provides = metadata.packages_distributions()
    roots = {root for root, names in provides.items() if wanted & {normalise(name) for name in names}}
    # A missing distribution provides nothing: its import name is guessed, so that its absence fails here as well.
    return roots | {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in wanted}


def _api(context: Context, root: str, needs: list[Need], required: set[str], extras: set[str]) -> Result:
    label = f"api:{root}"
    symbols = sorted({symbol for need in needs for branch in need.branches for symbol in branch})
    users = sorted({need.user.partition(".")[0].partition(":")[0] for need in needs})
    expected = f"{len(symbols)} symbols that {', '.join(users)} import"
    if root not in required and not _exists(root):
        return skipped(label, "optional, and not installed", expected)
    reply = ask(RESOLVE, [[s.module, s.name] for s in symbols], deadline_s=context.deadline_s)
    if reply.value is None:
        return judged(context, label, [reply.problem], "", expected)
    problems = {symbol: text for symbol, text in zip(symbols, reply.value, strict=True) if text}
    waiting = {symbol: name for symbol, text in problems.items() if (name := _absent(text)) in extras}
    failing = {symbol: text for symbol, text in problems.items() if symbol not in waiting}
    wrong = [text for need in needs if (text := _unmet(need, failing))]
    seen = f"{len(symbols) - len(problems)} of {len(symbols)}"
    if waiting:
        seen += f"; {', '.join(sorted(set(waiting.values())))}, which an extra brings, is not installed"
    return judged(context, label, wrong, seen, expected)


def _absent(problem: str) -> str:
    """Return the package whose absence is the problem; nothing where it is another one."""
    found = _ABSENT.fullmatch(problem)
    return found[1] if found else ""


def _unmet(need: Need, problems: dict[Symbol, str]) -> str:
    if any(not any(symbol in problems for symbol in branch) for branch in need.branches):
        return ""
    first = [f"{symbol} ({problems[symbol]})" for symbol in need.branches[0] if symbol in problems]
    return f"{', '.join(first)}, needed at {need.user}"


def _ours(context: Context, name: str) -> Result:
    reply = ask(RESOLVE, [[name, ""]], deadline_s=context.deadline_s)
    wrong = [reply.problem] if reply.problem else list(filter(None, reply.value))
    return judged(context, f"import:{name}", wrong, "imports", "imports in a fresh interpreter")


def _order(context: Context, order: str, names: list[str], reply: Answer, extras: set[str]) -> Result:
    answered: dict[str, str] = reply.value["failed"] if reply.value is not None else {}
    failed = {module: text for module, text in answered.items() if _absent(text) not in extras}
    wrong = [reply.problem] if reply.problem else []
    for module, text in failed.items():
        before = [m for m in names[: names.index(module)] if m not in answered]
        wrong.append(f"{module} after {before[-1] if before else 'nothing'} and {max(len(before) - 1, 0)} more: {text}")
    return judged(context, f"order:{order}", wrong, f"{len(names)} modules", f"{names[0]} ... {names[-1]} import")


def judged(context: Context, label: str, wrong: list[str], good: str, expected: str) -> Result:
    """Fail with what is wrong, unless all of it is only that this build has no device.

    Args:
        context: The environment.
        label: The check.
        wrong: Problems; empty where all is well.
        good: What was seen where all is well.
        expected: What would have been right.

    Returns:
        Ok, failed with the problems that have another cause than a missing device, or skipped.
    """
    excused = [] if context.platform == "cpu" or context.has_devices else [w for w in wrong if NO_DEVICE.search(w)]
    if excused and len(excused) == len(wrong):
        return skipped(label, f"{context.no_device_reason} ({_listed(excused)})", expected)
    real = [text for text in wrong if text not in excused]
    return passed(label, not real, _listed(real) or good, expected)


def _listed(problems: list[str]) -> str:
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more


def _exists(root: str) -> bool:
    return util.find_spec(root) is not None
