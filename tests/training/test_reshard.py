"""A checkpoint of any layout and engine goes on at any other: the state is bitwise what was saved, the curve the same."""

import random

import pytest
import torch
import torch.distributed as dist

from parallel_attn import sharded_parameters
from parallel_attn.checkpoint import Reader, newest_in
from parallel_attn.training import checkpoints
from tests.parity import assemble, axis_of
from tests.training.resuming import ENGINES, curve, trained, training_case
from tests.world import run

# 6 query heads and 2 KV heads: at degree 3 uneven and with copies, at degree 4 more so. AdamW's eps as in test_engines.
SETTINGS = ("optimizer.lr=1e-3", "optimizer.eps=1e-4", "schedule=constant", "schedule.warmup_steps=0")
BEFORE, AFTER = 6, 20
USED = ("ddp", "fsdp2", "zero1", "zero3")
LAYOUTS = [(engine, data, tensor) for engine in USED for data in (1, 2) for tensor in (1, 2, 3, 4)]


def drawn_pairs(rounds: int, most: int) -> list[tuple]:
    """In each round every layout of at most `most` processes is left once and entered once, in an order drawn by lot."""
    draw, pairs = random.Random(0), []
    for _ in range(rounds):
        some = [layout for layout in LAYOUTS if layout[1] * layout[2] <= most]
        draw.shuffle(some)
        pairs += list(zip(some, some[1:] + some[:1]))
    return pairs


# Few by hand in the default run; the others and all drawn ones in --all.
QUICK = [
    (("ddp", 2, 2), ("zero3", 1, 3)),
    (("zero3", 1, 3), ("fsdp2", 2, 1)),
    (("zero1", 1, 4), ("ddp", 2, 2)),
]
REST = [(("fsdp2", 2, 1), ("zero1", 1, 4)), (("zero2", 2, 2), ("zero0", 2, 1)), (("zero0", 2, 1), ("zero2", 2, 2))]
DRAWN = REST + [pair for pair in drawn_pairs(1, 4) + drawn_pairs(1, 8)[:8] if pair not in QUICK]


def named(layout: tuple) -> str:
    engine, data, tensor = layout
    return f"{engine}-{data}x{tensor}"


def overrides_of(layout: tuple) -> tuple[str, ...]:
    engine, _, tensor = layout
    return (*SETTINGS, *ENGINES[engine], f"parallel.tensor={tensor}")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    trained(1, folder / "a", *SETTINGS, f"train.steps={BEFORE + AFTER}")
    return curve(folder / "a")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> a run folder of BEFORE steps in that layout, made once."""
    made, folder = {}, tmp_path_factory.mktemp("saved")

    def run_dir(layout):
        if layout not in made:
            made[layout] = folder / named(layout)
            trained(layout[1] * layout[2], made[layout], *overrides_of(layout), f"train.steps={BEFORE}")
        return made[layout]

    return run_dir


def resharded_case(run_dir: str, overrides: tuple[str, ...]) -> list[str]:
    """Goes on; returns the tensors whose full value after loading is not bitwise the one on disk."""
    load, different = checkpoints.load, []

    def checked(engine, resume):
        load(engine, resume)
        shards = {name: shard for name, _, shard in sharded_parameters(engine.module)}
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            full = assemble({name: engine.state_of(name)[kind].clone() for name in shards}, shards, axis_of(engine.module))
            with Reader(resume.checkpoint) as reader:
                for name, tensor in full.items():
                    key = f"{kind}/{name}"
                    entry = resume.checkpoint.index.tensors[key]
                    if not torch.equal(reader.slice(key, (0,) * len(entry.shape), entry.shape), tensor):
                        different.append(key)

    checkpoints.load = checked
    try:
        training_case(run_dir, overrides)
    finally:
        checkpoints.load = load
    return different if dist.get_rank() == 0 else []


@pytest.mark.parametrize(
    "before, after",
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in DRAWN)],
    ids=lambda layout: named(layout),
)
def test_saved_in_one_layout_it_goes_on_in_another(tmp_path, saved, unbroken, before, after):
    source = saved(before)
    overrides = (*overrides_of(after), f"train.steps={BEFORE + AFTER}", f"checkpoint.resume={source}", "checkpoint.every=0")
    (different, *_) = run(after[1] * after[2], resharded_case, str(tmp_path / "b"), overrides, timeout=200)
    assert not different
    got = curve(tmp_path / "b")
    assert sorted(got) == list(range(BEFORE + 1, BEFORE + AFTER + 1))
    assert max(abs(got[step][0] / unbroken[step][0] - 1) for step in got) < 1e-5
    index = newest_in(source).index
    assert index.parameters() == 34400  # of one process, whatever the layout
