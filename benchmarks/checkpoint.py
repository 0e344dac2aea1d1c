"""What a checkpoint costs: how long training stands still, and how fast the disk is used.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.checkpoint               # a 60M model at tensor degree 2
    torchrun ... -m benchmarks.checkpoint model=tiny folder=/scratch rounds=5 json=checkpoint.json

Interleaved in one run, on every rank at once: a plain copy of this rank's state to host memory, the save call, the write
that follows in the thread, and the disk's own sequential speed (the same bytes per rank, one file each, in 4 MiB pieces, flushed).
Medians over the rounds; of the slowest rank, since a job waits for it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_attn import mesh as meshes
from parallel_attn.checkpoint import CheckpointFolder, Saver
from parallel_attn.checkpoint.files import CHUNK_BYTES, write_all
from parallel_attn.nn import parameter_shards
from parallel_attn.training.config import parse
from parallel_attn.training.engines import Job
from parallel_attn.training.pretrain import build_model, with_vocabulary

COPY_TARGET, DISK_TARGET = 1.2, 0.5


def slowest(seconds: float) -> float:
    """The longest time of any rank."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def timed(work) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def write_plainly(path: Path, size: int) -> None:
    """`size` bytes in one file, in order, flushed to the disk."""
    piece = memoryview(os.urandom(CHUNK_BYTES))
    with open(path, "wb", buffering=0) as file:
        left = size
        while left:
            write_all(file, piece[: min(left, len(piece))])
            left -= min(left, len(piece))
        os.fsync(file.fileno())
    path.unlink()


def measure(model: str, folder: Path, rounds: int) -> dict:
    from hydra import compose, initialize_config_dir

    from parallel_attn.training.overrides import config_dir

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = with_vocabulary(parse(compose("config", overrides=[f"model={model}"])), 257)
    _, local_rank, world = meshes.launcher_ranks()
    mesh = meshes.start(meshes.choose_device("auto", local_rank), tensor=world)
    module = build_model(config, mesh.tensor, mesh.device)
    engine = config.engine.cls(
        module, Job(mesh, config.optimizer.cls, config.optimizer.config, "fp32", 1, 1), config.engine.config
    )
    engine.begin_state(1)
    shards = parameter_shards(module)
    tensors = [tensor for name in shards for tensor in engine.state_of(name).values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    saver = Saver(CheckpointFolder(folder / "checkpoints"), mesh, shards, keep=1)
    target = [torch.empty(tensor.shape, pin_memory=mesh.device.type == "cuda") for tensor in tensors]

    def copy() -> None:
        for there, tensor in zip(target, tensors):
            there.copy_(tensor, non_blocking=mesh.device.type == "cuda")
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)

    seconds = {"copy": [], "save": [], "write": [], "disk": []}
    for number in range(rounds + 1):
        one = {
            "copy": timed(copy),
            "save": timed(lambda: saver.save(number + 1, engine.state_of, {})),
            "write": timed(saver.wait),
            "disk": timed(lambda: write_plainly(folder / f"plain-{mesh.world.rank}", size)),
        }
        if number:  # the first one touches new memory
            for name, value in one.items():
                seconds[name].append(value)
    bytes_of_all = torch.tensor(size, dtype=torch.int64)
    dist.all_reduce(bytes_of_all)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [save / copied for save, copied in zip(seconds["save"], seconds["copy"])]
    return {
        "model": model,
        "parameters": sum(shard.full_elements() for shard in shards.values()),
        "tensor": mesh.tensor.degree,
        "bytes": int(bytes_of_all),
        "seconds": seconds,
        "save_over_copy": statistics.median(ratios),
        # from the call to the published checkpoint, checksums included, against the plain write
        "speed_over_disk": median["disk"] / (median["save"] + median["write"]),
        "checkpoint_bytes_per_second": int(bytes_of_all) / (median["save"] + median["write"]),
        "disk_bytes_per_second": int(bytes_of_all) / median["disk"],
    }


def main() -> None:
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    unknown = set(given) - {"model", "folder", "rounds", "json"}
    if unknown:
        sys.exit(f"error: {unknown.pop()} is not one of: model, folder, rounds, json")
    folder = Path(given.get("folder", ".")) / ".checkpoint-benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = measure(given.get("model", "small"), folder, int(given.get("rounds", 5)))
        main_rank = dist.get_rank() == 0
        meshes.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if main_rank:
        print(f"{result['parameters']:,} parameters at tensor degree {result['tensor']}: {result['bytes'] / 1e6:,.0f} MB")
        print(f"the save call takes {result['save_over_copy']:.2f}x a copy of the state to host memory (wanted: {COPY_TARGET})")
        print(
            f"written at {result['checkpoint_bytes_per_second'] / 1e6:,.0f} MB/s = {result['speed_over_disk']:.2f} of the "
            f"disk's own {result['disk_bytes_per_second'] / 1e6:,.0f} MB/s (wanted: {DISK_TARGET})"
        )
        if "json" in given:
            Path(given["json"]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
