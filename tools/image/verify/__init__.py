"""The verification layer of an image: one check a line, what was seen beside what was expected.

Every fault that it looks for has broken an image only at the first training run: a CUDA torch from an index, a vLLM
without a symbol that the sync plugin imports, a NumPy that Megatron refuses, an import that fails only after another,
two copies of one ROCm library in a process. ``tools/verify_image.py`` runs it at the end of a build and again in a
container that has devices.

What our packages need of vLLM, Megatron and the rest is read from their source, never listed here: a list would go
stale with the first new import. Imports are tried in fresh interpreters, because this one has imported too much to
tell. Nothing but the standard library is needed.
"""
