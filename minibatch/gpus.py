"""What a GPU can do by its datasheet, and what share of that a program gets out of it.

Two peaks decide how long a piece of work takes: the rate of arithmetic and the rate at which memory is read. Their
ratio is the ridge point: a matrix of 16-bit weights, read once, is worth reading for that many tokens before arithmetic
becomes the limit (S. Williams et al., Roofline, CACM 2009).

No program reaches either peak, and near the ridge none reaches the maximum of the two times: reading and computing
overlap, but not wholly. A smooth maximum says that with one number more (see ``smooth_max``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from minibatch.checks import check_float

Times = TypeVar("Times", float, np.ndarray)

GIB = 2**30


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks, in (0, 2] (a peak may have been measured low), and the sharpness of the corner.

    ``sharpness``  1: reading and computing take turns, times add; infinity: they overlap wholly, the longer one counts
    """

    bandwidth: float = 0.8
    compute: float = 0.7
    sharpness: float = 1.5

    def __post_init__(self) -> None:
        check_float("bandwidth", self.bandwidth, 0.0, 2.0, above=True)
        check_float("compute", self.compute, 0.0, 2.0, above=True)
        check_float("sharpness", self.sharpness, 1.0, 100.0)


@dataclass(frozen=True)
class GPU:
    """Peaks, and how far they are reached.

    ``flops``      16-bit matrix multiplication, dense, FLOP/s
    ``bandwidth``  memory, bytes/s
    ``memory``     bytes that a program finds; 0 if unknown
    ``link``       to another GPU, one direction, bytes/s
    ``host_link``  to host memory, one direction, bytes/s
    ``linked``     how many GPUs the link joins; more of them meet over ``host_link``
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    host_link: float
    efficiency: Efficiency = Efficiency()
    linked: int = 8

    def __post_init__(self) -> None:
        for rate in ("flops", "bandwidth", "link", "host_link"):
            check_float(f"{self.name}: {rate}", getattr(self, rate), 0.0, math.inf, above=True)
        check_float(f"{self.name}: memory", self.memory, 0.0, math.inf)

    @property
    def ridge(self) -> float:
        """Tokens from which on a matrix of 16-bit weights takes longer to multiply with than to read, at the peaks:
        two operations a weight and token, two bytes a weight."""
        return self.flops / self.bandwidth


def smooth_max(read: Times, compute: Times, sharpness: float) -> Times:
    """(read^p + compute^p)^(1/p): between the longer of two times and their sum. Numbers or arrays, 0 or more."""
    total = read + compute + 1e-300  # as shares of it, because microseconds to a high power are 0
    return total * ((read / total) ** sharpness + (compute / total) ** sharpness) ** (1 / sharpness)


# Fitted by minibatch.calibration.fit_linear to the measured times of Llama-2-7B's linear layers on one GPU, 1 to 4096
# tokens (profiles of microsoft/vidur, MIT licence; MLSys 2024).
AMPERE = Efficiency(0.767, 0.698, 1.68)
HOPPER = Efficiency(0.800, 0.754, 1.24)
GDDR = Efficiency(0.789, 0.758, 1.45)
MIDDLE = Efficiency()  # nothing measured: about the mean of the three

# Rates: NVIDIA's datasheets (A100, H100 SXM, H200 SXM, A40, A10G, L4) and the Ada architecture whitepaper (RTX 4090).
# Of their matrix rates those "with sparsity" are twice what counts here; their link rates are of both directions.
# Memory: sizes in "GB" are GiB. GDDR6 keeps 1/16 for error correction (nvidia-smi shows 46,068 MiB on an A40).
GPUS = {
    "a100-40": GPU("A100-40GB", 312e12, 1555e9, 40 * GIB, 300e9, 32e9, AMPERE),
    "a100-80": GPU("A100-80GB", 312e12, 2039e9, 80 * GIB, 300e9, 32e9, AMPERE),
    "h100": GPU("H100-80GB", 989e12, 3350e9, 80 * GIB, 450e9, 64e9, HOPPER),
    # the H100's chip with other memory, of which 141 "GB" are 140 GiB
    "h200": GPU("H200-141GB", 989e12, 4800e9, 140 * GIB, 450e9, 64e9, HOPPER),
    # the link is an NVLink bridge, which joins two
    "a40": GPU("A40", 149.7e12, 696e9, 45 * GIB, 56.25e9, 32e9, GDDR, linked=2),
    # 125e12, often read, is the A10's; the A10G, made for AWS, has fewer tensor operations a clock. No NVLink, as on
    # the next two: GPUs meet over PCIe
    "a10g": GPU("A10G", 70e12, 600e9, 22.5 * GIB, 32e9, 32e9, GDDR),
    "l4": GPU("L4", 121e12, 300e9, 22.5 * GIB, 32e9, 32e9, MIDDLE),
    # 330e12, often read, accumulates in float16; models accumulate in float32
    "rtx-4090": GPU("RTX 4090", 165.2e12, 1008e9, 24 * GIB, 32e9, 32e9, MIDDLE),
}
