"""Corpora and tokenizers through a whole job: what a run does with them at several layouts."""

import gzip
import json
import math

import pytest

from parallel_attn import SettingsError
from parallel_attn.training import pretrain
from tests.training.composed import SMALL, composed, records
from tests.world import run

WORDS = "the quick brown fox jumps over the lazy dog while seven wizards watch from a distant tower".split()


@pytest.fixture()
def corpus(tmp_path):
    """A folder of mixed formats: .jsonl.gz with a field of its own, and .txt."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"body": " ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 30))}) for i in range(1, 400)]
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    for name in ("b", "c"):
        (folder / f"{name}.txt").write_text(" ".join(WORDS * 60))
    return folder


def train_case(overrides: list[str]) -> None:
    pretrain(composed(*SMALL, *overrides))


def trained(size: int, run_dir, *overrides: str) -> dict:
    run(size, train_case, [f"run_dir={run_dir}", *overrides], timeout=100)
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize("documents", ["false", "true"])
def test_bpe_on_a_mixed_folder_is_the_same_at_every_layout(tmp_path, corpus, documents):
    settings = (
        "data=text", f"data.path={corpus}", "data.field=body", f"data.documents={documents}", "tokenizer=bpe",
        "tokenizer.vocab_size=301", "train.precision=fp64", "train.steps=5", "train.log_every=1", "eval.samples=7",
    )  # fmt: skip
    alone = trained(1, tmp_path / "alone", *settings)
    four = trained(4, tmp_path / "four", *settings, "parallel.tensor=2", "train.micro_batch_size=2")
    for name in ("alone", "four"):
        assert len([record for record in records(tmp_path / name) if "train/loss" in record]) == 5
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/bits_per_byte"):
        assert four[key] == pytest.approx(alone[key], rel=1e-9), key
    assert alone["data_fingerprint"] == four["data_fingerprint"] and alone["tokenizer"] == "bpe"
    assert alone["val/bits_per_byte"] < alone["val/loss"] / math.log(2), "a token stands for more than a byte"


def test_documents_change_what_a_token_sees(tmp_path, corpus):
    settings = ("data=text", f"data.path={corpus}", "data.field=body", "train.steps=2", "eval.every=0", "train.log_every=1")
    losses = [
        [record["train/loss"] for record in records(tmp_path / value)]
        for value in ("true", "false")
        if trained(1, tmp_path / value, *settings, f"data.documents={value}")
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        pretrain(composed(*SMALL, *overrides))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_bad_input_is_named(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ("data=text", f"data.path={corpus}")
    message = refusal(*text, "data.field=nope")
    assert "nope" in message and "body" in message and "a.jsonl.gz" in message
    (corpus / "broken.jsonl.gz").write_bytes((corpus / "a.jsonl.gz").read_bytes()[:-40])
    assert "broken.jsonl.gz" in refusal(*text, "data.field=body")
    (corpus / "broken.jsonl.gz").unlink()
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    message = refusal(*text, "data.field=body", "tokenizer=bpe", "tokenizer.vocab_size=300")
    assert "latin.txt" in message and "3" in message
    assert "tokenizer.path" in refusal(*text, "tokenizer=file")
    assert "nowhere.json" in refusal(*text, "tokenizer=file", "tokenizer.path=nowhere.json")
    (corpus / "latin.txt").unlink()
    message = refusal(*text, "data.field=body", "tokenizer=bpe", "tokenizer.vocab_size=300", "model.vocab_size=100")
    assert message == "model.vocab_size=100 is less than the 300 tokens of the tokenizer: use 300"


@pytest.mark.parametrize("preset", ["fineweb_edu", "tinystories", "wikitext103", "openwebtext"])
def test_presets_of_the_hub_say_when_it_cannot_be_reached(preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = composed(f"data={preset}", f"data.cache_dir={tmp_path}")
    message = refusal(f"data={preset}", f"data.cache_dir={tmp_path}")
    assert config.data.name in message and "reach" in message
