"""The other end of the window: what our client asks of vLLM's server, looked up in vLLM's own source.

Imports cover what runs inside the engine. The rest of the contract is text: routes that our client calls and options
that our launcher passes. A release that renames one answers 404, or does not start, in the first training run. Both
are literals on our side and on vLLM's, so they can be compared without starting anything:

- routes: the two adjacent arguments ``"POST", "/pause"`` of a call here; ``@router.post("/pause")`` there;
- options: ``"--enable-scale-out"`` here; that text, or a field ``enable_scale_out:``, there. A switch's negative
  ``"--no-enable-scale-out"`` is made by the parser, so it is looked up as the switch.

vLLM's files are searched all, because the files that hold them are what moves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from verify.context import Context, module_file
from verify.report import Result, passed

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH"})
# The package that launches the server and the ones that talk to it.
LAUNCHERS = ("vime_rollout",)
CLIENTS = ("vime_rollout", "vime_sync")
# A module of this name talks to vllm-router, which is another program with routes and options of its own.
OTHER_PROGRAM = "router"
_ROUTE = re.compile(
    rb"""\.(?:get|post|put|delete|patch|api_route|route|add_api_route|mount)\(\s*["'](/[\w/.{}-]*)["']"""
)
_OPTION = re.compile(rb"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)|^    ([a-z]\w*)\s*:", re.MULTILINE)
_OUR_OPTION = re.compile(r"--[a-z][a-z0-9-]+")


def check_engine(context: Context) -> Iterator[Result]:
    """Compare routes and options.

    Args:
        context: The environment.

    Yields:
        ``engine-routes`` and ``engine-options``.
    """
    init = module_file("vllm", "__init__.py")
    routes, options = offered(init.parent) if init else (set(), set())
    asked = {name: our_literals(context.packages[name]) for name in CLIENTS if name in context.packages}
    called = set().union(*(routes_of for routes_of, _ in asked.values()))
    passed_on = set().union(*(asked[name][1] for name in LAUNCHERS if name in asked))
    for label, ours, theirs in (("engine-routes", called, routes), ("engine-options", passed_on, options)):
        missing = sorted(name for name in ours if not is_offered(name, theirs))
        seen = f"missing: {', '.join(missing)}" if missing else f"{len(ours)} of {len(ours)}"
        expected = (
            f"every one of {', '.join(sorted(ours))} in vLLM's source" if ours else "some: our client asks for none"
        )
        yield passed(label, bool(ours) and not missing, seen, expected)


def is_offered(name: str, theirs: set[str]) -> bool:
    """Tell whether a route or an option is among vLLM's, or is the negative of a switch that is.

    Args:
        name: A route or an option of ours.
        theirs: Routes or options of vLLM.
    """
    return name in theirs or (name.startswith("--no-") and f"--{name.removeprefix('--no-')}" in theirs)


def our_literals(package: Path) -> tuple[set[str], set[str]]:
    """Read what a package of ours asks of the server.

    Args:
        package: Its folder.

    Returns:
        Routes and options.
    """
    routes: set[str] = set()
    options: set[str] = set()
    for path in sorted(package.rglob("*.py")):
        if OTHER_PROGRAM in path.relative_to(package).with_suffix("").parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        chosen = by_release(tree)
        for node in ast.walk(tree):
            if node in chosen:
                continue
            if isinstance(node, ast.Call):
                texts = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
                for method, route in pairwise(texts):
                    if method in METHODS and isinstance(route, str) and route.startswith("/"):
                        routes.add(route.partition("?")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _OUR_OPTION.fullmatch(node.value):
                options.add(node.value)
    return routes, options


def by_release(tree: ast.AST) -> set[ast.AST]:
    """Find what our launcher passes to some releases only: the branches of a condition on ``dialect``.

    Args:
        tree: A module of ours.

    Returns:
        The nodes in these branches; the launcher, which asks for the installed release, answers for them.
    """
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp) and any(
            isinstance(part, ast.Name) and part.id == "dialect" for part in ast.walk(node.test)
        ):
            branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
            found |= {part for branch in branches for part in ast.walk(branch)}
    return found


def offered(vllm: Path) -> tuple[set[str], set[str]]:
    """Read what a vLLM offers.

    Args:
        vllm: Its package folder.

    Returns:
        Routes, and options in the form ``--enable-scale-out``.
    """
    routes: set[str] = set()
    options: set[str] = set()
    for path in vllm.rglob("*.py"):
        text = path.read_bytes()
        routes.update(match.decode() for match in _ROUTE.findall(text))
        for option, field in _OPTION.findall(text):
            options.add("--" + (option or field.replace(b"_", b"-")).decode())
    return routes, options
