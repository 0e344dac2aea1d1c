"""Runs somebody else's float64 model without its own float32 steps, so that it can be compared to the last digits."""

import torch
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Inside, whoever asks torch for float32 gets float64: casts, `dtype=` arguments, `Tensor.float()`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **kwargs)
