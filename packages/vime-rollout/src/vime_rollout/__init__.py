"""Samples, data buffer, vLLM engines and rewards: the rollout side of RL post-training."""
