"""The caches of all layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_attn.attention import Cache


class ModelCache:
    """layers: for each block its Cache, or (own, of the encoder's tokens) where it reads an encoder too."""

    def __init__(self, layers: Sequence[Cache | tuple[Cache, Cache]]) -> None:
        self.layers = list(layers)

    def __iter__(self) -> Iterator[Cache]:
        """All caches that grow with the tokens."""
        for layer in self.layers:
            yield layer[0] if isinstance(layer, tuple) else layer

    def context(self) -> Iterator[Cache]:
        """Those of the encoder's tokens, which do not grow."""
        for layer in self.layers:
            if isinstance(layer, tuple):
                yield layer[1]

    @property
    def length(self) -> int:
        """Tokens in it, padded ones included."""
        return next(iter(self)).length

    def bytes(self) -> int:
        """Of the live tensors of this rank."""
        return sum(cache.bytes() for cache in (*self, *self.context()))

    def bytes_per_token(self) -> float:
        """Of the live tensors of this rank, for a generated token of one row that is kept."""
        return sum(cache.bytes_per_token() for cache in self)
