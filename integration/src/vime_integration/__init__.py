"""The pipelines of vime: Ray places trainer ranks, engines and the rollout, and a small loop moves the data round.

One trip through the house, and the module that owns each part of it::

    prompts -> samples        actors/rollout.py    (vime-rollout in an asyncio actor)
                              collector.py         colocated: asked for, step by step
                              producer.py          asynchronous: by itself, as far as admission.py allows
    samples -> batch rows     batches.py           (vime-grpo: advantages, masks, the global normaliser)
                              staleness.py         the age of tokens
    rows -> gradients         actors/trainer.py    (vime-megatron, one actor a rank)
    weights -> engines        mending.py           (vime-sync, one new integer version a step; engines that died)
    the loop                  pipeline.py          what colocated.py and asynchronous.py share
    the processes             fleet.py             placed by placement.py; what they share is chosen in sharing.py
                              foreign.py           engines that somebody else started: asked whether they fit
    what is kept              bundle.py            resume; ledger.py, recording.py and reading.py: what happened

Data flows one way. A sample is made under one weight version and trained on by the next; the driver moves references
and numbers, never tensors. Every wait has a deadline (wait.py) and the first error ends the run with its cause.
"""

from vime_integration.errors import BundleError, PipelineError, PlacementError, ResumeError

__all__ = ["BundleError", "PipelineError", "PlacementError", "ResumeError"]
