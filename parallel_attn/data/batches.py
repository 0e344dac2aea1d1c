"""Batches for training and evaluation, cut from a token file by global sample index.

Shapes: B rows of a micro batch, S = seq_len.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parallel_attn.data.order import SampleOrder
from parallel_attn.data.tokens import TokenFile, sample_count
from parallel_attn.errors import SettingsError

IGNORE = -100  # a target that does not count


@dataclass
class Batch:
    """One micro batch, all [B, S] int64.

    targets: the token after each one; IGNORE: none. samples [B]: index of each sample in the run. document_ids: which document of its row a token belongs to, from 0;
    an end of text belongs to the document it closes. None: attention does not stop at documents. target_bytes: bytes of
    text behind each target, 0 where it is ignored or special; bits per byte divides by their sum. None: training.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    document_ids: torch.Tensor | None = None
    target_bytes: torch.Tensor | None = None
    samples: torch.Tensor | None = None

    def given(self) -> dict[str, torch.Tensor | None]:
        """What a model's forward takes beside tokens and targets."""
        return {"document_ids": self.document_ids, "samples": self.samples}

    def to(self, device: torch.device) -> Batch:
        """The same on a device; to CUDA from pinned memory, without waiting."""
        if device.type == "cpu":
            return self
        parts = (self.tokens, self.targets, self.document_ids, self.target_bytes, self.samples)
        return Batch(*(p if p is None else p.pin_memory().to(device, non_blocking=True) for p in parts))


def read_batch(
    tokens: TokenFile,
    samples: np.ndarray,
    seq_len: int,
    rows: int | None = None,
    *,
    documents: bool = False,
    count_bytes: bool = False,
    context: int = 0,
) -> Batch:
    """The given samples as one Batch; rows beyond them are padding without any target. rows: default len(samples).

    documents: with document_ids. count_bytes: with target_bytes. context: the first tokens of a sample, that many, are
    without targets (an encoder reads them).
    """
    rows = len(samples) if rows is None else rows
    inputs = np.zeros((rows, seq_len), dtype=np.int64)
    targets = np.full((rows, seq_len), IGNORE, dtype=np.int64)
    sizes = np.zeros((rows, seq_len), dtype=np.int64) if count_bytes else None
    for row, sample in enumerate(samples):
        start = int(sample) * seq_len
        text = tokens.read(start, start + seq_len + 1)
        inputs[row], targets[row] = text[:-1], text[1:]
        if sizes is not None:
            sizes[row] = tokens.read_bytes(start + 1, start + seq_len + 1)
    targets[:, :context] = IGNORE
    if sizes is not None:
        sizes[:, :context] = 0
    ids = _document_ids(inputs, tokens) if documents else None
    return Batch(*(part if part is None else torch.from_numpy(part) for part in (inputs, targets, ids, sizes)))


def _document_ids(inputs: np.ndarray, tokens: TokenFile) -> np.ndarray:
    """[B, S] tokens -> [B, S] int64: how many ends of text stand before each token in its row."""
    if tokens.end_of_text is None:
        raise ValueError(f"documents=True, but the tokens of {tokens.path} do not say which id ends a text")
    ends = (inputs == tokens.end_of_text).astype(np.int64)
    return np.cumsum(ends, axis=1) - ends


def _check_replica(data_rank: int, data_degree: int) -> None:
    if not 0 <= data_rank < data_degree:
        raise ValueError(f"data_rank={data_rank}: 0 to {data_degree - 1}")


