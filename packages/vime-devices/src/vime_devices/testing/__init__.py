"""A fake HIP runtime for tests of programs that share device memory."""

from vime_devices.testing.fake_hip import FakeHipError, FakeNode, FakeProcess, Line
from vime_devices.topology import synthetic_node

__all__ = ["FakeHipError", "FakeNode", "FakeProcess", "Line", "synthetic_node"]
