"""Fake environments for the image tools: a virtual environment whose site folder holds hand-made distributions.

The tools run in it as they run in an image: as a program, by that environment's interpreter, in fresh processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1]
# The programs find their siblings in their own folder; tests that call their functions need the same path.
sys.path[:0] = [str(TOOLS / "image"), str(TOOLS)]


@dataclass
class FakeEnvironment:
    """A virtual environment without pip, filled by hand."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3*")) / "site-packages"

    def install(self, name: str, version: str, files: dict[str, str], requires: list[str] | None = None) -> None:
        """Put a distribution there, in place of an earlier one of that name."""
        for old in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            for path in old.iterdir():
                path.unlink()
            old.rmdir()
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {text}" for text in requires or []]
        texts = {path: textwrap.dedent(text) for path, text in files.items()}
        texts[f"{info}/METADATA"] = "\n".join(lines) + "\n"
        record = []
        for path, text in texts.items():
            target = self.site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text)}")
        (self.site / info / "RECORD").write_text("\n".join([*record, f"{info}/RECORD,,"]) + "\n")

    def run(self, tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a tool by this environment's interpreter."""
        command = [str(self.python), str(TOOLS / tool), *map(str, arguments)]
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)

    def verify(self, *arguments: str | Path) -> dict[str, Any]:
        """Run the verification layer and return its report, with results by label and the exit code."""
        done = self.run("verify_image.py", "--json", *arguments)
        assert done.stdout, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        report["by_label"] = {row["label"]: row for row in report["results"]}
        report["code"], report["stderr"] = done.returncode, done.stderr
        return report


@pytest.fixture
def fake_environment(tmp_path: Path) -> FakeEnvironment:
    venv.create(tmp_path / "fake", with_pip=False, symlinks=True)
    return FakeEnvironment(tmp_path / "fake")
