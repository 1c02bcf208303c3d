"""Megatron-Core models and training for RL, from a Hugging Face folder and back."""
