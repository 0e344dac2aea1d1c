"""RMSNorm, forward and backward on this CPU: ours against torch's composite, interleaved.

    python -m benchmarks.norm [--json FILE]

Prints the median time of each and the median of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from parallel_attn.nn.norm import rms_norm

SHAPES = ((2048, 128), (2048, 1024), (512, 4096))
ROUNDS = 15


def seconds(function, x, gain, grad) -> float:
    x.grad = gain.grad = None
    start = time.perf_counter()
    for _ in range(10):
        function(x, gain).backward(grad)
    return (time.perf_counter() - start) / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for shape in SHAPES:
        x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
        gain = torch.rand(shape[-1], requires_grad=True)
        contestants = {
            "ours": lambda x, gain: rms_norm(x, gain, 1e-6),
            "torch": lambda x, gain: torch.nn.functional.rms_norm(x, gain.shape, gain, 1e-6),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(ROUNDS):
            for name, function in contestants.items():
                times[name].append(seconds(function, x, gain, grad))
        ratio = statistics.median(theirs / ours for ours, theirs in zip(times["ours"], times["torch"]))
        row = {"shape": shape, "torch_over_ours": ratio} | {k: statistics.median(v) for k, v in times.items()}
        rows.append(row)
        print(f"{shape}: ours {row['ours'] * 1e3:.2f} ms, torch {row['torch'] * 1e3:.2f} ms, torch / ours {ratio:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
