"""Fake environments for the image tools, and a healthy ROCm image in miniature to break in one place each.

A fake environment is a virtual environment whose site folder holds hand-made distributions. The tools run in it as they
run in an image: as a program, by that environment's interpreter, in fresh processes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
COMMIT = "98dff2a81d747d1dba01a47f939f48c3526d4206"
ROCM_TORCH = "__version__ = '2.12.0+rocm7.14'\nhip: str = '7.14.60850'\ncuda = None\n"
CUDA_TORCH = "__version__ = '2.13.0+cu130'\nhip = None\ncuda: str = '13.0'\n"
ENGINE = {
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '0.29.0+rocm714'\n__commit_id__ = commit_id = 'g{COMMIT[:9]}'\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/transfer.py": "class Engine: pass\nclass Factory: pass\n",
    "vllm/server.py": "router = None\n\n\ndef attach():\n    @router.post('/pause')\n    def pause(): ...\n",
    "vllm/arguments.py": "class Arguments:\n    enable_scale_out: bool = False\n",
}
RAY = """
    import os
    class AMDGPUAcceleratorManager:
        def get_current_process_visible_accelerator_ids():
            return os.environ["HIP_VISIBLE_DEVICES"].split(",")
    def get_all_accelerator_managers():
        return {AMDGPUAcceleratorManager}
"""
PLUGIN = """
    import torch
    from vllm.distributed.transfer import Engine
    try:
        from vllm.distributed.newer import Factory
    except ImportError:
        from vllm.distributed.transfer import Factory
    try:
        import amdsmi
    except ImportError:
        amdsmi = None
    def register():
        import extra_thing
"""
CLIENT = """
    OPTIONS = ["--enable-scale-out"]
    async def pause(client):
        await client.call("POST", "/pause")
"""
SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
PINS = ["--platform", "rocm", "--vllm-tag", "v0.29.0", "--vllm-commit", COMMIT, "--numpy", ">=1.26,<2"]


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
        return Path(next(iter((self.folder / "lib").glob("python3*")))) / "site-packages"

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
        for name_of_file, text in texts.items():
            target = self.site / name_of_file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{name_of_file},sha256={digest},{len(text)}")
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


def build_world(environment: FakeEnvironment, tmp_path: Path) -> list[str]:
    """Install a healthy image into an environment; return the options that verify it."""
    environment.env.update(SETTINGS)
    install_torch(environment)
    environment.install("vllm", "0.29.0+rocm714", ENGINE)
    environment.install("numpy", "1.26.4", {"numpy/__init__.py": ""})
    environment.install("ray", "2.60.0", {"ray/__init__.py": "", "ray/_private/accelerators.py": RAY})
    environment.install(
        "vime-sync", "0.1.0", {"vime_sync/__init__.py": "", "vime_sync/plugin.py": PLUGIN}, ["torch>=2.6"]
    )
    info = environment.site / "vime_sync-0.1.0.dist-info"
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nvime_sync = vime_sync.plugin:register\n")
    environment.install("vime-rollout", "0.1.0", {"vime_rollout/__init__.py": "", "vime_rollout/client.py": CLIENT})
    requires = ["vime-sync==0.1.0", "vime-rollout==0.1.0", "numpy>=1.26", 'matplotlib>=3; extra == "plots"', "ray"]
    environment.install("vime-integration", "0.1.0", {"vime_integration/__init__.py": "import numpy, ray\n"}, requires)
    # The real vime-devices: it owns the rules that the checks ask it about.
    environment.install("vime-devices", "0.1.0", {})
    (environment.site / "vime_devices.pth").write_text(f"{ROOT / 'packages/vime-devices/src'}\n")
    record = tmp_path / "base.json"
    arguments = ["--output", str(tmp_path / "constraints.txt"), "--record", str(record)]
    environment.run("image/constraints.py", *arguments).check_returncode()
    return [*PINS, "--base-record", str(record)]


def install_torch(environment: FakeEnvironment, version: str = "2.12.0+rocm7.14", build: str = ROCM_TORCH) -> None:
    """Install a torch of some build."""
    environment.install("torch", version, {"torch/__init__.py": "", "torch/version.py": build})


def write(environment: FakeEnvironment, path: str, text: str) -> None:
    """Replace a file of the site folder, without telling any RECORD."""
    target = environment.site / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(textwrap.dedent(text))
