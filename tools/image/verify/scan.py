"""Find what our own packages need of other people's, by reading our source.

``from vllm.a import B`` needs module ``vllm.a`` and its name ``B``. Some imports are not needs:

- under ``if TYPE_CHECKING:`` nothing runs;
- ``try: ... except ImportError:`` offers alternatives: one branch must work, not all. A handler that raises is no
  alternative, and one that goes on without an import makes the attempt optional.

Of vLLM and Megatron, whose modules move between releases, attributes of imported modules are needs as well:
``import megatron.core.parallel_state as mpu; mpu.get_rank()`` needs ``get_rank``. So are modules named by text:
``"vllm.entrypoints.openai.api_server"`` is started with ``-m``, ``("vllm.plugins", "load")`` is a declared window.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path

OURS = "vime"
DEEP_ROOTS = frozenset({"vllm", "megatron"})
_MODULE_TEXT = re.compile(rf"({'|'.join(sorted(DEEP_ROOTS))})(\.[a-z_][a-z0-9_]*)+")
# Two parts may be another kind of name: "vllm.general_plugins" is an entry point group.
_DEEP_MODULE_TEXT = re.compile(rf"({'|'.join(sorted(DEEP_ROOTS))})(\.[a-z_][a-z0-9_]*){{2,}}")
_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """One thing that must exist.

    Attributes:
        module: A module that must be importable.
        name: An attribute of it, dotted where the attribute is a module itself; empty where the module is enough.
    """

    module: str
    name: str = ""

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True, slots=True)
class Need:
    """Symbols that one place of our code needs.

    Attributes:
        user: ``module:line`` of that place.
        branches: Alternatives in the order they are tried; within one, every symbol must exist.
    """

    user: str
    branches: tuple[tuple[Symbol, ...], ...]

    @property
    def optional(self) -> bool:
        """Whether our code goes on without any of it."""
        return () in self.branches


def our_packages() -> dict[str, Path]:
    """Find the import packages of the installed vime distributions.

    Returns:
        Folder of each package by its import name.
    """
    names = {(d.metadata["Name"] or "").lower().replace("-", "_") for d in metadata.distributions()}
    found: dict[str, Path] = {}
    for name in sorted(n for n in names if n.startswith(f"{OURS}_")):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[name] = Path(next(iter(spec.submodule_search_locations)))
    return found


def scan_packages(packages: dict[str, Path]) -> list[Need]:
    """Read every module of some packages.

    Args:
        packages: Folders by import name.

    Returns:
        What they need of third parties, in order of package and file.
    """
    needs: list[Need] = []
    for package, folder in packages.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            module = ".".join(part for part in parts if part != "__init__")
            needs.extend(scan_source(path.read_text(encoding="utf-8"), module))
    return needs


def scan_source(source: str, module: str) -> list[Need]:
    """Read one module.

    Args:
        source: Its text.
        module: Its name, for ``Need.user``.

    Returns:
        What it needs of third parties, in order of appearance.

    Raises:
        SyntaxError: The text is not Python of this interpreter's version.
    """
    return list(_Scan(module).needs(ast.parse(source).body))


class _Scan:
    """Walks statements and keeps which local names stand for modules of other packages."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._bound: dict[str, Symbol] = {}

    def needs(self, body: list[ast.stmt]) -> Iterator[Need]:
        for node in body:
            if isinstance(node, ast.If) and _is_type_checking(node.test):
                yield from self.needs(node.orelse)
            elif isinstance(node, ast.Try) and any(_catches_import(handler) for handler in node.handlers):
                yield from self._alternatives(node)
            else:
                yield from self._plain(node)

    def _plain(self, node: ast.stmt) -> Iterator[Need]:
        for _, symbols in groupby(sorted(set(self._symbols(node))), key=lambda symbol: symbol.root):
            yield Need(f"{self._module}:{node.lineno}", (tuple(symbols),))
        for field in ("body", "orelse", "finalbody"):
            yield from self.needs(getattr(node, field, []))
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from self.needs(part.body)

    def _alternatives(self, node: ast.Try) -> Iterator[Need]:
        branches = [self._branch([*node.body, *node.orelse])]
        for handler in node.handlers:
            symbols = self._branch(handler.body)
            gives_up = any(isinstance(inner, ast.Raise) for inner in handler.body)
            if _catches_import(handler) and (symbols or not gives_up):
                branches.append(symbols)
        if branches[0]:
            yield Need(f"{self._module}:{node.lineno}", tuple(dict.fromkeys(branches)))
        yield from self.needs(node.finalbody)

    def _branch(self, body: list[ast.stmt]) -> tuple[Symbol, ...]:
        """Return the symbols of a branch; alternatives inside it count by their first choice."""
        inner = [need.branches[0] for need in self.needs(body) if not need.optional]
        return tuple(sorted({symbol for branch in inner for symbol in branch}))

    def _symbols(self, node: ast.stmt) -> Iterator[Symbol]:
        """Yield what one statement needs, without the statements inside it."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_third_party(alias.name):
                    bound = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bound[alias.asname or bound] = Symbol(bound)
                    yield Symbol(alias.name)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module and _is_third_party(node.module):
                for alias in node.names:
                    symbol = Symbol(node.module, "" if alias.name == "*" else alias.name)
                    self._bound[alias.asname or alias.name] = symbol
                    yield symbol
        else:
            for inner in _own_expressions(node):
                yield from self._of_expression(inner)

    def _of_expression(self, node: ast.expr) -> Iterator[Symbol]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute):
                # What our code sets itself need not be there before.
                symbol = self._attribute(inner) if isinstance(inner.ctx, ast.Load) else None
                if symbol is not None:
                    yield symbol
            elif isinstance(inner, ast.Call) and (module := _imported_by_text(inner)):
                yield Symbol(module)
            else:
                yield from _named_by_text(inner)

    def _attribute(self, node: ast.Attribute) -> Symbol | None:
        names: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        base = self._bound.get(value.id) if isinstance(value, ast.Name) else None
        if base is None or base.root not in DEEP_ROOTS:
            return None
        return Symbol(base.module, ".".join(filter(None, [base.name, *reversed(names)])))


def _own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.arguments | ast.keyword | ast.withitem | ast.arg):
            yield from (inner for inner in ast.walk(child) if isinstance(inner, ast.expr))


def _is_third_party(module: str) -> bool:
    root = module.partition(".")[0]
    return root not in sys.stdlib_module_names and not root.startswith(f"{OURS}_")


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _named_by_text(node: ast.AST) -> Iterator[Symbol]:
    """Yield what is named by a text: a module to be run with ``-m``, or a pair of module and name."""
    if isinstance(node, ast.Tuple) and len(node.elts) == 2:
        module, name = (element.value if isinstance(element, ast.Constant) else None for element in node.elts)
        # Two entry point groups are a pair of such texts as well; what is in a module is named without its root.
        if not (isinstance(module, str) and isinstance(name, str)):
            return
        if _MODULE_TEXT.fullmatch(module) and not _MODULE_TEXT.fullmatch(name):
            yield Symbol(module, name)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DEEP_MODULE_TEXT.fullmatch(node.value):
        parent, _, last = node.value.rpartition(".")
        yield Symbol(parent, last)


def _imported_by_text(node: ast.Call) -> str:
    """Return the module of ``importlib.import_module("...")``; empty for any other call."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name != "import_module" or not node.args:
        return ""
    text = node.args[0]
    if isinstance(text, ast.Constant) and isinstance(text.value, str) and _is_third_party(text.value):
        return text.value if not text.value.startswith(".") else ""
    return ""
