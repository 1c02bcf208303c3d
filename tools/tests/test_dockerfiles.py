"""What the Dockerfiles promise, read from their text: no container engine is needed for it."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PINS = {
    "VLLM_TAG": "v0.29.0",
    "VLLM_COMMIT": "98dff2a81d747d1dba01a47f939f48c3526d4206",
    "MEGATRON_COMMIT": "1dcf0dafa884ad52ffb243625717a3471643e087",
}
each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions in order, continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(parts_of[0], parts_of[1]) for parts_of in parts]


def last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    start = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def test_there_is_one_for_each_platform() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cuda", "Dockerfile.rocm", "Dockerfile.rocm7.14"]


@each
def test_hadolint_is_content(path: Path) -> None:
    tool = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([tool, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@each
def test_pins_are_full_and_labelled(path: Path) -> None:
    stage = last_stage(path)
    arguments = dict(text.partition("=")[::2] for name, text in instructions(path) if name == "ARG")
    assert {name: arguments[name] for name in PINS} == PINS
    commits = {name: value for name, value in arguments.items() if name.endswith("_COMMIT")}
    assert all(re.fullmatch(r"[0-9a-f]{40}", value) for name, value in commits.items() if name != "VIME_COMMIT")
    assert arguments["VIME_COMMIT"] == arguments["VIME_REPOSITORY"] == "", "this repository has no default"
    labels = " ".join(text for name, text in stage if name == "LABEL")
    declared = {text.partition("=")[0] for name, text in stage if name == "ARG"} - {"BUILD_JOBS"}
    assert declared == set(re.findall(r"\$\{(\w+)\}", labels)), "every pin of the image is a label"


@each
def test_every_fetch_is_asserted(path: Path) -> None:
    for name, text in instructions(path):
        if name == "RUN" and re.search(r"git (-C \S+ )?(clone|fetch)", text):
            assert "assert_commit.py" in text
        if "fetch_commit.sh" in text:
            assert re.search(r'\.git "\$[({]', text), "the commit is an argument, or read from an asserted tree"
    for name, text in last_stage(path):
        if name == "RUN" and "fetch_commit.sh" in text:
            assert "COMMITS=/opt/vime/image/commits " in text, "what the image is built from is kept in it"


@each
def test_nothing_is_installed_before_the_pins_nor_around_the_guard(path: Path) -> None:
    stage = last_stage(path)
    pinned = next(i for i, (name, text) in enumerate(stage) if name == "ENV" and "PIP_CONSTRAINT=" in text)
    recorded = next(i for i, (_, text) in enumerate(stage) if "--record" in text)
    assert recorded < pinned
    for index, (_, text) in enumerate(stage):
        # The 7.0.2 line makes its own base; those are wheels of its own and they come first.
        own = "/opt/wheels/*.whl" in text
        assert "guarded_install.sh" not in text or index > pinned
        for install in re.findall(r"pip install[^&]*", text):
            assert own or (index > pinned and "--no-deps --no-build-isolation /opt/build/vllm" in install), install
    after = [text for _, text in stage[pinned:] if "constraints.py" in text]
    assert after, "vLLM and Megatron are pinned when they are there"
    assert all("--unchanged-since /opt/vime/image/base.json" in text for text in after)


@each
def test_members_are_installed_by_path_with_extras_that_they_have(path: Path) -> None:
    members: dict[str, set[str]] = {}
    for name, text in last_stage(path):
        if name != "RUN" or "guarded_install.sh" not in text:
            continue
        for word in shlex.split(re.findall(r"guarded_install\.sh ([^&]*)", text)[0]):
            folder, _, extras = word.partition("[")
            if (ROOT / folder / "pyproject.toml").is_file() and not Path(folder).is_absolute():
                # pip takes a bare word for a name on the index, even where a folder of that name is.
                assert "/" in folder, f"{word} would be looked up on the index"
                project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
                members[project["name"]] = set(filter(None, extras.rstrip("]").split(",")))
                assert members[project["name"]] <= set(project.get("optional-dependencies", {}))
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.split(r"[\[]", text)[0]: set(re.findall(r"\[(.*)\]", text)) for text in workspace}
    assert members.keys() == wanted.keys()
    assert all(members[name] >= extras for name, extras in wanted.items()), "no fewer extras than the workspace has"


@pytest.mark.parametrize("path", [*FILES, ROOT / "docker" / "README.md"], ids=lambda path: path.name)
def test_every_call_of_a_tool_is_one_that_it_takes(path: Path) -> None:
    text = re.sub(r"\\\n", " ", path.read_text())
    calls = re.findall(r"(?:tools/|/)((?:image/)?\w+\.py)((?: +(?!&&)[^\s|`]+)*)", text)
    calls = [(tool, options) for tool, options in calls if (ROOT / "tools" / tool).is_file()]
    assert calls
    for tool, options in calls:
        known = help_of(tool)
        for option in re.findall(r"--[a-z-]+", options):
            assert re.search(rf"{option}\b", known), f"{path.name}: {tool} has no {option}"


@functools.cache
def help_of(tool: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@each
def test_the_last_step_verifies_as_the_user(path: Path) -> None:
    stage = last_stage(path)
    user = [index for index, (name, _) in enumerate(stage) if name == "USER"][-1]
    assert stage[user][1] == "10001"
    runs = [(index, text) for index, (name, text) in enumerate(stage) if name == "RUN"]
    index, text = runs[-1]
    assert index > user
    assert "tools/verify_image.py" in text
    for option in ("--vllm-tag", "--vllm-commit", "--numpy", "--base-record", "--platform"):
        assert option in text
    assert any(name == "HEALTHCHECK" for name, _ in stage)
    assert ("ENTRYPOINT", "[]") in stage


@each
def test_every_environment_variable_has_its_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("ENV"):
            above = lines[number - 1]
            assert above.startswith("#") or "PATH=" in line, f"{path.name}:{number + 1} has no reason above it"


@each
def test_the_readme_knows_the_file_and_its_base(path: Path) -> None:
    readme = (ROOT / "docker" / "README.md").read_text()
    base = next(text for name, text in instructions(path) if name == "ARG" and text.startswith("BASE_IMAGE="))
    assert f"`{path.name}`" in readme
    assert base.removeprefix("BASE_IMAGE=") in readme
    assert "--build-arg" in readme


@each
def test_a_base_without_its_digest_is_said_to_be_unresolved(path: Path) -> None:
    base = next(text for name, text in instructions(path) if name == "ARG" and text.startswith("BASE_IMAGE="))
    row = next(
        line
        for line in (ROOT / "docker" / "README.md").read_text().splitlines()
        if line.startswith(f"| `{path.name}` |")
    )
    pinned = re.search(r"@sha256:[0-9a-f]{64}$", base)
    assert ("unresolved" in row) != bool(pinned), "the table says of every base whether its digest is known"


def test_the_readme_lists_the_stages_of_the_acceptance() -> None:
    from vime_integration.accept import STAGES

    readme = (ROOT / "docker" / "README.md").read_text().partition("## Accept")[2]
    assert [stage.name for stage in STAGES if f"`{stage.name}`" not in readme] == []


def test_the_readme_lists_the_groups_that_the_tool_has() -> None:
    groups = re.search(r"only these checks:\s+([\w,\s]+?)\n\s*--", help_of("verify_image.py"))
    assert groups is not None
    readme = (ROOT / "docker" / "README.md").read_text()
    for name in re.findall(r"\w+", groups[1]):
        assert f"| `{name}` |" in readme