class TrainBatches:
    """The micro batches of this replica, by optimizer step. Ranks that differ only in `tensor` pass the same data_rank.

    Step s sees the global sample indices [s*G, (s+1)*G); replica r takes the r-th contiguous part, in order. With
    `origin` (step, sample), where a run of another G left off, step s begins at sample + (s - step) * G.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        seq_len: int,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        data_rank: int,
        data_degree: int,
        documents: bool = False,
        context: int = 0,
        origin: tuple[int, int] = (0, 0),
    ):
        """documents: batches carry document_ids. context: tokens at the start of each sample without targets.

        Raises SettingsError where the batch sizes do not fit one another or the replicas.
        """
        _check_replica(data_rank, data_degree)
        once = micro_batch_size * data_degree
        if min(micro_batch_size, global_batch_size) < 1 or global_batch_size % once:
            fits = max(round(global_batch_size / once), 1) * once if once > 0 else data_degree
            raise SettingsError(
                f"train.global_batch_size={global_batch_size}: must be a multiple of train.micro_batch_size x replicas "
                f"= {micro_batch_size} x {data_degree} (both at least 1); {fits} works"
            )
        self.tokens, self.seq_len, self.micro_batch_size = tokens, seq_len, micro_batch_size
        self.global_batch_size, self.data_rank = global_batch_size, data_rank
        self.documents, self.context = documents, context
        self.replica_batch_size, self.origin = global_batch_size // data_degree, origin
        self.order = SampleOrder(sample_count(tokens, seq_len), seed)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return self.order.num_samples

    def epoch(self, step: int) -> float:
        """Epochs seen before step `step`; its whole part is the epoch of the step's first sample."""
        return self.position(step) / self.num_samples

    def position(self, step: int) -> int:
        """Global sample index of the first sample of step `step`."""
        return self.origin[1] + (step - self.origin[0]) * self.global_batch_size

    def step(self, step: int) -> list[Batch]:
        """This replica's micro batches of optimizer step `step` (from 0), each [micro_batch_size, S]; in any order."""
        first = self.position(step) + self.data_rank * self.replica_batch_size
        samples = self.order.samples(first, first + self.replica_batch_size)
        size = self.micro_batch_size
        micro_batches = []
        for at in range(0, len(samples), size):
            rows = samples[at : at + size]
            batch = read_batch(self.tokens, rows, self.seq_len, documents=self.documents, context=self.context)
            batch.samples = torch.arange(first + at, first + at + len(batch.tokens))
            micro_batches.append(batch)
        return micro_batches


class EvalBatches:
    """The first min(samples, available) samples, each on exactly one replica; iterate for Batches, as often as wanted.

    Every replica yields len(self) batches of [micro_batch_size, S], filled up with rows without targets, so that
    collectives line up. A mean weighted by valid targets then depends neither on micro batch nor on replicas. Batches
    have target_bytes where the tokens keep them (those of a validation split do).
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        seq_len: int,
        samples: int,
        micro_batch_size: int,
        data_rank: int,
        data_degree: int,
        documents: bool = False,
        context: int = 0,
    ):
        """documents: batches carry document_ids. context: tokens at the start of each sample without targets. Raises SettingsError for samples or a micro batch below 1."""
        _check_replica(data_rank, data_degree)
        for key, value in (("eval.samples", samples), ("train.micro_batch_size", micro_batch_size)):
            if value < 1:
                raise SettingsError(f"{key}={value}: must be at least 1")
        self.tokens, self.seq_len, self.micro_batch_size = tokens, seq_len, micro_batch_size
        self.documents, self.context, self.count_bytes = documents, context, tokens.bytes_path is not None
        self.num_samples = min(samples, sample_count(tokens, seq_len))
        self._share = -(-self.num_samples // data_degree)
        first = min(data_rank * self._share, self.num_samples)
        self._samples = np.arange(first, min(first + self._share, self.num_samples))

    def __len__(self) -> int:
        """Batches, the same on every replica."""
        return (self._share + self.micro_batch_size - 1) // self.micro_batch_size

    def __iter__(self) -> Iterator[Batch]:
        size = self.micro_batch_size
        for at in range(0, len(self) * size, size):
            yield read_batch(
                self.tokens,
                self._samples[at : at + size],
                self.seq_len,
                rows=size,
                documents=self.documents,
                count_bytes=self.count_bytes,
                context=self.context,
            )
