"""`parallel-attn verify`: a certificate that this configuration trains the same when it is sharded."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from parallel_attn import costs
from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup
from parallel_attn.planning import mutants
from parallel_attn.planning.certificate import SUBJECTS, Outcome, certify, subjects_of
from parallel_attn.planning.parity import bounds_of
from parallel_attn.planning.processes import RankFailed, run_world
from parallel_attn.planning.report import heading, table, verdict
from parallel_attn.planning.subjects import LENGTH, PRECISIONS, Subject, cut
from parallel_attn.training.config import Config, parse, plain_config
from parallel_attn.training.exits import FAILED_EXIT, SETTINGS_EXIT
from parallel_attn.training.overrides import compose_checked
from parallel_attn.training.pretrain import versions

DEFAULT_DEGREE = 2
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS}
DESCRIPTION = """\
Proves on this machine that a configuration trains the same when its attention is sharded: starts parallel.tensor
processes over gloo, builds the attention layer and the whole model on them and on one process, and compares what
training uses: output, input gradient, every parameter gradient, gradient norm, weights after three optimizer steps,
initial weights, copies of weights (bitwise).

  parallel-attn verify attention=mqa parallel.tensor=4
  parallel-attn verify attention=gqa attention.num_heads=6 attention.head_dim=16 parallel.tensor=4 --dtype float32
  parallel-attn verify attention=mha --mutate output_not_summed     a mistake made on purpose: must turn it red
"""
EPILOG = """\
exit code: 0 all errors are within their bounds, 1 some are not (or a process failed), 2 settings that cannot work.

