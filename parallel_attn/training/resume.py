"""What a job goes on from: decided by every rank from the files alone, before any collective."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from parallel_attn import checkpoint as checkpoints
from parallel_attn.checkpoint import Checkpoint
from parallel_attn.data import Tokenizer
from parallel_attn.errors import CheckpointError, SettingsError
from parallel_attn.training.config import Choice, Config, parse

TAKEN = ("model", "attention", "tokenizer")
"""Sections that a checkpoint brings with it; all others come from the command line."""
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from. `own`: run_dir's own, so that the run goes on in its folder and its W&B run."""

    checkpoint: Checkpoint
    own: bool
    given: str
    """`key=value` of the setting that names it, for messages."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def run_dir(self) -> Path:
        """The folder of the run that wrote it."""
        return self.checkpoint.folder.parent.parent

    @property
    def meta(self) -> dict[str, Any]:
        return self.checkpoint.index.meta

    def tokenizer(self, choice: Choice) -> Tokenizer:
        """As it was when the run began: a trained one is not trained again. Raises CheckpointError."""
        return choice.cls.from_json(self.checkpoint.text(TOKENIZER_FILE), self.meta["tokenizer"]["end_of_text"])

    def data_origin(self, fingerprint: str, seq_len: int, seed: int) -> tuple[int, int]:
        """(step, global sample index) at which data goes on; sample 0 where the order of samples is another one."""
        data = self.meta["data"]
        same = (data["fingerprint"], data["seq_len"], data["seed"]) == (fingerprint, seq_len, seed)
        return self.step, data["samples"] if same else 0


def find_resume(settings: str, run_dir: str | Path | None) -> Resume | None:
    """What `checkpoint.resume` and the run folder mean; None for a run that begins.

    settings: `checkpoint.resume`. run_dir: the folder of this run, where it is known already. A run that began from
    `checkpoint.resume=FOLDER` and has checkpoints of its own goes on from those: so the same command goes on.

    Raises SettingsError for a folder that is not there, CheckpointError for a checkpoint that is damaged.
    """
    explicit = settings not in ("auto", "never")
    given = f"checkpoint.resume={settings}"
    named = _named(settings) if explicit else None
    if settings == "never" or run_dir is None:
        return named and Resume(named, False, given)
    run_dir = Path(run_dir).expanduser()
    try:
        own = checkpoints.newest_in(run_dir)
    except CheckpointError:
        # A damaged newest checkpoint: whoever names another one in words, as the message offers, is heard.
        if named is None or not _inside(named.folder, run_dir):
            raise
        own = None
    if named is None:
        return own and Resume(own, True, f"run_dir={run_dir}")
    inside = _inside(named.folder, run_dir)
    if own is not None and own.step > named.step and own.index.meta["config"]["checkpoint"]["resume"] == settings:
        return Resume(own, True, f"run_dir={run_dir}")
    if own is not None and not inside:
        raise SettingsError(
            f"run_dir={run_dir} already holds a run that did not begin from {given}: name another folder, or leave "
            f"checkpoint.resume out to go on with it"
        )
    return Resume(named, inside, given)


def _named(path: str) -> Checkpoint:
    if not Path(path).expanduser().exists():
        raise SettingsError(f"checkpoint.resume={path} is not there: name auto, never, or a run or checkpoint folder")
    return checkpoints.find(path)


def _inside(folder: Path, run_dir: Path) -> bool:
    return folder.resolve().is_relative_to(run_dir.resolve())


def take_over(raw: DictConfig | dict, config: Config, resume: Resume, overrides: Sequence[str]) -> DictConfig:
    """`raw` with model, attention and tokenizer of the checkpoint.

    overrides: what stood on the command line. Raises SettingsError for one that contradicts the checkpoint, and where
    run_dir's own run is another model than the whole configuration says.
    """
    saved = resume.meta["config"]
    merged = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(raw), resolve=True))
    for section in TAKEN:
        merged[section] = saved[section]
    if config.checkpoint.resume == "auto":
        _require_same(config, parse(merged), resume)
    else:
        _refuse_contradictions(overrides, config.plain, resume)
    return merged


def choices_after(choices: Mapping[str, str], resume: Resume | None) -> dict[str, str]:
    """Hydra's choices (group -> choice) of a job: those of what a checkpoint brings are the checkpoint's, as far as it
    knows them, whatever this command line says by default."""
    if resume is None:
        return dict(choices)
    saved = resume.meta.get("choices") or {}
    kept = {group: choice for group, choice in choices.items() if _section(group) not in TAKEN}
    return kept | {group: choice for group, choice in saved.items() if _section(group) in TAKEN}


def _section(key: str) -> str:
    return re.split(r"[.@/]", key)[0]


def _require_same(mine: Config, saved: Config, resume: Resume) -> None:
    for section in TAKEN:
        pair = []
        for config in (mine, saved):
            choice = getattr(config, section)
            chosen = isinstance(choice, Choice)
            target = {"_target_": f"{choice.cls.__module__}.{choice.cls.__qualname__}"} if chosen else {}
            pair.append(_leaves(target | asdict(choice.config if chosen else choice)))
        for leaf, value in pair[0].items():
            theirs = pair[1].get(leaf)
            if value != theirs and (section, leaf, value) != ("model", "vocab_size", None):
                raise SettingsError(
                    f"{section}.{leaf}={value}: the run in {resume.given} has {theirs} and goes on with it; "
                    f"name another run_dir for another model"
                )


def _refuse_contradictions(overrides: Sequence[str], plain: Mapping, resume: Resume) -> None:
    saved, choices = resume.meta["config"], resume.meta.get("choices") or {}
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        section = _section(key)
        if section not in TAKEN:
            continue
        if "." not in key.partition("@")[0] and choices.get(key) is not None:
            mine, theirs = text.partition("=")[2], choices[key]
        else:
            mine, theirs = _at(plain, key), _at(saved, key)
            if key == "model.vocab_size" and mine is None:
                continue
        if mine != theirs:
            shown = theirs if not isinstance(theirs, dict) else "other settings"
            raise SettingsError(
                f"{text} contradicts {resume.given}, whose {section} has {key}={shown}: model, attention and tokenizer "
                f"come from the checkpoint, leave it out"
            )


def _leaves(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _at(tree: Mapping, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree
