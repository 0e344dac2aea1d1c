"""Memory of one optimizer step told by kind, counted in bytes of live tensor storages."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_attn.tracking.peaks import storages

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS = "parameters", "gradients", "optimizer", "activations"


class MemoryMeter(TorchDispatchMode):
    """Counts what lives during one optimizer step (forward, backward, `optimizer.step()`), without changing a number.

        with MemoryMeter(parameters=model, optimizer=optimizer) as meter:
            ...
        meter.report()

    The unit is the untyped storage: views of one storage and tied weights count once, a slice counts whole. Kinds:
    - parameters: parameters and buffers (`parameters` is a module, or the tensors themselves);
    - gradients: storages under `.grad`, from the moment a gradient is accumulated, and buffers given as `gradients`
      (where an engine keeps them elsewhere); the most there was;
    - optimizer: tensors in `optimizer.state`, and parameters that only the optimizer knows (fp32 masters);
    - activations: everything else that an operator made or was given, temporaries and batches included; the peak.
    A state tensor made during the step counts as optimizer from its birth.

    How: a dispatch mode sees each operator's tensors (also in backward: autograd carries the mode to its threads), and
    a weak reference tells when a storage dies. torch keeps one Python object per storage as long as the C++ storage
    lives (`torch.distributed._tools.mem_tracker` builds on the same fact). Births, deaths and changes of kind are
    noted as they happen; the sums are made afterwards. Nothing is kept alive.

    Not seen: workspaces inside a kernel, memory that no operator is given (a DDP bucket until it is used), rounding by
    an allocator, tensors of a compiled region. A batch counts from its first use.
    """

    def __init__(
        self,
        *,
        parameters: torch.nn.Module | Iterable[torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        gradients: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._gradient_buffers = list(gradients)
        if isinstance(parameters, torch.nn.Module):
            parameters = [*parameters.parameters(), *parameters.buffers()]
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._bytes: list[int] = []  # by number of the storage: its current size
        self._kinds: dict[int, str] = {}  # number -> parameters or optimizer, for its whole life
        self._events: list[tuple[int, int | None]] = []  # (number, change in bytes), or (number, None): now a gradient
        self._live: dict[int, tuple[weakref.ref, int]] = {}  # id of a live storage -> (its weak reference, its number)
        self._hooks: list[Any] = []
        self._report: dict[str, int] | None = None

    def __enter__(self) -> "MemoryMeter":
        masters = [] if self._optimizer is None else self._optimizer_parameters()
        self._mark(self._parameters, _PARAMETERS)
        self._mark(masters, _OPTIMIZER)
        self._mark(self._optimizer_state(), _OPTIMIZER)
        self._mark(self._gradient_buffers, _GRADIENTS)
        owners = {id(tensor): tensor for tensor in [*self._parameters, *masters]}
        self._owners = list(owners.values())
        self._mark([tensor.grad for tensor in self._owners if tensor.grad is not None], _GRADIENTS)
        for tensor in self._owners:
            if tensor.requires_grad and tensor.is_leaf:
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._mark_gradient))
        if isinstance(self._optimizer, torch.optim.Optimizer):
            # Gradients that were not accumulated but assigned (DDP's bucket views, fp32 images for the masters).
            self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._mark_all_gradients()))
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._counted_resize()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize
        for hook in self._hooks:
            hook.remove()
        self._mark_all_gradients()
        self._mark(self._optimizer_state(), _OPTIMIZER)
        self._report = self._summed()
        # Without the weak references no callback comes any more; without the tensors nothing outlives its owner.
        self._live, self._hooks, self._parameters, self._owners, self._optimizer = {}, [], [], [], None
        self._gradient_buffers = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Wrappers go first (DTensor, AsyncCollectiveTensor): the plain tensors inside come back here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._see((args, kwargs))
        result = func(*args, **kwargs)
        self._see((args, kwargs, result))  # the arguments again: an operator may have resized them
        return result

    def report(self) -> dict[str, int]:
        """Bytes under `memory/{parameters,gradients,optimizer,activations_peak,total_peak}_bytes`.

        Raises RuntimeError while the step is still running.
        """
        if self._report is None:
            raise RuntimeError("MemoryMeter.report(): the `with` block of the step has not ended yet")
        return dict(self._report)

    def _see(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                for storage in storages(value):
                    self._number(storage)

    def _number(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage; a new one is born here, a resized one is brought up to date."""
        key, size = id(storage), storage.nbytes()
        known = self._live.get(key)
        if known is None:
            number = len(self._bytes)
            self._bytes.append(size)
            self._live[key] = (weakref.ref(storage, partial(self._died, key)), number)
            self._events.append((number, size))
            return number
        number = known[1]
        if size != self._bytes[number]:
            self._events.append((number, size - self._bytes[number]))
            self._bytes[number] = size
        return number

    def _died(self, key: int, _: weakref.ref) -> None:
        known = self._live.pop(key, None)
        if known is not None:
            self._events.append((known[1], -self._bytes[known[1]]))

    def _mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            for storage in storages(tensor):
                self._kinds.setdefault(self._number(storage), kind)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            for storage in storages(parameter.grad):
                if id(storage) not in self._live:  # made where no operator shows it: a gradient from its birth
                    self._events.append((len(self._bytes), None))
                self._events.append((self._number(storage), None))

    def _mark_all_gradients(self) -> None:
        for tensor in self._owners:
            self._mark_gradient(tensor)

    def _optimizer_parameters(self) -> list[torch.Tensor]:
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    def _optimizer_state(self) -> list[torch.Tensor]:
        if self._optimizer is None:
            return []
        return [leaf for leaf in tree_leaves(list(self._optimizer.state.values())) if isinstance(leaf, torch.Tensor)]

    def _counted_resize(self) -> Any:
        """`UntypedStorage.resize_` is no operator (FSDP2 frees gathered weights by it), so it is noted by hand."""
        original, number = self._resize, self._number

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            number(storage)
            return result

        return resize_

    def _summed(self) -> dict[str, int]:
        now = dict.fromkeys((_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS), 0)
        size = [0] * len(self._bytes)
        kind = [self._kinds.get(number, _ACTIVATIONS) for number in range(len(size))]
        most_gradients = most_activations = most_in_all = 0
        for number, change in self._events:
            if change is not None:
                size[number] += change
                now[kind[number]] += change
            elif kind[number] is _ACTIVATIONS:
                kind[number] = _GRADIENTS
                now[_ACTIVATIONS] -= size[number]
                now[_GRADIENTS] += size[number]
            most_gradients = max(most_gradients, now[_GRADIENTS])
            most_activations = max(most_activations, now[_ACTIVATIONS])
            most_in_all = max(most_in_all, sum(now.values()))
        return {
            "memory/parameters_bytes": now[_PARAMETERS],
            "memory/gradients_bytes": most_gradients,
            "memory/optimizer_bytes": now[_OPTIMIZER],
            "memory/activations_peak_bytes": most_activations,
            "memory/total_peak_bytes": most_in_all,
        }

