"""Pairwise covering sets: every pair of values of any two factors stands together in at least one case."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


POOL = 20_000


def pairwise(factors: Mapping[str, Sequence[Any]], legal: Callable[[dict], bool] = lambda case: True) -> list[dict]:
    """Greedy and deterministic. Pairs that no legal case holds are left out. Of a product that is too large to be listed,
    POOL cases are drawn: a pair stands in hundreds of them.
    """
    names = list(factors)
    rng = random.Random(0)

    def pairs_of(case: dict) -> set:
        return set(itertools.combinations([(name, repr(case[name])) for name in names], 2))

    if math.prod(len(values) for values in factors.values()) <= POOL:
        drawn = (dict(zip(names, values)) for values in itertools.product(*factors.values()))
    else:
        drawn = ({name: rng.choice(values) for name, values in factors.items()} for _ in range(POOL))
    every = [case for case in drawn if legal(case)]
    open_pairs = set().union(*(pairs_of(case) for case in every))
    chosen = []
    while open_pairs:
        sample = every if len(every) <= 2000 else rng.sample(every, 2000)
        best = max(sample, key=lambda case: len(pairs_of(case) & open_pairs))
        gained = pairs_of(best) & open_pairs
        if not gained:
            best = next(case for case in every if pairs_of(case) & open_pairs)
            gained = pairs_of(best) & open_pairs
        open_pairs -= gained
        chosen.append(best)
    return chosen