Widths and heads are the configuration's. Batch, length, depth and vocabulary are cut, as the output says: no collective
depends on them (a window or a query block longer than the 24 tokens is the kernels' matter, and their tests'). An error is the largest difference as a share of the largest element of its tensor. In
float64 anything beyond 1e-10 is a bug; look there first. `parallel-attn train --help` lists the keys.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"parallel-attn verify: {message}; `parallel-attn verify --help` shows what it takes")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="parallel-attn verify",
        usage="parallel-attn verify [KEY=VALUE ...] [--dtype DTYPE] [--part PART] [--mutate NAME] [--json FILE]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: attention=mqa parallel.tensor=4"
    )
    made.add_argument(
        "--dtype", help=f"{', '.join(DTYPES)} (bf16 compute, float32 weights); default float64, or train.precision's"
    )
    made.add_argument("--part", default="all", help="layer, cross (of an encoder-decoder), model, or all (the default)")
    made.add_argument("--mutate", metavar="NAME", help="drop or double one reduction on purpose; `list` names them")
    made.add_argument(
        "--json", metavar="FILE", help="write everything there: configuration, versions, bounds, all errors"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        options = parser().parse_intermixed_args(list(arguments))
        if options.mutate == "list":
            print(mutants.listing())
            return 0
        return 0 if run(options) else FAILED_EXIT
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return SETTINGS_EXIT
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED_EXIT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - whatever it was, it is told in full and the exit code is not that of a verdict
        traceback.print_exc()
        return FAILED_EXIT


def run(options: argparse.Namespace) -> bool:
    """The certificate of one configuration, printed (and written); whether all holds."""
    if options.mutate is not None:
        mutants.find(options.mutate)
    check_writable(options.json)
    parts = chosen_parts(options.part)
    config, notes = configuration(options.overrides, options.dtype)
    dtype = next(dtype for dtype, precision in PRECISIONS.items() if precision == config.train.precision)
    degree = config.parallel.tensor
    on_paper = AxisGroup(None, 0, degree)
    subjects = subjects_of(config, parts, "meta")
    parts = [subject.name for subject in subjects]
    if not parts:
        raise SettingsError(f"--part {options.part}: this model has no cross attention (model=encoder_decoder does)")
    built = [build_on_paper(subject, parts, on_paper) for subject in subjects]
    for note in notes:
        print(f"note: {note}")
    print(heading(config, dtype, subjects, built), flush=True)
    start = time.monotonic()
    outcomes = run_world(degree, certify, config, parts, options.mutate)
    seconds = time.monotonic() - start
    bounds = {part: bounds_of(dtype, part) for part in parts}
    failures = {part: outcome.parity.failures(bounds[part]) for part, outcome in outcomes.items()}
    holds = not any(failures.values())
    print("\n" + table(outcomes, bounds, failures))
    print(verdict(outcomes, failures, dtype, options.mutate, seconds))
    if options.json:
        record = certificate_record(config, dtype, outcomes, bounds, failures, options.mutate, subjects, built)
        write(options.json, record | {"seconds": round(seconds, 2)})
    return holds


def build_on_paper(subject: Subject, parts: Sequence[str], axis: AxisGroup) -> Any:
    """The module without memory: every refusal of a layer or a model comes here, before any process is started."""
    try:
        return subject.build(axis)
    except SettingsError as error:
        if subject.name == "model" and "layer" in parts:  # the layer alone has just been built
            raise SettingsError(f"{error} (--part layer verifies the layer alone)") from error
        raise


def chosen_parts(wanted: str) -> list[str]:
    if wanted not in (*SUBJECTS, "all"):
        raise SettingsError(f"--part {wanted} is not one of: {', '.join([*SUBJECTS, 'all'])}")
    return list(SUBJECTS) if wanted == "all" else [wanted]


def configuration(overrides: Sequence[str], dtype_name: str | None) -> tuple[Config, list[str]]:
    """The configuration that the overrides compose, cut for a certificate, and what a user should know of the cuts."""
    if dtype_name is not None and dtype_name not in DTYPES:
        raise SettingsError(f"--dtype {dtype_name} is not one of: {', '.join(DTYPES)}")
    for argument in overrides:
        if "=" not in argument and not argument.startswith("~"):
            raise SettingsError(
                f"{argument}: not KEY=VALUE, nor an option; `parallel-attn verify --help` shows what it takes"
            )
    config, notes = parse(compose_checked(list(overrides))), []
    if not any(argument.lstrip("+").startswith("parallel.tensor=") for argument in overrides):
        notes.append(
            f"parallel.tensor is not given: {DEFAULT_DEGREE} ranks; any degree up to the heads: parallel.tensor=N"
        )
        config.parallel.tensor = DEFAULT_DEGREE
    degree = config.parallel.tensor
    if degree < 2:
        raise SettingsError(f"parallel.tensor={degree}: one rank leaves nothing to compare, use 2 or more")
    if config.parallel.data not in (None, 1):
        raise SettingsError(f"parallel.data={config.parallel.data}: a certificate is about one replica, leave it out")
    if config.device == "cuda":
        raise SettingsError("device=cuda: the certificate is made on the CPU over gloo, use device=cpu or leave it out")
    given = any(argument.lstrip("+").startswith("train.precision=") for argument in overrides)
    dtype = DTYPES[dtype_name] if dtype_name else torch.float64
    if given:
        said = next(dtype for dtype, precision in PRECISIONS.items() if precision == config.train.precision)
        if dtype_name and said != dtype:
            raise SettingsError(f"train.precision={config.train.precision} and --dtype {dtype_name} disagree: give one")
        dtype = said
    window = getattr(config.attention.config, "window", None)
    if window is not None and window >= LENGTH:
        notes.append(f"attention.window={window} reaches beyond the {LENGTH} tokens that are compared")
    made = cut(config, dtype)
    if made.model.num_layers < config.model.num_layers:
        notes.append(f"model.num_layers={config.model.num_layers} is cut to {made.model.num_layers}")
    if made.model.vocab_size != config.model.vocab_size and config.model.vocab_size is not None:
        notes.append(f"model.vocab_size={config.model.vocab_size} is cut to {made.model.vocab_size}")
    return made, notes


def check_writable(file: str | None) -> None:
    """Raises SettingsError when `file` could not be written, before the work is done; leaves nothing behind."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise SettingsError(f"--json {file} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise SettingsError(f"--json {file}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SettingsError(f"--json {file} cannot be written: permission denied")


def certificate_record(
    config: Config,
    dtype: torch.dtype,
    outcomes: dict[str, Outcome],
    bounds: dict[str, dict[str, float]],
    failures: dict[str, dict[str, str]],
    mutate: str | None,
    subjects: Sequence[Subject],
    built: Sequence[Any],
) -> dict:
    """Everything, for the JSON file. Errors that are not finite are the string "inf"."""
    parts = {}
    for subject, module in zip(subjects, built):
        outcome = outcomes[subject.name]
        parts[subject.name] = {
            "what": subject.what,
            "parameters": costs.full_parameters(module),
            "bounds": bounds[subject.name],
            "errors": outcome.parity.errors,
            "parameter_gradients": outcome.parity.gradients,
            "parameter_weights": outcome.parity.weights,
            "copies_unequal": outcome.parity.unequal,
            "mutant_hits": outcome.hits if mutate else None,
            "failures": failures[subject.name],
        }
    return {
        "holds": not any(failures.values()),
        "dtype": str(dtype).removeprefix("torch."),
        "degree": config.parallel.tensor,
        "attention": config.attention.cls.__name__,
        "mutate": mutate,
        "parts": parts,
        "config": plain_config(config),
        "versions": versions(),
    }


def write(file: str, record: dict) -> None:
    """The whole file or none of it."""
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(_finite(record), indent=2, allow_nan=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return "inf" if value == float("inf") else value
