"""Planned, transactional weight sync from a trainer to vLLM engines."""
