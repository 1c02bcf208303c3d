"""Errors: one family, five fields, one readable paragraph, and alive after a trip through pickle."""

import ast
import pickle
from pathlib import Path

import pytest
import vime_devices
from vime_devices import DeviceError, MaskError, VimeError
from vime_devices.testing import FakeHipError

FIELDS = {"where": "engine 3", "seen": "ordinal 8", "expected": "0..7", "fix": "take it from the node"}


def test_the_text_holds_every_field_that_is_set():
    text = str(MaskError("past the node", **FIELDS))
    assert text == "past the node (engine 3); seen: ordinal 8; expected: 0..7; fix: take it from the node"
    assert str(MaskError("past the node", seen="8")) == "past the node; seen: 8"


def test_errors_cross_processes_whole():
    back = pickle.loads(pickle.dumps(MaskError("past the node", **FIELDS)))
    assert type(back) is MaskError
    assert {name: getattr(back, name) for name in FIELDS} == FIELDS
    assert back.what == "past the node"


@pytest.mark.parametrize("name", [name for name in vime_devices.__all__ if name.endswith("Error")])
def test_one_small_hierarchy(name):
    kind = getattr(vime_devices, name)
    assert issubclass(kind, DeviceError) or kind is VimeError
    assert kind.__doc__
    assert issubclass(FakeHipError, DeviceError)


def raised_errors():
    """Every construction of one of our errors in the package, with the keywords it is given."""
    names = {name for name in vime_devices.__all__ if name.endswith("Error")}
    for path in sorted(Path(vime_devices.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield f"{path.name}:{node.lineno}", {keyword.arg for keyword in node.keywords}


def test_every_error_says_what_was_seen_where_what_was_expected_and_what_to_do():
    found = dict(raised_errors())
    assert len(found) > 20
    assert {place: FIELDS.keys() - given for place, given in found.items() if not given >= FIELDS.keys()} == {}


def test_the_door_is_complete_and_sorted():
    assert list(vime_devices.__all__) == sorted(vime_devices.__all__)
    assert all(hasattr(vime_devices, name) for name in vime_devices.__all__)
