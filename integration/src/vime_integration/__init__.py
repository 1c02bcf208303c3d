"""The pipelines of vime: Ray places trainer ranks, engines and the rollout, and a small loop moves the data round.

One trip through the house, and the module that owns each part of it::

    prompts -> samples        actors/rollout.py   (vime-rollout in an asyncio actor)
    samples -> batch rows     batches.py          (vime-grpo: advantages, masks, the global normaliser)
    rows -> gradients         actors/trainer.py   (vime-megatron, one actor a rank)
    weights -> engines        colocated.py        (vime-sync, two-phase, one new integer version a step)

Data flows one way. A sample is made under one weight version and trained on by the next; the driver moves references
and numbers, never tensors. Every wait has a deadline (wait.py) and the first error ends the run with its cause.
"""

from vime_integration.errors import BundleError, PipelineError, PlacementError, ResumeError

__all__ = ["BundleError", "PipelineError", "PlacementError", "ResumeError"]
