"""`parallel-attn generate`: prompts continued by the model of a run, at any degree."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from parallel_attn import mesh as meshes
from parallel_attn.checkpoint import Exchange
from parallel_attn.errors import CheckpointError, Interrupted, SettingsError, keys_renamed
from parallel_attn.mesh import AxisGroup, Mesh
from parallel_attn.models import Sampling, generate
from parallel_attn.models.generation import room
from parallel_attn.runs.command import Settings, usage, write_json
from parallel_attn.runs.opened import OpenedRun, open_run
from parallel_attn.runs.stream import TextStream, text_after
from parallel_attn.training import exits
from parallel_attn.training.signals import Signals

DESCRIPTION = """\
Continues a prompt with the model of a run, token by token out of a cache. Works on any run, and on what `convert` wrote.

  parallel-attn generate run=runs/a prompt="def main(" max_new_tokens=200
  parallel-attn generate run=runs/a prompt=A prompt=B temperature=0.8 top_p=0.95 seed=1      two prompts, one batch
  torchrun --standalone --nproc-per-node 2 -m parallel_attn.cli generate run=runs/a prompt=A parallel.tensor=2

A prompt may hold any character. The text goes to stdout, numbers to stderr. The same seed gives the same tokens at every
degree. Prompts are dealt out over replicas (parallel.data). An encoder-decoder reads the prompt up to its last token with
the encoder."""
KEYS = {
    "run": "a run folder (its newest checkpoint) or one of its checkpoints",
    "prompt": "the text to go on from; several times: several prompts",
    "prompt_file": "a file that holds a prompt, to its last byte; -: standard input",
    "max_new_tokens": "tokens to come, at most (128); it ends earlier at an end of text or at the model's longest sequence",
    "temperature": "0 (the default): greedy; above: random, the higher the more",
    "top_k": "only the k likeliest tokens; 0 (the default): all",
    "top_p": "only the likeliest tokens that make up this probability; 1 (the default): all",
    "seed": "of the randomness (0)",
    "parallel.tensor": "ranks that share the model; default: all processes / parallel.data",
    "parallel.data": "replicas (1, or what parallel.tensor leaves)",
    "device": "auto, cpu or cuda (auto)",
    "dtype": "float32, bfloat16 or float64; default: the run's",
    "compile": "true: torch.compile, for many tokens: faster each, after up to a minute once (false)",
    "--json": "FILE: write prompts, tokens, texts and numbers there",
}
HELP = usage("generate", DESCRIPTION, KEYS)
STDIN = ("-", "/dev/stdin")
REPLICAS_WAIT = timedelta(days=7)
"""How long a replica that has ended waits for one that goes on."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Job:
    """What every rank has made ready on its own, before the first collective."""

    settings: Settings
    run: OpenedRun
    texts: list[str]
    prompts: list[list[int]]
    sampling: Sampling
    max_new_tokens: int
    dtype: torch.dtype | None
    compiled: bool
    device: torch.device
    data: int
    tensor: int


def main(arguments: Sequence[str]) -> None:
    """Runs the command on every rank; leaves the process with 0, 1 (failed), 2 (settings), 130 (Ctrl-C) or 143 (SIGTERM)."""
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        sys.exit(0 if arguments else exits.SETTINGS_EXIT)
    try:
        with Signals() as signals:
            job = prepare(arguments)
            with signals.peers_expected():
                mesh = meshes.start(job.device, tensor=job.tensor, data=job.data)
                work(job, mesh)
                meshes.shutdown()
    except (SettingsError, CheckpointError) as error:
        exits.leave_with_line(error)
    except Interrupted as error:  # what was told stays: every token was flushed
        exits.leave_interrupted(error)
    except BrokenPipeError:  # whoever read the text has seen enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:  # whatever it was, this rank tells it in full and the others are not left waiting
        exits.leave_with_traceback(error)


def prepare(arguments: Sequence[str]) -> Job:
    """All checks, without a collective. Raises SettingsError, CheckpointError."""
    settings = Settings(arguments, KEYS, repeated=("prompt", "prompt_file"))
    settings.check_json()
    rank, local_rank, world = meshes.launcher_ranks()
    tensor, data = settings.number("parallel.tensor", None), settings.number("parallel.data", None)
    for key, value in (("parallel.tensor", tensor), ("parallel.data", data)):
        if value is not None and value < 1:
            raise SettingsError(f"{key}={value} must be at least 1")
    if tensor is None:
        tensor = world // data if data else world
    data, tensor = meshes.layout(world, tensor, data)
    device = meshes.choose_device(settings.text("device", "auto"), local_rank)
    top_p = settings.number("top_p", 1.0, float)
    sampling = Sampling(
        settings.number("temperature", 0.0, float) or 0.0,
        settings.number("top_k", 0) or 0,
        1.0 if top_p is None else top_p,
        settings.number("seed", 0) or 0,
    )
    most = settings.number("max_new_tokens", 128)
    if most is None or most < 0:
        raise SettingsError(f"max_new_tokens={'null' if most is None else most} must be 0 or more")
    dtype = DTYPES[settings.choice("dtype", list(DTYPES), "float32")] if "dtype" in settings.given else None
    compiled = settings.choice("compile", ("true", "false"), "false") == "true"
    run = open_run(settings.text("run"))
    model = run.build(AxisGroup(None, rank % tensor, tensor))
    texts = prompts_of(settings)
    prompts = [encoded(run, text) for text in texts]
    sampling.check_vocabulary(run.tokenizer.vocab_size)
    for text, prompt in zip(texts, prompts):
        with keys_renamed({"prompt:": f"prompt={text[:40]!a}:"}):
            room(model, [prompt], run.length, run.tokenizer.vocab_size)
    return Job(settings, run, texts, prompts, sampling, most, dtype, compiled, device, data, tensor)


