"""What is checked inside an environment of the matrix, with its own interpreter and its own packages.

``light`` and ``megatron``
    The tests of the packages that need no engine and no GPU and take seconds: of vime-megatron, and of the others.
``interface``
    The installed packages meet each other's requirements, and the installed vLLM has every name that the sync plugin
    needs, by the doctor's own check.
a pipeline
    ``vime-grpo train`` with the real engine, trainer and Ray: a few steps of the demo, judged as the acceptance judges
    them. ``moe`` trains a small Qwen3 with experts and random weights: what is asked is whether it runs and agrees.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vime_matrix.definition import ROOT

UNITS: dict[str, tuple[str, ...]] = {
    "light": ("vime-devices", "vime-sync", "vime-rollout", "vime-grpo"),
    "megatron": ("vime-megatron",),
}
STEPS = 3
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
ON_POLICY_DIFFERENCE = "train/on_policy_logprob_abs_diff"
LIMIT = 1e-4  # nats, float32 on one CPU
EXAMPLES = {"colocated": "demo_cpu.toml", "async": "demo_async_cpu.toml"}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
}


def unit(packages: Sequence[str]) -> tuple[bool, str]:
    """Run the fast tests.

    Args:
        packages: Of which packages.

    Returns:
        Whether they passed, and pytest's closing line.
    """
    folders = [str(ROOT / "packages" / name / "tests") for name in packages]
    # No benchmark plugin, no cache: nothing is written into the checkout.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "-m",
               "not engine and not gpu and not slow", *folders]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - pytest
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    closing = next((line for line in reversed(done.stdout.splitlines()) if " in " in line), "pytest said nothing")
    text = re.sub(r" in [\d.]+s.*", "", closing).strip("= ")
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "; ".join([text, *failed[:4]])


def interface() -> tuple[bool, str]:
    """Check requirements and vLLM's interface, as the doctor does."""
    from vime_integration.doctor import Status
    from vime_integration.doctor.packages import check_packages

    checks = list(check_packages())
    for check in checks:
        sys.stdout.write(check.line() + "\n")
    failed = [f"{check.name}: {check.seen}" for check in checks if check.status is Status.FAIL]
    return not failed, "; ".join(failed) or f"{len(checks)} checks"


def pipeline(name: str, folder: Path) -> tuple[bool, str]:
    """Run one pipeline.

    Args:
        name: Mode, model and tensor-parallel size: ``colocated-dense-1``.
        folder: Where the run folder and a made model go.
    """
    from vime_integration.accept.stage_runs import judge_run

    mode, model, tp = name.split("-")
    settings = [f"pipeline.steps={STEPS}", f"pipeline.run_dir={folder / 'run'}", "checkpoint.every=0",
                "tracking.console=plain", f"trainer.tensor_parallel={tp}", f"engine.tensor_parallel={tp}",
                "guards.logprob_difference_action=warn"]  # fmt: skip
    if model == "moe":
        # vLLM's CPU kernels reorder experts once they are loaded, so a copy cannot reach them; its own loaders can.
        settings += [f"model.path={make_moe(folder / 'model')}", "sync.reload=true"]
    command = [sys.executable, "-c", "from vime_grpo.cli import main; main()", "train"]
    command += [str(ROOT / "integration" / "examples" / EXAMPLES[mode])]
    command += [part for text in settings for part in ("--set", text)]
    status = subprocess.run(command, env=dict(os.environ), check=False).returncode  # noqa: S603 - our own launcher
    metrics = folder / "run" / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    if metrics.is_file():
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    wrong = [f"{t.name}: {t.seen}, expected {t.expected}" for t in judge_run(status, rows, STEPS) if not t.holds]
    key = ON_POLICY_DIFFERENCE if mode == "async" else DIFFERENCE
    worst = max((row[key] for row in rows if key in row), default=None)
    if worst is None or worst > LIMIT:
        wrong.append(f"logprob difference {worst}, expected at most {LIMIT}")
    return not wrong, "; ".join(wrong) or f"{len(rows)} steps, logprob difference at most {worst:.1e}"


def make_moe(target: Path) -> Path:
    """Make a small Qwen3 with experts and random weights, with the demo policy's tokenizer.

    Args:
        target: The model's folder.

    Returns:
        The folder.
    """
    import shutil

    from vime_megatron import MegatronTrainer, TrainerConfig

    source = ROOT / "integration" / "examples" / "models" / "tiny-qwen3"
    shape = target.with_name("shape")
    shutil.copytree(source, shape, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    (shape / "config.json").write_text(json.dumps(config | MOE), encoding="utf-8")
    trainer = MegatronTrainer(TrainerConfig(model=shape, dtype="float32", random_weights=True), rank=0, world_size=1)
    try:
        trainer.export_hf(target)
    finally:
        trainer.close()
    return target
