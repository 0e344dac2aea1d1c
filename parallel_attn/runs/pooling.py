"""`parallel-attn convert run=...`: a run with other KV heads, MHA, GQA and MQA into each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from parallel_attn import costs
from parallel_attn.attention.grouped import default_kv_heads
from parallel_attn.attention.pooling import changed, is_by_kv_head, kv_heads_of, with_kv_heads
from parallel_attn.checkpoint import KINDS, Reader
from parallel_attn.data import EvalBatches, prepare_tokens
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup, Mesh
from parallel_attn.runs.command import Settings, write_json
from parallel_attn.runs.opened import OpenedRun, open_run
from parallel_attn.runs.written import check_out, write_run
from parallel_attn.training.evaluation import evaluate

LAYER = re.compile(r"(?:encoder\.)?layers\.\d+\.attention\.(.+)")
"""Self attention; a cross attention keeps its heads."""


def convert(settings: Settings) -> None:
    """The command, of one process. Raises SettingsError before anything is written."""
    moments = settings.choice("moments", ("pooled", "fresh"), "pooled")
    if settings.overrides:
        raise SettingsError(
            f"{settings.overrides[0]}: only the KV heads are converted (attention=mha, gqa or mqa, attention.num_kv_heads=N), "
            f"everything else stays as it is"
        )
    run = open_run(settings.text("run"))
    out = check_out(settings.text("out"))
    config, choices = run.config.attention.config, dict(run.meta.get("choices") or {})
    new_config = with_kv_heads(config, wanted_heads(settings, getattr(config, "num_heads", 1), choices.get("attention")))
    old, new = kv_heads_of(config), new_config.num_kv_heads
    if old == new:
        raise SettingsError(f"run={settings.text('run')} has {old} KV heads already: ask for another number")
    if not run.checkpoint.index.names("exp_avg"):
        moments = "fresh"  # an imported run has none
    kinds = KINDS if moments == "pooled" else ("master",)
    run.verify(prefix="" if moments == "pooled" else "master/")
    told: Counter[str] = Counter()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with Reader(run.checkpoint) as reader:
            for name, shape in run.checkpoint.index.names().items():
                inside = LAYER.fullmatch(name)
                by_head = inside is not None and is_by_kv_head(inside[1], config)
                told["changed" if by_head else "kept"] += 1
                for kind in kinds:
                    if f"{kind}/{name}" in run.checkpoint.index.tensors:
                        tensor = reader.slice(f"{kind}/{name}", (0,) * len(shape), shape)
                        yield f"{kind}/{name}", changed(tensor, old, new, kind) if by_head else tensor

    plain = dict(run.config.plain) | {"model": run.config.plain["model"] | {"vocab_size": run.config.model.vocab_size}}
    plain["attention"] = {"_target_": plain["attention"]["_target_"], **asdict(new_config)}
    meta = dict(run.meta) | {
        "choices": choices | choice_of(new, config.num_heads, choices.get("attention")),
        "updates": run.meta["updates"] if moments == "pooled" else 0,
        "progress": {"best": {}, "seconds": 0.0, "validated": None},
        "length": run.length,
        "from": {"run": str(run.checkpoint.folder), "step": run.checkpoint.step, "num_kv_heads": old},
    }
    tokenizer_text = run.tokenizer.to_json()
    checkpoint = write_run(out, plain, tensors(), tokenizer_text, meta)
    made = open_run(out, "out")
    how = f"means of {old // new}" if new < old else f"{new // old} copies of each"
    print(f"{checkpoint}: {old} KV heads -> {new}, {how}")
    print(f"  {told['changed']} parameters (keys and values) {'pooled' if new < old else 'repeated'}, {told['kept']} kept; "
          f"moments {'as well' if moments == 'pooled' else 'begin at zero'}, the schedule begins anew, the data goes on")  # fmt: skip
    numbers = {"kv_heads": [old, new], "out": str(out), "moments": moments} | compared(run, made)
    print(f"  python train.py checkpoint.resume={out} train.steps={max(1, run.checkpoint.step // 20)} schedule.warmup_steps=0")
    write_json(settings, numbers)


def wanted_heads(settings: Settings, heads: int, own: str | None) -> int:
    """KV heads that `attention` and `attention.num_kv_heads` ask for. own: the choice of the run, which may stay.

    Raises SettingsError for none and for a contradiction.
    """
    count = settings.number("attention.num_kv_heads", None)
    kind = settings.text("attention", "gqa" if count is not None else "")
    if not kind:
        raise SettingsError("attention is missing: give attention=mha, gqa or mqa, and attention.num_kv_heads=N")
    known = {"mha": heads, "mqa": 1, "gqa": count if count is not None else default_kv_heads(heads)}
    if own is not None:
        known.setdefault(own, known["gqa"])
    if kind not in known:
        raise SettingsError(f"attention={kind} is not one of: {', '.join(known)}")
    if count is not None and count != known[kind]:
        raise SettingsError(f"attention.num_kv_heads={count} is not {kind}, which has {known[kind]} of {heads} heads")
    return known[kind]


def choice_of(kv_heads: int, heads: int, own: str | None) -> dict[str, str]:
    """What the converted run is a choice of; a choice that says more than the number of KV heads (a gate) stays."""
    if own not in ("mha", "gqa", "mqa"):
        return {}
    return {"attention": "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"}


def compared(before: OpenedRun, after: OpenedRun) -> dict:
    """Parameters, cache and validation loss of two runs, printed and returned."""
    found: dict = {"parameters": [], "cache_bytes_per_token": []}
    for run in (before, after):
        model = run.build(AxisGroup())
        found["parameters"].append(costs.full_parameters(model))
        found["cache_bytes_per_token"].append(model.cache_elements_per_token() * run.compute_dtype.itemsize)
    for key, (old, new) in found.items():
        print(f"  {key.replace('_', ' ')}: {old:,} -> {new:,}")
    try:
        found["val/loss"] = [validation_loss(run) for run in (before, after)]
    except SettingsError as error:
        print(f"  validation loss: not measured ({error})")
        return found
    old, new = found["val/loss"]
    print(f"  validation loss: {old:.4f} -> {new:.4f} ({new - old:+.4f} nats per token), before any training")
    return found


def validation_loss(run: OpenedRun) -> float:
    """Of the run's own validation data, in this process. Raises SettingsError where the data cannot be read."""
    config, device = run.config, torch.device("cpu")
    corpus = config.data.cls(config.data.config)
    tokens = prepare_tokens(corpus, run.tokenizer, seq_len=config.train.seq_len, builder=True, progress=None)
    model = run.model(device=device)
    batches = EvalBatches(
        tokens.val, samples=config.eval.samples, seq_len=config.train.seq_len,
        micro_batch_size=min(8, config.train.global_batch_size), data_rank=0, data_degree=1,
        documents=config.data.config.documents, context=model.context_tokens(config.train.seq_len),
    )  # fmt: skip
    alone = Mesh(None, device, AxisGroup(), AxisGroup(), AxisGroup())  # no process group for one process
    return evaluate(model, batches, alone)["val/loss"]
