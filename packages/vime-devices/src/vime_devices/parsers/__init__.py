"""The four readers of a mask, as pure functions: ROCr, HIP, torch before initialisation, and the CUDA driver.

They disagree on purpose: each follows its own library to the letter, so that a caller can see where one text means two
things. ``vime_devices.resolve`` composes them.
"""

from vime_devices.parsers.cuda import read_cuda
from vime_devices.parsers.hip import hip_source, read_hip
from vime_devices.parsers.reading import Reader, Reading
from vime_devices.parsers.rocr import read_rocr
from vime_devices.parsers.torch_env import torch_count, torch_visible

__all__ = ["Reader", "Reading", "hip_source", "read_cuda", "read_hip", "read_rocr", "torch_count", "torch_visible"]
