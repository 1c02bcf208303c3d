"""The colocated and asynchronous GRPO pipelines, placed by Ray."""