def prompts_of(settings: Settings) -> list[str]:
    """Raises SettingsError where there is none, or an empty one."""
    texts = settings.texts("prompt")
    for path in settings.texts("prompt_file"):
        stream = path in STDIN or (Path(path).exists() and not Path(path).is_file())
        if stream and meshes.launcher_ranks()[2] > 1:
            raise SettingsError(f"prompt_file={path}: several processes cannot share it, give prompt=TEXT or a file")
        try:
            content = sys.stdin.buffer.read() if path == "-" else Path(path).expanduser().read_bytes()
            texts.append(content.decode("utf-8", "surrogateescape"))
        except OSError as error:
            raise SettingsError(f"prompt_file={path} cannot be read ({error.strerror})") from error
    if not texts:
        raise SettingsError("prompt is missing: give prompt=TEXT or prompt_file=FILE")
    if "" in texts:
        raise SettingsError("prompt is empty: give at least one character to go on from")
    return texts


def encoded(run: OpenedRun, text: str) -> list[int]:
    """Token ids of a prompt. Raises SettingsError for characters that the tokenizer lacks."""
    content = text.encode("utf-8", "surrogateescape")
    shown = ascii(text[:40])
    try:
        ids = run.tokenizer.encode(content).tolist()
        lacking = run.tokenizer.lacks(text) if content.isascii() or _is_utf8(content) else None
    except ValueError as error:  # SettingsError too: the tokenizer says what it cannot encode
        raise SettingsError(f"prompt={shown} cannot be encoded: {error}") from error
    if lacking is not None:
        number = f" (U+{ord(lacking):04X})" if len(lacking) == 1 else ""
        raise SettingsError(f"prompt={shown} holds {lacking!r}{number}, which the tokenizer of the run lacks: leave it out")
    if not ids:
        raise SettingsError(f"prompt={shown} gives no token: give at least one character that the tokenizer keeps")
    return ids


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def work(job: Job, mesh: Mesh) -> None:
    """The part that all ranks do together: each replica its prompts, the first one streaming a single one."""
    results = Exchange(mesh.world, "generated", REPLICAS_WAIT)
    job.run.verify(mesh)
    model = job.run.model(mesh.tensor, mesh.device, job.dtype)
    tokenizer = job.run.tokenizer
    mine = range(mesh.data.rank, len(job.prompts), mesh.data.degree)
    streaming = mesh.is_main and len(job.prompts) == 1
    stream = TextStream(tokenizer, job.prompts[0]) if streaming else None
    if streaming:
        show(job.texts[0])

    def on_tokens(tokens: list[int | None]) -> None:
        if tokens[0] is not None:
            show(stream.feed(tokens[0]))

    began = time.perf_counter()
    try:
        made = generate(
            model,
            [job.prompts[i] for i in mine],
            seq_len=job.run.length,
            max_new_tokens=job.max_new_tokens,
            sampling=job.sampling,
            end_of_text=tokenizer.end_of_text,
            vocab_size=tokenizer.vocab_size,
            numbers=list(mine),
            on_tokens=on_tokens if streaming else None,
            compiled=job.compiled,
        )
    finally:  # also when a signal ends it
        if streaming:
            show(stream.end() + "\n")
    seconds = time.perf_counter() - began
    first = mesh.tensor.rank == 0
    report = {
        "rows": [[i, c.tokens, c.reason] for i, c in zip(mine, made.continuations)] if first else [],
        "seconds": seconds,
        "cache_bytes": made.cache_bytes,
        "cache_bytes_per_token": made.cache_bytes_per_token,
    }
    tell(job, mesh, results.gather(report), shown=streaming)


def tell(job: Job, mesh: Mesh, reports: list[dict], *, shown: bool) -> None:
    """On the first rank: texts that were not streamed, the numbers, and the file of --json."""
    if not mesh.is_main:
        return
    rows = sorted(row for report in reports for row in report["rows"])
    results = []
    for number, tokens, reason in rows:
        text = text_after(job.run.tokenizer, job.prompts[number], tokens)
        if not shown:
            if len(rows) > 1:
                show(f"--- prompt {number + 1}: {reason}\n")
            show(job.texts[number] + text + "\n")
        results.append({"prompt": job.texts[number], "text": text, "tokens": tokens, "reason": reason})
    count, seconds = sum(len(row[1]) for row in rows), max(report["seconds"] for report in reports)
    caches = {key: max(report[key] for report in reports) for key in ("cache_bytes", "cache_bytes_per_token")}
    reasons = " and ".join(dict.fromkeys(row[2] for row in rows))
    speed = f" in {seconds:.2f} s ({count / seconds:,.0f} tokens/s)" if seconds > 0 else ""
    cache = f"{caches['cache_bytes_per_token']:,.0f} bytes per token and rank"
    print(f"{count} tokens{speed}, stopped at: {reasons}; cache: {cache}", file=sys.stderr)
    if any(row[2] == "length" for row in rows):
        length = job.run.length
        print(f"note: the model was trained on sequences of {length} tokens: no more came out", file=sys.stderr, flush=True)
    numbers = {"seconds": seconds, "tokens": count, "tokens_per_second": count / max(seconds, 1e-9), **caches}
    layout = {"tensor": mesh.tensor.degree, "data": mesh.data.degree, "step": job.run.checkpoint.step}
    write_json(job.settings, {"results": results, **numbers, **layout, "sampling": vars(job.sampling)})


def show(text: str) -> None:
    """On stdout at once, whatever its encoding can say. Raises BrokenPipeError where nobody reads on and no rank waits."""
    if not text:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        if meshes.launcher_ranks()[2] == 1:
            raise
        sys.stdout = open(os.devnull, "w")  # the other ranks would take an end for a loss
