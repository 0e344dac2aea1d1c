"""Where documents begin and end in a batch, and how many bytes of text its targets stand for."""

import json

import numpy as np
import pytest
import torch

from parallel_attn.data import IGNORE, ByteTokenizer, EvalBatches, FileTokenizer, TokenFile, TrainBatches, encode
from tests.data.helpers import all_tokens, prepare
from tests.data.test_text_tokenizers import prose
from tests.data.tokenizer_files import ENDS, kinds

S, END = 6, 9


@pytest.fixture
def tokens(tmp_path):
    """Three samples of 6; 9 ends a document."""
    ids = [1, 2, 9, 3, 9, 4, 5, 9, 9, 6, 7, 8, 1, 1, 1, 1, 1, 9, 2]
    np.array(ids, dtype="<u2").tofile(tmp_path / "tokens.bin")
    return TokenFile(str(tmp_path / "tokens.bin"), "<u2", len(ids), "", vocab_size=10, end_of_text=END)


EXPECTED = {
    (1, 2, 9, 3, 9, 4): [0, 0, 0, 1, 1, 2],  # an end of text belongs to the document it closes
    (5, 9, 9, 6, 7, 8): [0, 0, 1, 2, 2, 2],
    (1, 1, 1, 1, 1, 9): [0, 0, 0, 0, 0, 0],
}


def batches(tokens, **more):
    common = {"seq_len": S, "micro_batch_size": 2, "data_rank": 0, "data_degree": 1, **more}
    train = TrainBatches(tokens, global_batch_size=6, seed=0, **common)
    return [*train.step(0), *train.step(1)], list(EvalBatches(tokens, samples=9, **common))


def test_document_ids(tokens):
    for found in batches(tokens, documents=True):
        seen = set()
        for batch in found:
            assert batch.document_ids.dtype == torch.int64 and batch.document_ids.shape == batch.tokens.shape
            for row, ids, targets in zip(batch.tokens, batch.document_ids, batch.targets, strict=True):
                if (targets == IGNORE).all():
                    continue
                assert ids.tolist() == EXPECTED[tuple(row.tolist())]
                seen.add(tuple(row.tolist()))
        assert seen == set(EXPECTED)


def test_without_documents(tokens):
    for found in batches(tokens):
        assert all(batch.document_ids is None for batch in found)


def test_documents_need_an_end(tokens):
    tokens.end_of_text = None
    with pytest.raises(ValueError, match="do not say which id ends a text"):
        batches(tokens, documents=True)


def test_document_ids_of_real_tokens(tmp_path):
    texts = [f"text {i}" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    splits = prepare(tmp_path / "a.jsonl", tmp_path / "cache")
    (batch,) = EvalBatches(
        splits.val, seq_len=20, samples=1, micro_batch_size=1, data_rank=0, data_degree=1, documents=True
    )
    row, ids = batch.tokens[0], batch.document_ids[0]
    assert [ByteTokenizer().decode(row[ids == document]) for document in range(3)] == [b"text 19", b"text 39", b"text"]


def test_batches_move_with_all_they_have(tokens):
    batch = batches(tokens, documents=True)[0][0]
    assert batch.to(torch.device("cpu")) is batch and batch.target_bytes is None


@pytest.mark.parametrize("kind", ["bytes", *kinds()])
@pytest.mark.parametrize("split", ["tail", "own"])
def test_bytes_of_the_targets(tmp_path, kind, split):
    """Their sum over the whole validation text is its size, whatever the tokenizer makes of it and however it is
    cut."""
    tokenizer = (
        ByteTokenizer() if kind == "bytes" else FileTokenizer(kinds()[kind], label="x", end_of_text=ENDS.get(kind))
    )
    text = "  " + prose(9000) + " \n\n e\u0301 ﬁ   "
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "v.txt").write_text(text[:4000])
    splits = prepare(
        tmp_path / "a.txt", tmp_path / "cache", tmp_path / "v.txt" if split == "own" else None, tokenizer=tokenizer
    )
    size = len(text[:4000].encode()) if split == "own" else pytest.approx(len(text.encode()) // 20, abs=3)
    counts = splits.val.read_bytes(0, splits.val.count)
    assert counts.sum() == size and counts[-1] == 0  # the end of text stands for none
    length = 16
    replicas = [
        EvalBatches(splits.val, seq_len=length, samples=10**6, micro_batch_size=3, data_rank=rank, data_degree=2)
        for rank in range(2)
    ]
    total = 0
    for batch in (batch for replica in replicas for batch in replica):
        assert batch.target_bytes.dtype == torch.int64 and batch.target_bytes.shape == batch.targets.shape
        assert (batch.target_bytes[batch.targets == IGNORE] == 0).all()
        total += int(batch.target_bytes.sum())
    seen = replicas[0].num_samples * length
    assert total == counts[1 : seen + 1].sum() and seen >= splits.val.count - 1 - length


@pytest.mark.parametrize("task_bytes", [1, 10, 10**6])
def test_bytes_that_no_token_stands_for(tmp_path, monkeypatch, task_bytes):
    """White space that a tokenizer drops is text all the same, also where a whole document is nothing else."""
    monkeypatch.setattr(encode, "TASK_BYTES", task_bytes)
    texts = ["word", "    ", "more words", "  \n ", "   ", "end  "]
    (tmp_path / "v.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "a.jsonl").write_text('{"text": "the lazy dog jumps"}\n' * 3)
    tokenizer = FileTokenizer(kinds()["bert"], label="x", end_of_text="[SEP]")
    val = prepare(tmp_path / "a.jsonl", tmp_path / "cache", tmp_path / "v.jsonl", tokenizer=tokenizer, seq_len=4).val
    assert val.read_bytes(0, val.count).sum() == sum(map(len, texts))


def test_validation_text_is_the_same_for_all(tmp_path):
    """Bits per byte compare only where every tokenizer is measured on the same bytes."""
    (tmp_path / "a.txt").write_text(prose(20_000))
    texts = set()
    for kind in ("bytes", "byte level", "llama"):
        tokenizer = ByteTokenizer() if kind == "bytes" else FileTokenizer(kinds()[kind], label="x")
        val = prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=tokenizer).val
        texts.add((tokenizer.decode(all_tokens(val)), int(val.read_bytes(0, val.count).sum())))
    ((text, size),) = texts
    assert prose(20_000).encode().endswith(text) and size == len(text) > 900
