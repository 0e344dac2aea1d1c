"""`parallel-attn convert`: into a run folder, out of a folder of transformers or out of a run with other KV heads."""

from __future__ import annotations

from collections.abc import Sequence

from parallel_attn.errors import SettingsError
from parallel_attn.runs import importing, pooling
from parallel_attn.runs.command import Settings, usage
from parallel_attn.runs.command import run as run_command

DESCRIPTION = """\
Writes a run folder that train.py goes on with (checkpoint.resume=OUT) and generate reads.

  parallel-attn convert hf_model=DIR out=runs/imported                                   from transformers
  parallel-attn convert run=runs/a attention=gqa attention.num_kv_heads=2 out=runs/gqa   fewer KV heads, by mean pooling

hf_model: llama, qwen2, qwen3, qwen3_next and qwen3_5_text with full attention and dense layers, deepseek_v2 and deepseek_v3
with dense layers; safetensors in one or several files. run: MHA, GQA and MQA into each other; fewer heads are the means of
those that they stand for (Ainslie 2023), more are copies, exactly. Then a short training mends what pooling cost:

  python train.py checkpoint.resume=runs/gqa train.steps=30 schedule.warmup_steps=0"""
KEYS = {
    "hf_model": "a folder that transformers' save_pretrained wrote",
    "run": "a run folder (its newest checkpoint) or one of its checkpoints",
    "out": "the run folder to write; it must not be there yet",
    "attention": "with run: mha, gqa or mqa; and attention.num_kv_heads=N",
    "attention.num_kv_heads": "with run: KV heads to have; a divisor or a multiple of those there are",
    "moments": "with run: pooled (the default) or fresh: the optimizer's moments go along, or begin at zero",
    "tokenizer": "with hf_model: a tokenizer.json, or bytes; default: the folder's own",
    "tokenizer.end_of_text": "with hf_model: the token that ends a text, by name; default: what the folder's files say",
    "--json": "FILE: write the numbers there",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(convert, arguments, usage("convert", DESCRIPTION, KEYS))


def convert(arguments: Sequence[str]) -> None:
    settings = Settings(arguments, KEYS, others=True)
    settings.check_json()
    if ("hf_model" in settings.given) == ("run" in settings.given):
        raise SettingsError("convert reads hf_model=DIR or run=RUN: give one of them")
    source, other = (importing, ("attention", "attention.num_kv_heads", "moments"))
    if "run" in settings.given:
        source, other = (pooling, ("tokenizer", "tokenizer.end_of_text"))
    for key in other:
        if key in settings.given:
            wanted = "run" if source is importing else "hf_model"
            raise SettingsError(f"{key}={settings.text(key)} belongs to {wanted}=..., leave it out")
    source.convert(settings)
