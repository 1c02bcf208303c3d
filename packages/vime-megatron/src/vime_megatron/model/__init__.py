"""The modules of the model and what they are given."""
