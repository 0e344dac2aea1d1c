"""Attention written out in loops and whole S x T matrices, to hold the layers against."""


import torch


def dense(q, k, v, *, scale, allowed, soft_cap=None, sinks=None):
    """q (B, S, H, E), k (B, T, K, E), v (B, T, K, Ev), allowed (B, S, T) bool -> (B, S, H, Ev)."""
    group = q.shape[2] // k.shape[2]
    outs = []
    for head in range(q.shape[2]):
        scores = torch.einsum("bse,bte->bst", q[:, :, head], k[:, :, head // group]) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.exp() * allowed
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        outs.append(torch.einsum("bst,bte->bse", weights / total.clamp(min=1e-300), v[:, :, head // group]))
    return torch.stack(outs, 2)


def allowed_pairs(queries, keys, *, causal=True, window=None):
    """(1, S, T) by two loops."""
    allowed = torch.zeros(1, queries, keys, dtype=torch.bool)
    for query in range(queries):
        for key in range(keys):
            distance = query + keys - queries - key
            inside = window is None or abs(distance) < window
            allowed[0, query, key] = inside and (distance >= 0 or not causal)
    return allowed


def linear(x, module):
    return torch.einsum("...d,fd->...f", x, module.weight) + (0 if module.bias is None else module.bias)


def rms(x, gain, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x, theta=10000.0):
    """Rotary on pairs (2i, 2i + 1) as complex numbers, over the whole width: x (B, S, heads, R)."""
    width = x.shape[-1]
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)
