"""Reading from our source what it needs of others'."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path

from verify.engine import is_offered, our_literals
from verify.scan import DEEP_ROOTS, our_packages, scan_packages, scan_source


def needs(source: str) -> list[list[list[str]]]:
    found = scan_source(textwrap.dedent(source), "vime_x.module")
    return [[[str(symbol) for symbol in branch] for branch in need.branches] for need in found]


def test_imports_at_every_depth() -> None:
    source = """
        from __future__ import annotations
        import json
        import torch
        from vime_sync import Publisher
        from . import sibling
        from vllm.config import A, B as C
        def f():
            if True:
                with open("x") as file:
                    from megatron.core import parallel_state
        class K:
            def g(self):
                match 1:
                    case 1:
                        import importlib
                        importlib.import_module("ray.exceptions")
    """
    assert needs(source) == [
        [["torch"]],
        [["vllm.config.A", "vllm.config.B"]],
        [["megatron.core.parallel_state"]],
        [["ray.exceptions"]],
    ]


def test_the_place_is_named() -> None:
    assert scan_source("\n\nimport vllm.v1\n", "vime_x.module")[0].user == "vime_x.module:3"


def test_type_checking_imports_are_no_needs() -> None:
    source = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vllm.config import Hint
        else:
            from vllm.config import Real
    """
    assert needs(source) == [[["vllm.config.Real"]]]


def test_alternatives_are_one_need() -> None:
    source = """
        try:
            from vllm.new.place import Factory
        except ImportError:
            from vllm.old.place import Factory
    """
    assert needs(source) == [[["vllm.new.place.Factory"], ["vllm.old.place.Factory"]]]


def test_a_handler_that_goes_on_makes_the_attempt_optional() -> None:
    source = """
        try:
            import amdsmi
        except ModuleNotFoundError:
            amdsmi = None
    """
    (need,) = scan_source(textwrap.dedent(source), "m")
    assert need.optional
    assert [str(symbol) for symbol in need.branches[0]] == ["amdsmi"]


def test_a_handler_that_raises_is_no_alternative() -> None:
    source = """
        try:
            from vllm.a import B
        except ImportError as error:
            raise RuntimeError("install vllm") from error
    """
    assert needs(source) == [[["vllm.a.B"]]]


def test_other_handlers_change_nothing() -> None:
    source = """
        try:
            from vllm.a import B
            run(B)
        except OSError:
            pass
        finally:
            import vllm.c
    """
    assert needs(source) == [[["vllm.a.B"]], [["vllm.c"]]]


def test_attributes_of_modules_that_move_are_needs() -> None:
    source = """
        import megatron.core.parallel_state as mpu
        import torch
        from vllm.v1 import engine
        size = mpu.get_tensor_model_parallel_world_size() + torch.cuda.device_count()
        def f(x: engine.Request = engine.core.DEFAULT):
            return [y.z for y in engine.outputs(x)]
        mpu.ours = engine.pool.size = 1
    """
    assert needs(source) == [
        [["megatron.core.parallel_state"]],
        [["torch"]],
        [["vllm.v1.engine"]],
        [["megatron.core.parallel_state.get_tensor_model_parallel_world_size"]],
        [["vllm.v1.engine.Request", "vllm.v1.engine.core", "vllm.v1.engine.core.DEFAULT"]],
        [["vllm.v1.engine.outputs"]],
        [["vllm.v1.engine.pool"]],
    ]


def test_modules_named_by_text_are_needs() -> None:
    source = """
        '''vllm.in.a.docstring of some words'''
        WINDOW = (("vllm.plugins", "load_endpoint_plugins"), ("vllm.a.b", "Class.method"))
        GROUP = "vllm.general_plugins"
        GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
        class Config:
            module: str = "vllm.entrypoints.openai.api_server"
    """
    assert needs(source) == [
        [["vllm.a.b", "vllm.a.b.Class.method", "vllm.plugins.load_endpoint_plugins"]],
        [["vllm.entrypoints.openai.api_server"]],
    ]


def test_what_our_source_needs_of_vllm_and_megatron_is_in_theirs() -> None:
    """Of modules only, and without an import: what is mistaken for a need would fail every image."""
    wrong = []
    for need in scan_packages(our_packages()):
        for symbol in need.branches[0]:
            root = find_spec(symbol.root) if symbol.root in DEEP_ROOTS and not need.optional else None
            if root is not None and root.submodule_search_locations:
                paths = [Path(place, *symbol.module.split(".")[1:]) for place in root.submodule_search_locations]
                if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths):
                    wrong.append(f"{symbol}, needed at {need.user}")
    assert wrong == []


def test_packages_are_read_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "__init__.py").write_text("import ray\n")
    (tmp_path / "sub" / "deep.py").write_text("import vllm\n")
    assert [need.user for need in scan_packages({"vime_x": tmp_path})] == ["vime_x:1", "vime_x.sub.deep:1"]


def test_a_switch_and_its_negative_are_the_same_option() -> None:
    offered = {"--enable-chunked-prefill", "--no-such"}
    assert is_offered("--enable-chunked-prefill", offered)
    assert is_offered("--no-enable-chunked-prefill", offered)
    assert is_offered("--no-such", offered)
    assert not is_offered("--enable", offered)
    assert not is_offered("--no-prefix-caching", offered)


def test_an_option_that_the_launcher_passes_to_some_releases_only_is_its_own_affair(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text(
        "def command(dialect, eager):\n"
        '    flags = ["--always", *(["--from-newer"] if dialect.newer else ["--from-older"])]\n'
        "    if dialect.odd:\n"
        '        flags += ["--odd"]\n'
        '    flags += ["--eager"] if eager else []\n'
        "    return flags\n"
    )
    (tmp_path / "router.py").write_text('OPTIONS = ["--of-the-router"]\n')
    assert our_literals(tmp_path)[1] == {"--always", "--eager"}
