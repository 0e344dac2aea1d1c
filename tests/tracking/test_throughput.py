"""Peaks and utilisation."""

import subprocess
import sys

import pytest
import torch

from parallel_attn.tracking import device_peak_bytes, mfu, peak_flops, process_peak_bytes
from parallel_attn.tracking.throughput import _measured_cpu_flops, cuda_peak_flops


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_bf16_peak_by_the_name_that_torch_reports(name, tflops):
    assert cuda_peak_flops(name, torch.bfloat16) == tflops * 1e12


def test_what_is_not_known_is_none():
    assert cuda_peak_flops("NVIDIA L40", torch.bfloat16) is None  # neither an L4 nor an L40S
    assert cuda_peak_flops("NVIDIA H100 NVL", torch.bfloat16) is None  # sources disagree
    assert cuda_peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112e12
    assert cuda_peak_flops("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert cuda_peak_flops("Tesla V100-SXM2-16GB", torch.float16) == 125e12
    assert cuda_peak_flops("Tesla T4", torch.float16) == 65e12
    assert mfu(1e9, 10.0, None) is None


def test_cpu_peak_is_measured_once_and_leaves_the_random_state_alone():
    _measured_cpu_flops.cache_clear()
    state = torch.get_rng_state()
    first = peak_flops("cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert 1e8 < first < 1e15
    assert peak_flops("cpu", torch.float32) == first
    assert _measured_cpu_flops.cache_info().misses == 1
    assert peak_flops("cpu", torch.float64) != first


def test_mfu_is_needed_over_possible():
    assert mfu(2e9, 100.0, 1e12) == pytest.approx(0.2)


def test_process_peak_counts_memory_that_is_gone_again():
    before = process_peak_bytes()
    assert before > 50 << 20  # torch alone
    block = bytearray(before + (64 << 20))
    block[:: 4096] = b"x" * len(block[::4096])
    del block
    assert process_peak_bytes() >= before + (64 << 20)


def test_process_peak_is_not_inherited_from_the_process_that_started_it():
    block = bytearray(1 << 30)
    block[::4096] = b"x" * len(block[::4096])
    code = "from parallel_attn.tracking import process_peak_bytes; print(process_peak_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50 << 20 < int(done.stdout) < len(block)


def test_device_peak_is_none_on_the_cpu():
    assert device_peak_bytes("cpu") is None
