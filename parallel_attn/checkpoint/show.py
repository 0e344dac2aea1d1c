"""`parallel-attn checkpoint run=RUN`: lists checkpoints, verifies their checksums, shows what is inside."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_attn.checkpoint.folder import CHECKPOINTS, LATEST_FILE, Checkpoint, CheckpointFolder
from parallel_attn.checkpoint.index import INDEX_FILE, Index
from parallel_attn.errors import CheckpointError, SettingsError

DESCRIPTION = """\
Lists the checkpoints of a run, reads them to verify every checksum, and shows what is inside. RUN is a run folder or
one checkpoint (RUN/checkpoints/step-...). Exits with 1 when one is damaged."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="parallel-attn checkpoint", usage="parallel-attn checkpoint run=RUN [--json FILE]", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="run=RUN", help="a run folder or a checkpoint, as it stands")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    options = parser.parse_intermixed_args(list(arguments))
    try:
        found = [describe(path) for path in checkpoints_of(_run(options.settings))]
        if options.json:
            _write(Path(options.json), found)
    except (SettingsError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    for line in lines(found):
        print(line)
    return 1 if any(one["problem"] for one in found) else 0


def _run(settings: Sequence[str]) -> Path:
    given = dict(text.partition("=")[::2] for text in settings)
    unknown = [text for text in settings if not text.startswith("run=")]
    if unknown:
        raise SettingsError(f"{unknown[0]} is not a key of this command: use run=RUN")
    if not given.get("run"):
        raise SettingsError("run has no value: name a run folder or a checkpoint with run=RUN")
    path = Path(given["run"]).expanduser()
    if not path.is_dir():
        raise SettingsError(f"run={given['run']} is not a folder")
    return path


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoint folders that a path means, those set aside first. Raises SettingsError where there is none."""
    if (path / INDEX_FILE).exists() or path.name.startswith("step-"):
        return [path]
    for folder in (path / CHECKPOINTS, path):
        published = CheckpointFolder(folder).published()
        if published:
            return sorted(folder.glob("set-aside-*")) + published
    raise SettingsError(f"run={path} holds no checkpoints: name a run folder or a folder step-... in its {CHECKPOINTS}/")


def describe(path: Path) -> dict[str, Any]:
    """What is inside, as plain values; `problem` says what is damaged, None where all checksums hold."""
    known: dict[str, Any] = {"checkpoint": str(path), "problem": None}
    try:
        index = Index.read(path)
        known |= _contents(path, index)
        Checkpoint.open(path).verify()
    except CheckpointError as error:
        known["problem"] = str(error)
    return known


def _contents(path: Path, index: Index) -> dict[str, Any]:
    latest = path.parent / LATEST_FILE
    told = ("layout", "schedule", "data", "tokenizer", "progress", "choices", "config")
    return {
        "step": index.step,
        "finite": index.finite,
        "latest": latest.is_file() and latest.read_text().strip() == path.name,
        "parameters": index.parameters(),
        "bytes": index.total_bytes(),
        "files": {name: known["bytes"] for name, known in index.files.items()},
        "tensors": len(index.tensors),
        "moments": bool(index.names("exp_avg")),
        **{key: index.meta.get(key) for key in told},
    }


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the checkpoints, and of the last one that can be read what it holds."""
    rows = [("checkpoint", "state", "data x tensor", "engine", "precision", "files", "size")]
    for one in found:
        state = "damaged" if one["problem"] else "whole" if one["finite"] else "whole, not finite"
        row = (Path(one["checkpoint"]).name, state + (", latest" if one.get("latest") else ""))
        if "step" in one:
            layout = one["layout"] or {}
            degrees = f"{layout.get('data')} x {layout.get('tensor')}"
            row += (degrees, layout.get("engine", ""), layout.get("precision", ""))
            row += (str(len(one["files"])), _size(one["bytes"]))
        rows.append(row + ("",) * (len(rows[0]) - len(row)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    shown += [f"damaged: {one['problem']}" for one in found if one["problem"]]
    readable = [one for one in found if "step" in one]
    if readable:
        shown += _inside(readable[-1])
    return shown


def _inside(one: dict[str, Any]) -> list[str]:
    choices, data, schedule = one["choices"] or {}, one["data"], one["schedule"]
    chosen = ", ".join(f"{key}={choices[key]}" for key in ("model", "attention", "data", "tokenizer") if key in choices)
    best = one["progress"].get("best")
    return [
        f"{Path(one['checkpoint']).name}: step {one['step']:,} of {schedule['steps']:,}, next learning rate "
        f"{schedule['next_rate']:.3g}, {data['samples']:,} samples of {data['seq_len']} tokens seen",
        f"  {one['parameters']:,} parameters in float masters and {'two' if one['moments'] else 'no'} moments: "
        f"{one['tensors']} tensors"
        + (f"; {chosen}" if chosen else ""),
        *([f"  best validation loss {best['val/loss']:.4f} at step {best['step']:,}"] if best else []),
    ]


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _write(path: Path, content: Any) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written ({error.strerror})") from error
