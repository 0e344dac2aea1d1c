"""Peak FLOP rates and model-FLOPs utilisation."""

import time
from functools import lru_cache

import torch

# Dense peaks in TFLOP/s, without sparsity: (name part, {dtype: peak}). The first entry whose part is in the device's
# name counts, so the special comes before the general. float32 is the CUDA-core rate (TF32 is off by default in torch).
# As NVIDIA publishes them in the data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 80GB", "L4", "L40S",
# "V100", "T4" (those of H100, H200, L4 and L40S print the rates with 2:4 sparsity: halved here), and in the Ada
# architecture white paper (appendix A, RTX 4090: FP16/BF16 tensor with FP32 accumulate). Compared with public tables
# that quote the sheets, not with the sheets themselves; the RTX 4090's tensor rate and the H200's float32 rate were in
# none of them. NVL cards: the tables disagree (some count a pair of cards), so they are not known here.
_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_PEAK_TFLOPS: tuple[tuple[str, dict[torch.dtype, float]], ...] = (
    ("H200 NVL", {}),
    ("H200", {_BF16: 989.4, _F16: 989.4, _F32: 66.9, _F64: 66.9}),
    ("H100 PCIe", {_BF16: 756.5, _F16: 756.5, _F32: 51.2, _F64: 51.2}),
    ("H100 NVL", {}),
    ("H100", {_BF16: 989.4, _F16: 989.4, _F32: 66.9, _F64: 66.9}),
    ("A100", {_BF16: 312.0, _F16: 312.0, _F32: 19.5, _F64: 19.5}),
    ("L40S", {_BF16: 362.05, _F16: 362.05, _F32: 91.6}),
    ("L4", {_BF16: 121.0, _F16: 121.0, _F32: 30.3}),
    ("V100 PCIE", {_F16: 112.0, _F32: 14.0, _F64: 7.0}),
    ("V100", {_F16: 125.0, _F32: 15.7, _F64: 7.8}),
    ("T4", {_F16: 65.0, _F32: 8.1}),
    ("RTX 4090", {_BF16: 165.2, _F16: 165.2, _F32: 82.6}),
)
_GEMM_SIDE = 512
_GEMM_SECONDS = 0.15


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device for dense matrix products in `dtype`; None if it is not known.

    CUDA: from the table of public data sheets, by the device's name. CPU: measured once per process, dtype and thread
    count by a short matrix product (under 0.2 s), because there the peak depends on the machine and its threads.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return cuda_peak_flops(torch.cuda.get_device_name(device), dtype)
    if device.type == "cpu":
        return _measured_cpu_flops(dtype, torch.get_num_threads())
    return None


def cuda_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the card that calls itself `name` (as `torch.cuda.get_device_name` prints it), or None."""
    words = name.replace("-", " ").split()
    for part, peaks in _PEAK_TFLOPS:
        # Whole words, so that an "L40" is not taken for an L4.
        wanted = part.split()
        if all(word in words for word in wanted):
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


def mfu(flops_per_token: float, tokens_per_second_per_rank: float, peak: float | None) -> float | None:
    """Model-FLOPs utilisation in 0..1: the FLOPs that one rank's share of the model needs per second over its peak.

    `flops_per_token`: FLOPs per token on one rank (forward and backward), `peak`: FLOP/s of that rank's device.
    None if the peak is not known.
    """
    return None if not peak else flops_per_token * tokens_per_second_per_rank / peak


@lru_cache(maxsize=None)
def _measured_cpu_flops(dtype: torch.dtype, threads: int) -> float:
    """Best of several products of two square matrices; `threads` only keys the cache."""
    # A generator of its own: measuring must not move the global random state of a training run.
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(_GEMM_SIDE, _GEMM_SIDE, generator=generator).to(dtype)
    right = torch.rand(_GEMM_SIDE, _GEMM_SIDE, generator=generator).to(dtype)
    best = float("inf")
    begin = time.perf_counter()
    with torch.no_grad():
        while time.perf_counter() - begin < _GEMM_SECONDS:
            start = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - start)
    return 2 * _GEMM_SIDE**3 / best
