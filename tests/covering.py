"""Pairwise covering sets: every pair of values of any two factors stands together in at least one case."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]], legal: Callable[[dict], bool] = lambda case: True) -> list[dict]:
    """Greedy and deterministic. Pairs that no legal case holds are left out."""
    names = list(factors)
    rng = random.Random(0)

    def pairs_of(case: dict) -> set:
        return set(itertools.combinations([(name, repr(case[name])) for name in names], 2))

    every = [case for values in itertools.product(*factors.values()) if legal(case := dict(zip(names, values)))]
    open_pairs = set().union(*(pairs_of(case) for case in every))
    chosen = []
    while open_pairs:
        sample = every if len(every) <= 4000 else rng.sample(every, 4000)
        best = max(sample, key=lambda case: len(pairs_of(case) & open_pairs))
        gained = pairs_of(best) & open_pairs
        if not gained:
            best = next(case for case in every if pairs_of(case) & open_pairs)
            gained = pairs_of(best) & open_pairs
        open_pairs -= gained
        chosen.append(best)
    return chosen
