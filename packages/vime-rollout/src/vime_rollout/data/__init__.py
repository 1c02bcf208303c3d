"""Prompts in: readers of JSONL, Parquet and reasoning-gym tasks, and the source that walks over them in epochs."""

from vime_rollout.data.source import DataConfig, DataSource, EpochSource, PromptData, open_data_source

__all__ = ["DataConfig", "DataSource", "EpochSource", "PromptData", "open_data_source"]
