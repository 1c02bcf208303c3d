"""The standard-library version comparison, held against the reference implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from verify import versions
from verify.context import VLLM_WINDOW

numbers = st.integers(0, 30)
releases = st.lists(numbers, min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
suffixes = st.sampled_from(["", "a1", "b2", "rc1", ".post1", ".dev3", "rc1.dev2", "rc1.post1", ".post2.dev1"])
locals_ = st.sampled_from(["", "+rocm7.14", "+cu130"])
public = st.builds(str.__add__, releases, suffixes)
installed = st.builds(str.__add__, public, locals_)
operators = st.sampled_from(["==", "!=", "<=", ">=", "<", ">"])


@given(left=public, right=public)
@settings(max_examples=300)
def test_order_is_that_of_pep_440(left: str, right: str) -> None:
    assert (versions.parse(left) < versions.parse(right)) == (Version(left) < Version(right))
    assert (versions.parse(left) == versions.parse(right)) == (Version(left) == Version(right))


@given(version=installed, operator=operators, bound=public)
@settings(max_examples=500)
def test_clauses_agree_with_packaging(version: str, operator: str, bound: str) -> None:
    clause = operator + bound
    assert versions.matches(version, clause) == SpecifierSet(clause, prereleases=True).contains(version), clause


@given(version=installed, parts=st.lists(numbers, min_size=2, max_size=3), operator=st.sampled_from(["~=", "==", "!="]))
def test_families_agree_with_packaging(version: str, parts: list[int], operator: str) -> None:
    text = ".".join(map(str, parts))
    clause = operator + text + ("" if operator == "~=" else ".*")
    assert versions.matches(version, clause) == SpecifierSet(clause, prereleases=True).contains(version), clause


@pytest.mark.parametrize(
    ("version", "specifier", "inside"),
    [
        ("0.29.0+rocm714", ">=0.28,<0.33", True),
        ("0.27.9", ">=0.28,<0.33", False),
        ("0.33.0", ">=0.28,<0.33", False),
        ("1.26.4", ">=1.26,<2", True),
        ("2.0.0rc1", ">=1.26,<2", False),
        ("2.12.0+rocm7.14", "==2.12.0+rocm7.14", True),
        ("2.12.0+cu130", "==2.12.0+rocm7.14", False),
        ("1.0", "", True),
    ],
)
def test_ranges_of_the_images(version: str, specifier: str, inside: bool) -> None:
    assert versions.matches(version, specifier) is inside


@pytest.mark.parametrize(("version", "specifier"), [("", ">=1"), ("main", ">=1"), ("1.0", "1.0"), ("1!2.0", ">=1")])
def test_what_it_cannot_read_is_an_error(version: str, specifier: str) -> None:
    with pytest.raises(ValueError, match="is not a version"):
        versions.matches(version, specifier)


def test_the_doctor_supports_the_same_releases_of_vllm_as_the_images() -> None:
    from vime_integration.doctor.packages import VLLM_WINDOW as OF_THE_DOCTOR

    assert VLLM_WINDOW == OF_THE_DOCTOR
