"""Checkpoints: whole or absent, written by any layout and read by any other.

``pieces`` says what a rank holds as boxes of named tensors, ``storage`` puts boxes in files and back, ``folders`` makes
folders appear complete, ``save`` and ``load`` are the two ways through them, ``handle`` is what a caller holds of a
save. Importing this package imports none of them.
"""
