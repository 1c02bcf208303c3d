"""GRPO: configuration, advantages, losses, metrics and the vime-grpo launcher."""

from vime_grpo.config import RunConfig, load_config
from vime_grpo.errors import BatchError, ConfigError, GrpoError, LaunchError, MetricsError

__all__ = ["BatchError", "ConfigError", "GrpoError", "LaunchError", "MetricsError", "RunConfig", "load_config"]
