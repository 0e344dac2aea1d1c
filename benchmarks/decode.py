"""Generation against transformers' `generate`: tokens per second and memory, each attention type.

    python -m benchmarks.decode [--json FILE] [--compile] [KEY=VALUE ...]

    width=512 layers=4 vocab=8192 prompt=512 new=128 batches=1,8 degrees=1,2 rounds=3 types=gqa,mla,mha,mqa,gated_gqa,gla,gta

Float32 on CPU, one thread per rank; at degree 2 transformers has two threads in one process. `gqa` and `mla` hold the weights
of a Llama and of a dense DeepSeek-V3 of transformers, and greedy tokens are compared; the rounds of both are interleaved, the
ratio is of medians. Memory: peak of live tensors above the weights, of the fullest rank, counted in a round of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_attn import DecoderLM, mesh as meshes, sharded_parameters
from parallel_attn.attention import (
    GroupedConfig,
    GroupedLatentAttention,
    GroupedLatentConfig,
    GroupedQueryAttention,
    GroupedTiedAttention,
    TiedConfig,
)
from parallel_attn.interop import from_hugging_face
from parallel_attn.models import MlpConfig, ModelConfig, generate
from parallel_attn.tracking.memory import MemoryMeter

DEFAULTS = {
    "width": "512", "layers": "4", "vocab": "8192", "prompt": "512", "new": "128", "batches": "1,8", "degrees": "1,2",
    "rounds": "3", "types": "gqa,mla,mha,mqa,gated_gqa,gla,gta",
}  # fmt: skip
HEADS = 8
OWN = {
    "mha": (GroupedQueryAttention, GroupedConfig(HEADS, num_kv_heads=HEADS)),
    "mqa": (GroupedQueryAttention, GroupedConfig(HEADS, num_kv_heads=1)),
    "gated_gqa": (GroupedQueryAttention, GroupedConfig(HEADS, num_kv_heads=2, gate="elementwise")),
    "gla": (GroupedLatentAttention, GroupedLatentConfig(HEADS)),
    "gta": (GroupedTiedAttention, TiedConfig(HEADS, num_kv_heads=2)),
}


def their_model(kind: str, sizes: dict[str, int]):
    from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

    width, layers = sizes["width"], sizes["layers"]
    common = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": HEADS, "vocab_size": sizes["vocab"],
        "intermediate_size": width * 11 // 4, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    unit = width // HEADS
    latent = {
        "q_lora_rank": None, "kv_lora_rank": 4 * unit, "qk_nope_head_dim": unit, "qk_rope_head_dim": unit // 2,
        "v_head_dim": unit, "first_k_dense_replace": layers, "num_key_value_heads": HEADS,
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**common, num_key_value_heads=2) if kind == "gqa" else DeepseekV3Config(**common, **latent)
    return AutoModelForCausalLM.from_config(config).eval()


def our_model(kind: str, sizes: dict[str, int], theirs, axis) -> DecoderLM:
    if theirs is None:
        config = ModelConfig(
            sizes["width"], sizes["layers"], HEADS, MlpConfig(sizes["width"] * 11 // 4), vocab_size=sizes["vocab"]
        )
        return DecoderLM(config, *OWN[kind], tensor_parallel=axis).eval()
    translation = from_hugging_face(theirs.config.to_dict())
    a = translation.architecture
    model = DecoderLM(a.model, a.attention_class, a.attention, tensor_parallel=axis).eval()
    full = dict(translation.to_ours(theirs.state_dict()))
    with torch.no_grad():
        for name, parameter, shard in sharded_parameters(model):
            parameter.copy_(full[name][shard.index()])
    return model


def peak_above(parameters, work) -> int:
    with torch.no_grad(), MemoryMeter(parameters=list(parameters)) as meter:
        work()
    report = meter.report()
    return report["memory/total_peak_bytes"] - report["memory/parameters_bytes"]


def slowest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def measured(kind: str, batch: int, sizes: dict[str, int], mesh, compiled: bool) -> dict:
    """Of one type and batch: our and their tokens per second and memory."""
    degree = mesh.tensor.degree
    theirs = their_model(kind, sizes) if kind in ("gqa", "mla") else None
    model = our_model(kind, sizes, theirs, mesh.tensor)
    new, generator = sizes["new"], torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sizes["vocab"], (batch, sizes["prompt"]), generator=generator)
    prompts = tokens.tolist()

    def ours(compiled: bool = compiled):
        made = generate(model, prompts, seq_len=1 << 20, max_new_tokens=new, compiled=compiled)
        return torch.tensor([row.tokens for row in made.continuations]), made

    def peers():
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[:, tokens.shape[1] :]

    mine, made = ours()
    row = {"type": kind, "degree": degree, "batch": batch, "compiled": compiled}
    row |= {"cache_bytes_per_token": made.cache_bytes_per_token, "parameters": sum(p.numel() for p in model.parameters())}
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    if theirs is not None and mesh.is_main:
        row["same_tokens"] = (mine == peers()).double().mean().item()
    for _ in range(sizes["rounds"]):
        dist.barrier()
        began = time.perf_counter()
        ours()
        seconds["ours"].append(slowest(time.perf_counter() - began))
        if theirs is not None and mesh.is_main:
            torch.set_num_threads(degree)
            began = time.perf_counter()
            peers()
            seconds["theirs"].append(time.perf_counter() - began)
            torch.set_num_threads(1)
        dist.barrier()
    row["tokens_per_second"] = batch * new / statistics.median(seconds["ours"])
    row["memory_bytes"] = slowest(peak_above(model.parameters(), lambda: ours(False)))
    if theirs is not None and mesh.is_main:
        row["their_tokens_per_second"] = batch * new / statistics.median(seconds["theirs"])
        row["ratio"] = row["tokens_per_second"] / row["their_tokens_per_second"]
        row["their_memory_bytes"] = peak_above(theirs.parameters(), peers)
    dist.barrier()
    return row


def worker(options) -> None:
    torch.set_num_threads(1)
    sizes = {key: int(value) for key, value in options.settings.items() if key not in ("batches", "degrees", "types")}
    mesh = meshes.start(torch.device("cpu"), tensor=meshes.launcher_ranks()[2])
    rows = []
    for kind in options.settings["types"].split(","):
        for batch in map(int, options.settings["batches"].split(",")):
            rows.append(measured(kind, batch, sizes, mesh, options.compile))
            if mesh.is_main:
                print(line(rows[-1]), flush=True)
    if mesh.is_main:
        Path(options.json).write_text(json.dumps(rows))
    meshes.shutdown()


def line(row: dict) -> str:
    theirs = (f"{row[key]:,.{digits}f}{unit}" if key in row else "" for key, digits, unit in (
        ("their_tokens_per_second", 0, ""), ("ratio", 2, "x")))  # fmt: skip
    speed, ratio = theirs
    memory = f"{row['their_memory_bytes'] / 2**20:.1f}" if "ratio" in row else ""
    return (
        f"| `{row['type']}` | {row['degree']} | {row['batch']} | {row['tokens_per_second']:,.0f} | {speed} | {ratio} | "
        f"{row['memory_bytes'] / 2**20:.1f} | {memory} | {row['cache_bytes_per_token']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    parser.add_argument("--compile", action="store_true", help="with torch.compile on our side")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=" ".join(f"{k}={v}" for k, v in DEFAULTS.items()))
    options = parser.parse_args()
    given = dict(text.partition("=")[::2] for text in options.settings)
    if unknown := set(given) - set(DEFAULTS):
        parser.error(f"{unknown.pop()} is not a key: use {', '.join(DEFAULTS)}")
    options.settings = DEFAULTS | given
    if options.worker:
        return worker(options)
    rows = []
    print("| type | degree | batch | tokens/s | transformers | ratio | MiB above the weights | transformers | cache, bytes per token |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for degree in options.settings["degrees"].split(","):
            file = Path(folder) / f"{degree}.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", degree, "-m"]
            command += ["benchmarks.decode", "--worker", "--json", str(file), *(["--compile"] if options.compile else [])]
            settings = [f"{key}={value}" for key, value in options.settings.items()]
            subprocess.run([*command, *settings], check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
            rows += json.loads(file.read_text())
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
