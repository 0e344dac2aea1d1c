"""The core of attention on this machine, forward and backward: each setting against the plain causal call, interleaved.

    python -m benchmarks.attention [--length 1024] [--threads 1] [--json FILE]

Prints the median time of each and the median of the ratios of neighbouring calls. `window, as a mask` is what the banded
blocks replace; `unequal widths, unpadded` what the padding of the narrower one replaces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from parallel_attn.attention.kernels import attend, fused
from parallel_attn.attention.masks import allowed_keys
from parallel_attn.initialization import Dropout

ROUNDS = 9
BATCH, HEADS, KV_HEADS, WIDTH, WINDOW = 2, 8, 2, 64, 128


def contestants(length: int) -> dict[str, Callable]:
    """name -> function(q, k, v) of (B, S, H, E), (B, S, K, E), (B, S, K, Ev)."""
    scale = WIDTH**-0.5
    mask = allowed_keys(length, length, True, WINDOW, torch.device("cpu"))
    sinks = torch.zeros(HEADS, requires_grad=True)
    ids = (torch.arange(length) // (length // 4)).expand(BATCH, length)

    def with_dropout(q, k, v):
        dropout = Dropout(0.1, 0, "layer", 0, torch.arange(BATCH), (0, HEADS))
        return attend(q, k, v, scale=scale, causal=True, dropout=dropout)

    def unpadded(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v[..., : WIDTH // 2]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return {
        "causal": lambda q, k, v: attend(q, k, v, scale=scale, causal=True),
        "learned sinks": lambda q, k, v: attend(q, k, v, scale=scale, causal=True, sinks=sinks),
        f"window of {WINDOW}": lambda q, k, v: attend(q, k, v, scale=scale, causal=True, window=WINDOW),
        f"window of {WINDOW}, as a mask": lambda q, k, v: fused(q, k, v, scale=scale, mask=mask),
        "four documents": lambda q, k, v: attend(q, k, v, scale=scale, causal=True, document_ids=ids),
        "soft cap": lambda q, k, v: attend(q, k, v, scale=scale, causal=True, soft_cap=50.0),
        "dropout": with_dropout,
        "unequal widths": lambda q, k, v: attend(q, k, v[..., : WIDTH // 2], scale=scale, causal=True),
        "unequal widths, unpadded": unpadded,
    }


def seconds(function: Callable, q, k, v) -> float:
    start = time.perf_counter()
    function(q, k, v).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [(BATCH, options.length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    functions = contestants(options.length)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(ROUNDS + 1):
        for name, function in functions.items():
            taken = seconds(function, *inputs)
            if round_number:  # the first one warms up
                times[name].append(taken)
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(t / plain for t, plain in zip(taken, times["causal"]))
        rows.append({"what": name, "seconds": statistics.median(taken), "over_causal": ratio})
        print(f"{name:28} {rows[-1]['seconds'] * 1e3:8.1f} ms  {ratio:5.2f} x causal")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"length": options.length, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
