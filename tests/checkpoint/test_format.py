"""The format on disk: readable by others, whole or absent, damage named, any slice out of any pieces."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_attn.checkpoint import Checkpoint, CheckpointFolder, Index, Reader, find
from parallel_attn.checkpoint.files import checksums_of, replace_file, write_file, write_tensor_file
from parallel_attn.checkpoint.index import Entry, Piece
from parallel_attn.errors import CheckpointError
from parallel_attn.sharding import HeadPlan, ParameterShard, scale_ranges

FULL = {
    "layers.0.attention.k.weight": torch.arange(4 * 6, dtype=torch.float32).view(4, 6),
    "head.weight": torch.arange(7 * 3, dtype=torch.float32).view(7, 3) + 100,
    "norm.weight": torch.full((5,), 0.5),
}


def written(path: Path, step: int, finite: bool = True, cuts: int = 2, value: float | None = None) -> Path:
    """A checkpoint of FULL, each tensor cut along dim 0 into `cuts` pieces in as many files."""
    folder = CheckpointFolder(path)
    folder.prepare()
    temporary = folder.temporary(step, "token")
    temporary.mkdir()
    files, pieces = {}, {}
    for number in range(cuts):
        name = f"tensors-{number:05d}-of-{cuts:05d}.safetensors"
        parts = {}
        for kind, (key, full) in itertools.product(("master", "exp_avg", "exp_avg_sq"), FULL.items()):
            chunks = full.chunk(cuts)
            if number < len(chunks):
                parts[f"{kind}/{key}"] = chunks[number].clone() if value is None else torch.full_like(chunks[number], value)
        checksums, files[name], _ = write_tensor_file(temporary / name, parts)
        for key, part in parts.items():
            start = sum(len(chunk) for chunk in FULL[key.partition("/")[2]].chunk(cuts)[:number])
            box = (start, *[0] * (part.dim() - 1)), tuple(part.shape)
            pieces.setdefault(key, []).append(Piece(name, *box, checksums[key]))
    files["tokenizer.json"] = write_file(temporary / "tokenizer.json", b"{}")
    tensors = {key: Entry(tuple(FULL[key.partition("/")[2]].shape), "F32", tuple(found)) for key, found in pieces.items()}
    index = Index(step, finite, tensors, files, {"config": {}})
    write_file(temporary / "index.json", index.to_json().encode())
    return folder.publish(temporary, index, keep=2)


def test_tensor_files_are_plain_safetensors(tmp_path):
    tensors = {**FULL, "double": torch.rand(3, dtype=torch.float64), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)}
    checksums, known, finite = write_tensor_file(tmp_path / "a.safetensors", tensors)
    assert finite
    assert known["bytes"] == (tmp_path / "a.safetensors").stat().st_size
    assert dict(checksums_of(tmp_path / "a.safetensors")) == checksums
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_seen(tmp_path, value):
    tensor = torch.randn(3 << 20)  # three parts
    for at in (0, len(tensor) // 2, -1):
        tensor[at] = value
        assert not write_tensor_file(tmp_path / "a.safetensors", {"a": torch.ones(3), "b": tensor})[2]
        tensor[at] = 3e38
        assert write_tensor_file(tmp_path / "a.safetensors", {"a": torch.ones(3), "b": tensor})[2]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_any_degree_reads_its_slices_from_any_pieces(tmp_path, cuts, degree):
    checkpoint = Checkpoint.open(written(tmp_path, 1, cuts=cuts))
    plan = HeadPlan(8, 2, degree)
    cases = {
        "layers.0.attention.k.weight": (0, scale_ranges(plan.kv_heads, 2)),  # copies from degree 3 on
        "head.weight": (0, tuple((r * 7 // degree, (r + 1) * 7 // degree) for r in range(degree)) if degree < 8 else None),
        "norm.weight": (None, ()),
    }
    with Reader(checkpoint) as reader:
        for (name, (dim, ranges)), rank in itertools.product(cases.items(), range(degree)):
            if ranges is not None:
                shard = ParameterShard(tuple(FULL[name].shape), dim, ranges, rank, degree)
                for part in reader.parameter(name, shard).values():
                    assert torch.equal(part, FULL[name][shard.index()])
        draw = random.Random(degree)
        for _ in range(20):  # and any box at all, along both dims
            (a, b), (c, d) = sorted(draw.sample(range(5), 2)), sorted(draw.sample(range(7), 2))
            box = reader.slice("master/layers.0.attention.k.weight", (a, c), (b - a, d - c))
            assert torch.equal(box, FULL["layers.0.attention.k.weight"][a:b, c:d])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


FIRST = "tensors-00000-of-00002.safetensors"
SECOND = "tensors-00001-of-00002.safetensors"
DAMAGES = {
    "bit of a tensor": (SECOND, lambda path: flip(path, -3), "checksum of exp_avg_sq/"),
    "bit of a header": (FIRST, lambda path: flip(path, 30), "checksum of its header"),
    "length of a header": (FIRST, lambda path: flip(path, 5), "its header is cut off"),
    "cut off": (FIRST, lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    "empty": (SECOND, lambda path: path.write_bytes(b""), "0 bytes instead of"),
    "deleted": (FIRST, lambda path: path.unlink(), "is missing"),
    "bit of the tokenizer": ("tokenizer.json", lambda path: flip(path, 0), "checksum does not match"),
    "index deleted": ("index.json", lambda path: path.unlink(), "cannot be read"),
    "index cut off": ("index.json", lambda path: path.write_bytes(path.read_bytes()[:-40]), "not JSON any more"),
    "digit of the index": (
        "index.json", lambda path: path.write_text(path.read_text().replace('"step":2', '"step":3')), "checksum does not match",
    ),
    "another format": ("index.json", lambda path: path.write_text("{}"), "is not the index of a checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_one_before_is_offered(tmp_path, damage):
    before, newest = written(tmp_path, 1), written(tmp_path, 2)
    name, change, reason = DAMAGES[damage]
    change(newest / name)
    with pytest.raises(CheckpointError) as caught:
        find(tmp_path).verify()
    message = str(caught.value)
    assert str(newest / name) in message and reason in message and len(message.splitlines()) == 1
    if not damage.startswith(("bit", "length")):  # seen without reading the tensors: the folder knows what to offer
        assert message.endswith(f"the one before it is whole: checkpoint.resume={before}")
    assert CheckpointFolder(tmp_path).offer(newest) == f"the one before it is whole: checkpoint.resume={before}"
    find(before).verify()
    change(before / name)
    if damage in ("deleted", "cut off", "empty", "index deleted"):
        assert "no whole checkpoint stands before it" in CheckpointFolder(tmp_path).offer(newest)


def test_a_version_of_the_future_is_refused_by_number(tmp_path):
    path = written(tmp_path, 1) / "index.json"
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(CheckpointError, match="format version 2, this release reads version 1"):
        find(tmp_path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_kill_leaves_is_never_read_and_swept(tmp_path):
    written(tmp_path, 1)
    for leftover in (".step-00000002.abc.tmp", ".step-00000001.abc.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "index.json").write_text("half")
    (tmp_path / ".latest.abc.tmp").write_text("step-")
    assert find(tmp_path).step == 1
    CheckpointFolder(tmp_path).prepare()
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_keep_counts_whole_finite_ones_and_the_last_finite_one_stays(tmp_path):
    for step in (1, 2, 3):
        written(tmp_path, step)
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    for step in (4, 5, 6):
        written(tmp_path, step, finite=False)
    assert names(tmp_path)[:3] == ["latest", "step-00000002", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\n" and find(tmp_path).step == 3
    (tmp_path / "step-00000003" / FIRST).unlink()
    written(tmp_path, 7)  # the damaged one does not count
    assert {"step-00000002", "step-00000007"} <= set(names(tmp_path)) and (tmp_path / "latest").read_text() == "step-00000007\n"
    written(tmp_path, 8)
    assert names(tmp_path) == ["latest", "step-00000007", "step-00000008"]


def test_the_same_step_again_takes_the_place_of_the_other(tmp_path):
    written(tmp_path, 1)
    path = written(tmp_path, 1, value=9.0)
    assert names(tmp_path) == ["latest", "step-00000001"]
    with Reader(Checkpoint.open(path)) as reader:
        assert reader.slice("master/norm.weight", (0,), (5,)).tolist() == [9.0] * 5


def test_later_ones_are_set_aside_when_a_run_goes_back(tmp_path):
    for step in (1, 2):
        written(tmp_path, step)
    folder = CheckpointFolder(tmp_path)
    folder.set_aside_after(1)
    assert find(tmp_path).step == 1 and (tmp_path / "latest").read_text() == "step-00000001\n"
    assert names(tmp_path) == ["latest", "set-aside-1-step-00000002", "step-00000001"]
    written(tmp_path, 2)
    folder.set_aside_after(1)
    assert names(tmp_path)[1:3] == ["set-aside-1-step-00000002", "set-aside-2-step-00000002"]
    assert find(tmp_path / "set-aside-1-step-00000002").step == 2


def test_a_folder_without_a_checkpoint_is_told_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no whole, finite checkpoint"):
        find(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        find(tmp_path / "nowhere")


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    replace_file(path, b"a")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"b")
    assert path.read_bytes() == b"a" and names(tmp_path) == ["latest"]


def test_nothing_on_disk_needs_pickle(tmp_path):
    folder = written(tmp_path, 1)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    json.loads((folder / "index.json").read_text())
