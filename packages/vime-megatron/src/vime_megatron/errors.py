"""The errors of vime-megatron.

Each carries what happened, where, what was seen, what was expected and how to mend it (see
:class:`vime_devices.VimeError`). A failed step or save leaves the trainer and the last checkpoint as they were, unless
the text says otherwise.
"""

from __future__ import annotations

from vime_devices import VimeError


class TrainerError(VimeError):
    """Base of the errors of vime-megatron."""


class ModelError(TrainerError):
    """A model folder is missing, unsupported, incomplete or does not fit the parallel layout."""


class BatchError(TrainerError):
    """A training sequence or its fields cannot be used; the text names the sequence."""


class GradientError(TrainerError):
    """A loss or gradient is not finite; weights and optimiser state are as before the step."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read; a previous checkpoint is untouched."""


class PlatformError(TrainerError):
    """The device layer that was asked for does not fit this machine."""
