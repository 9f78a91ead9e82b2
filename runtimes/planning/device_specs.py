"""What devices can do at most, from their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtimes.job import Precision

__all__ = ["DEVICE_SPECS", "DeviceSpec", "device_spec"]


@dataclass(frozen=True)
class DeviceSpec:
    """``flops_per_s``: peak of dense matrix products, by the precisions that the device has."""

    name: str
    flops_per_s: Mapping[Precision, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: float
    source: str

    def peak_flops_per_s(self, precision: Precision) -> float:
        """ValueError for a precision that the device does not compute in."""
        if precision not in self.flops_per_s:
            raise ValueError(
                f"{self.name} has no {precision}: choose one of {', '.join(self.flops_per_s)}"
            )
        return self.flops_per_s[precision]


#: float64 is that of vector units, tf32 and bf16 those of tensor cores without sparsity.
DEVICE_SPECS = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            "a100-80gb",
            {"float32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "float64": 9.7e12},
            2039e9,
            80e9,
            "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM",
        ),
        DeviceSpec(
            "v100-32gb",
            {"float32": 15.7e12, "float64": 7.8e12},
            900e9,
            32e9,
            "NVIDIA V100 Tensor Core GPU data sheet, V100 SXM2; its tensor cores take float16 only",
        ),
        DeviceSpec(
            "h200",
            {"float32": 67e12, "tf32": 494e12, "bf16": 989e12, "float64": 34e12},
            4.8e12,
            141e9,
            "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; half of its figures with sparsity",
        ),
    )
}


def device_spec(name: str) -> DeviceSpec:
    """ValueError for a name that is not in the table."""
    if name not in DEVICE_SPECS:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICE_SPECS)}")
    return DEVICE_SPECS[name]
