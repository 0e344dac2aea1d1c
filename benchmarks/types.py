"""A short run of each attention type with the same seed, data and settings, as one table.

    python -m benchmarks.types [--json FILE] [KEY=VALUE ...]

One process, one type after another, `model=nano` and 200 optimizer steps unless overrides say otherwise. Loss and
memory are those of the run folders; tokens/s is the median of the records after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TYPES = ("mha", "mqa", "gqa", "gated_gqa", "qwen3_5", "mla", "gla", "gta")
DEFAULTS = ("train.steps=200", "eval.every=0", "tracking.wandb.mode=disabled", "tracking.console=none")
TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def run(kind: str, folder: Path, overrides: list[str]) -> dict:
    """One run; its numbers. Raises CalledProcessError when it failed (it has said why)."""
    # Validated once, at the end.
    steps = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("train.steps=")), "200")
    command = [sys.executable, str(TRAIN), *DEFAULTS, f"eval.every={steps}", *overrides, f"attention={kind}"]
    subprocess.run(
        [*command, f"run_dir={folder}"], check=True, env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=subprocess.DEVNULL
    )
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [record["train/tokens_per_second"] for record in records if "train/tokens_per_second" in record]
    return {
        "attention": kind,
        "train_loss": summary["train/loss"],
        "bits_per_byte": summary["val/bits_per_byte"],
        "parameters": summary["parameters"],
        "cache_bytes_per_token": summary["memory/kv_cache_bytes_per_token"],
        "activations_peak_bytes": summary["memory/activations_peak_bytes"],
        "total_peak_bytes": summary["memory/total_peak_bytes"],
        "tokens_per_second": statistics.median(speeds[1:] or speeds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    rows = []
    print("| type | loss | bits per byte | parameters | cache, bytes per token | training memory | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in TYPES:
            row = run(kind, Path(folder) / kind, options.overrides)
            rows.append(row)
            print(
                f"| `{kind}` | {row['train_loss']:.3f} | {row['bits_per_byte']:.3f} | {row['parameters']:,} | "
                f"{row['cache_bytes_per_token']:,.0f} | {row['total_peak_bytes'] / 2**20:.1f} MiB | "
                f"{row['tokens_per_second']:,.0f} |",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
