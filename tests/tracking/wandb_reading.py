"""Reads a W&B offline run back: the `.wandb` file is a log of protobuf records in LevelDB's log format.

Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, with a 7-byte header (":W&B", magic 0xBEE1,
version) that counts into the first block. W&B 0.31 ships no Python reader any more.
"""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def wandb_records(file: Path):
    """The protobuf records of a `run-*.wandb` file, in order."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = _FILE_HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            position += left
            continue
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def offline_runs(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def read_run(folder: Path) -> SimpleNamespace:
    """`id`, `project`, `name`, `config` (nested), `history` (list of dicts), `metrics` and `exit_code` of a run."""
    (file,) = folder.glob("run-*.wandb")
    run = SimpleNamespace(id=None, project=None, name=None, group=None, tags=[])
    run.config, run.history, run.metrics, run.exit_code = {}, [], {}, None
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.project, run.name = record.run.run_id, record.run.project, record.run.display_name
            run.group, run.tags = record.run.run_group, list(record.run.tags)
            updates = record.run.config.update
        elif kind == "config":
            updates = record.config.update
        else:
            updates = ()
        for update in updates:
            if update.key and not update.key.startswith("_"):
                run.config[update.key] = json.loads(update.value_json)
        if kind == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            run.history.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run
