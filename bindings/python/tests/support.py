"""What several tests share."""

import numpy as np

import vanward


def cpu_session() -> vanward.Session:
    return vanward.Session(vanward.Device.CPU, threads=2)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)
