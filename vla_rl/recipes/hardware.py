"""Published figures of GPUs, and ``--hardware 8xH100`` read as so many of them.

H100    NVIDIA H100 Tensor Core GPU data sheet, H100 SXM
A100    NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM
L40S    NVIDIA L40S GPU data sheet
RTX4090 NVIDIA Ada GPU Architecture whitepaper (GeForce RTX 4090; bf16 with sums in float32)

TFLOP/s are those of dense matrices, without sparsity.  The bandwidth between GPUs is that of NVLink (H100, A100) or of
PCIe 4.0 x16, in both directions together as the data sheets give it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vla_rl.contract.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU: bf16 TFLOP/s, memory in GB, and GB/s to its memory and, both directions together, to other GPUs."""

    name: str
    tflops: float
    memory: float
    memory_bandwidth: float
    link: float
    link_name: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989.0, 80.0, 3350.0, 900.0, "NVLink"),
        Gpu("A100", 312.0, 80.0, 2039.0, 600.0, "NVLink"),
        Gpu("L40S", 362.0, 48.0, 864.0, 64.0, "PCIe"),
        Gpu("RTX4090", 165.2, 24.0, 1008.0, 64.0, "PCIe"),
    )
}


@dataclass(frozen=True)
class Hardware:
    """``count`` GPUs of one kind, one learner rank on each."""

    count: int
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"

    @property
    def one_way(self) -> float:
        """Bytes per second from one GPU to another."""
        return self.gpu.link * 1e9 / 2


def hardware_of(text: str) -> Hardware:
    """What ``text`` names, such as "8xH100" or "H100"; raises UserError for anything else."""
    found = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w\- ]*)", text.strip())
    count = int(found[1] or 1) if found else 0
    if found is None or count < 1:
        raise UserError(
            f"--hardware {text!r} is no number of GPUs, so nothing can be predicted for it; write for example 8xH100."
        )
    name = re.sub(r"[\s_-]", "", found[2]).upper()
    if name not in GPUS:
        raise UserError(
            f"no figures of the GPU {found[2]!r} are known, so nothing can be predicted for it; "
            f"{did_you_mean(name, GPUS)}"
        )
    return Hardware(count, GPUS[name])
