"""Releasing one member of the workspace: what it is, what is built of it, and whether that works alone."""
