"""Errors of the pipelines: placement, processes that die or stay silent, bundles that cannot be used."""

from __future__ import annotations

from vime_devices import VimeError


class PipelineError(VimeError):
    """A phase failed, a process died or a wait ran past its deadline."""


class PlacementError(PipelineError):
    """The configuration asks for more devices or processes than the host can give."""


class ResumeError(PipelineError):
    """The folder given to ``--resume`` cannot be continued, or not with this configuration."""


class BundleError(PipelineError):
    """A checkpoint could not be written or is torn; the one before it is untouched."""
