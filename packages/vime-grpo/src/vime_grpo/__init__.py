"""GRPO: configuration, advantages, losses, metrics and the vime-grpo launcher.

This is the one door to the package. Names that need torch are imported when they are first used, so that reading a
configuration stays instant::

    from vime_grpo import PolicyLoss, build_batch, group_advantages, load_config
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vime_grpo.config import RunConfig, load_config, save_config
from vime_grpo.errors import (
    BatchError,
    ConfigError,
    GrpoError,
    LaunchError,
    MetricsError,
    ReportError,
    TrackerError,
)
from vime_grpo.evaluation import evaluation_metrics, pass_at_k
from vime_grpo.guards import Alarm, Guards, finite_metrics
from vime_grpo.samples import SampleRecord, SamplesWriter, extremes, read_samples
from vime_grpo.step_file import StepFile, read_steps
from vime_grpo.timeline import Span, TimelineWriter, read_timeline
from vime_grpo.trackers import Tracker, open_trackers
from vime_grpo.tracking import MetricsWriter, read_metrics

if TYPE_CHECKING:
    from vime_grpo.advantages import group_advantages
    from vime_grpo.batch import BatchRow, BatchRows, SampleLike, TrainSample, build_batch, split_updates
    from vime_grpo.console import Display, closing_table, make_display
    from vime_grpo.losses import ClipBounds, PolicyLoss
    from vime_grpo.metrics import batch_metrics, mean_metrics, train_metrics

_LAZY = {
    "advantages": ("group_advantages",),
    "batch": ("BatchRow", "BatchRows", "SampleLike", "TrainSample", "build_batch", "split_updates"),
    "console": ("Display", "closing_table", "make_display"),
    "losses": ("ClipBounds", "PolicyLoss"),
    "metrics": ("batch_metrics", "mean_metrics", "train_metrics"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


__all__ = [
    "Alarm",
    "BatchError",
    "BatchRow",
    "BatchRows",
    "ClipBounds",
    "ConfigError",
    "Display",
    "GrpoError",
    "Guards",
    "LaunchError",
    "MetricsError",
    "MetricsWriter",
    "PolicyLoss",
    "ReportError",
    "RunConfig",
    "SampleLike",
    "SampleRecord",
    "SamplesWriter",
    "Span",
    "StepFile",
    "TimelineWriter",
    "Tracker",
    "TrackerError",
    "TrainSample",
    "batch_metrics",
    "build_batch",
    "closing_table",
    "evaluation_metrics",
    "extremes",
    "finite_metrics",
    "group_advantages",
    "load_config",
    "make_display",
    "mean_metrics",
    "open_trackers",
    "pass_at_k",
    "read_metrics",
    "read_samples",
    "read_steps",
    "read_timeline",
    "save_config",
    "split_updates",
    "train_metrics",
]
