"""How a deliberate mistake is put in place and counted; the mistakes themselves stand in mutants.py."""

from __future__ import annotations

import difflib
import functools
import importlib
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel_attn.errors import SettingsError
from parallel_attn.mesh import AxisGroup


@dataclass(frozen=True)
class Mutant:
    """`wrong(original, *args)` in place of `original(*args)`, wherever `touches(*args)`."""

    name: str
    bug: str
    modules: tuple[str, ...]
    attribute: str
    wrong: Callable
    touches: Callable[..., bool] | None = None

    def is_hit(self, *args: Any, **kwargs: Any) -> bool:
        if any(isinstance(value, AxisGroup) and value.degree == 1 for value in (*args, *kwargs.values())):
            return False
        return self.touches is None or self.touches(*args, **kwargs)


_MUTANTS: dict[str, Mutant] = {}


def mutant(module: str | tuple[str, ...], attribute: str, *, touches: Callable[..., bool] | None = None) -> Callable:
    """Registers the decorated function as a mutant under its own name; its docstring says what it copies.

    module: where the function is looked up; several, where each caller has its own name for it.
    """
    modules = (module,) if isinstance(module, str) else module

    def register(wrong: Callable) -> Callable:
        bug = " ".join(wrong.__doc__.split())
        _MUTANTS[wrong.__name__] = Mutant(wrong.__name__, bug, modules, attribute, wrong, touches)
        return wrong

    return register


def find(name: str) -> Mutant:
    """Raises SettingsError for an unknown name, with the nearest one."""
    if name not in _MUTANTS:
        near = difflib.get_close_matches(name, _MUTANTS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise SettingsError(f"--mutate {name}: no such mutant; {hint}`--mutate list` names them")
    return _MUTANTS[name]


def listing() -> str:
    """All mutants by name, each with the bug that it copies, for a terminal."""
    lines = []
    for each in _MUTANTS.values():
        lines += [each.name, *textwrap.wrap(each.bug, 108, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


class Patches:
    """Context that puts mutants in place, or only counts where they would act (`watch`); may be entered again.

    hits: name -> calls so far that the mutant got wrong, on this rank.
    """

    def __init__(self, mutants: Iterable[Mutant], *, watch: bool = False) -> None:
        self.mutants, self.watch = list(mutants), watch
        self.hits = {mutant.name: 0 for mutant in self.mutants}
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:  # noqa: PYI034 - Self needs Python 3.11
        for each, module in ((each, module) for each in self.mutants for module in each.modules):
            owner = importlib.import_module(module)
            *path, leaf = each.attribute.split(".")
            for name in path:
                owner = getattr(owner, name)
            original = vars(owner)[leaf]
            if isinstance(original, property):
                standin: Any = property(self._standin(each, original.fget))
            else:
                standin = self._standin(each, original)
            self._undo.append((owner, leaf, original))
            setattr(owner, leaf, standin)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def _standin(self, each: Mutant, original: Callable) -> Callable:
        @functools.wraps(original)
        def standin(*args: Any, **kwargs: Any) -> Any:
            if not each.is_hit(*args, **kwargs):
                return original(*args, **kwargs)
            self.hits[each.name] += 1
            return original(*args, **kwargs) if self.watch else each.wrong(original, *args, **kwargs)

        return standin

    def total_hits(self, axis: AxisGroup) -> dict[str, int]:
        """Hits of all ranks together."""
        counts = torch.tensor(list(self.hits.values()))
        if axis.degree > 1:
            dist.all_reduce(counts, group=axis.group)
        return dict(zip(self.hits, counts.tolist()))


def applied(name: str | None) -> Patches:
    """The mutant called `name`; None: nothing."""
    return Patches([] if name is None else [find(name)])


def watched() -> Patches:
    """All mutants, none of them in force: after a pass, `hits` says which of them this code can meet."""
    return Patches(_MUTANTS.values(), watch=True)
