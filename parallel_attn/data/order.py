"""In which order samples are seen: a function of seed and global sample index alone."""

from __future__ import annotations

import numpy as np

from parallel_attn.errors import SettingsError


class SampleOrder:
    """Global sample index i belongs to epoch i // num_samples; each epoch is its own shuffle of all samples.

    No state: nothing to save, nothing that depends on ranks, micro batches or a resume.
    """

    def __init__(self, num_samples: int, seed: int):
        """Raises SettingsError for a negative seed, ValueError without samples."""
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: at least 1")
        if seed < 0:
            raise SettingsError(f"train.seed={seed}: must not be negative; 0 or more works")
        self.num_samples, self.seed = num_samples, seed
        self._shuffles: dict[int, np.ndarray] = {}

    def samples(self, start: int, stop: int) -> np.ndarray:
        """Sample ids [stop-start] int64 at the global sample indices start..stop-1; may cross epochs."""
        if not 0 <= start <= stop:
            raise IndexError(f"global sample indices {start}:{stop}")
        index = np.arange(start, stop, dtype=np.int64)
        epochs = index // self.num_samples
        wanted = {int(epoch) for epoch in np.unique(epochs)}
        self._shuffles = {epoch: self._shuffles.get(epoch, None) for epoch in wanted}  # older epochs are let go
        result = np.empty_like(index)
        for epoch in wanted:
            if self._shuffles[epoch] is None:
                self._shuffles[epoch] = self._shuffle(epoch)
            here = epochs == epoch
            result[here] = self._shuffles[epoch][index[here] % self.num_samples]
        return result

    def _shuffle(self, epoch: int) -> np.ndarray:
        # The raw stream of a bit generator is the same in every NumPy release, Generator.permutation need not be
        # (NEP 19): a resumed run must go on with the same order. A tie is broken by the sample id.
        bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
        return np.argsort(bits.random_raw(self.num_samples), kind="stable")
