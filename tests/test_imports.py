"""The import of the package stays light, and rooms import only rooms that stand above them."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "parallel_attn"
HEAVY = ("deepspeed", "wandb", "datasets", "transformers", "matplotlib", "hydra", "omegaconf", "rich", "tokenizers", "pandas")
ROOMS = (
    "errors", "sharding", "mesh", "collectives", "initialization", "nn", "attention", "models", "costs", "interop", "data",
    "tracking", "checkpoint", "training", "runs", "planning", "cli",
)  # fmt: skip


def test_import_of_the_package_brings_no_heavy_library():
    code = "import sys, parallel_attn; print(*[m for m in sys.modules if '.' not in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(result.stdout.split())


def test_a_training_run_imports_no_library_it_does_not_use():
    code = "import sys, parallel_attn.training; print(*[m for m in sys.modules if '.' not in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"deepspeed", "wandb", "datasets", "transformers", "matplotlib"} & set(result.stdout.split())


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, at the top or inside a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "parallel_attn":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return rooms & set(ROOMS)


def test_rooms_import_only_rooms_above_them():
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ROOMS, f"{path}: a new room, to be put in its place in ROOMS"
        below = {other for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)}
        assert not below, f"{path} imports {below}"


def test_files_hold_one_idea():
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 300}
    assert not long
