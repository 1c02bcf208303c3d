"""GRPO: configuration, advantages, losses, metrics and the vime-grpo launcher."""
