"""The README's examples run as they stand."""

import re
import shlex
from pathlib import Path

import pytest
from vime_devices import cli

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python():
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize(
    "line", [line for line in blocks("sh")[0].splitlines() if line.startswith("vime-devices mask")]
)
def test_masks_print_what_their_comment_says(capsys, line):
    command, comment = line.split("#")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip() == comment.strip()


@pytest.mark.parametrize("line", blocks("sh")[0].splitlines())
def test_commands_are_understood(line):
    words = shlex.split(line.split("#")[0].split(">")[0])
    assert words[0] == "vime-devices"
    assert callable(cli._parser().parse_args(words[1:]).run)
