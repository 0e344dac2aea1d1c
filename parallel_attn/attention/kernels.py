"""softmax(q k^T * scale + mask) v by the fused kernel of torch wherever it can serve.

    what                          how
    causal or not, groups, unequal widths, learned sinks         one fused call; sinks are one key and one width more
    sliding window                query blocks with their band of keys as one fused call: S x (block + window), not S x S
                                  (a mask below 2 blocks, where the band would be no smaller)
    documents                     one call per document: no mask at all
    key padding                   a mask
    soft cap, dropout             the explicit path (attention/explicit.py), in query blocks that are recomputed in backward

Shapes: B batch, S queries, T keys, H/K query/KV heads of this rank (H % K == 0), E query-key width, Ev value width.

Masked slots cannot leak, not even a NaN: the caller zeroes the inputs of padded slots, and documents are computed apart
(0 * NaN is NaN, so a weight of zero alone would not protect anybody). Rows without any key give zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_attn.attention.explicit import explicit
from parallel_attn.attention.masks import allowed_keys
from parallel_attn.initialization import Dropout

WINDOW_BLOCK = 64  # queries of a block are at least as many: small blocks starve the kernel
WIDTH_MULTIPLE = 8  # what the kernels on CUDA ask of a head's width


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    dropout: Dropout | None = None,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """q (B, S, H, E), k (B, T, K, E), v (B, T, K, Ev) -> (B, S, H, Ev).

    causal: bottom-right aligned, the last query sees every key (S <= T: the queries are the last S of T positions).
    window: a query sees the keys less than `window` positions away (Beltagy 2020), inside a document counted in it.
    sinks (H,): exp(sink) joins the softmax's denominator (gpt-oss).
    soft_cap c: scores become c tanh(score / c) (Gemma 2). dropout: of the softmax's weights.
    key_padding_mask (B, T) bool, True where the key is real; document_ids (B, T) integers: attention stays inside
    equal ids (the last S of them are the queries').
    """
    plain = key_padding_mask is None and document_ids is None and soft_cap is None and dropout is None
    if plain and q.shape[1] == 1 and causal and (window is None or window >= k.shape[1]) and q.shape[0]:
        return fused(q, k, v, scale=scale, sinks=sinks)  # a token of generation sees all keys
    settings = {"scale": scale, "causal": causal, "sinks": sinks, "soft_cap": soft_cap, "dropout": dropout}
    batch, keys = k.shape[:2]
    rows = None if dropout is None else dropout.keys
    wanted = {"key_padding_mask": (key_padding_mask, (batch, keys)), "document_ids": (document_ids, (batch, keys))}
    for name, (given, shape) in (wanted | {"samples": (rows, (batch,))}).items():
        if given is not None and given.shape[: len(shape)] != shape:  # broadcast, it would pass for something else
            got = tuple(given.shape[: len(shape)])
            raise ValueError(f"{name} of shape {got} with {batch} sequences of {keys} keys: needs {shape}")
    if 0 in q.shape[:2]:  # nobody asks: the blocks and the documents of the other paths are none at all
        return fused(q, k, v, scale=scale, sinks=sinks)
    if document_ids is not None:
        return _by_document(q, k, v, window, key_padding_mask, document_ids, settings)
    queries, keys = q.shape[1], k.shape[1]
    if window is not None and window >= keys:
        window = None
    if soft_cap is not None or dropout is not None:
        return explicit(q, k, v, window=window, key_padding_mask=key_padding_mask, **settings)
    if window is not None and queries == keys and keys > 2 * max(window, WINDOW_BLOCK):
        return _by_window(q, k, v, scale, causal, window, sinks, key_padding_mask)
    mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(1)
    ordered = window is not None or (causal and queries > 1)
    if ordered and (mask is not None or window is not None or queries != keys):
        allowed = allowed_keys(queries, keys, causal, window, q.device)
        mask = allowed if mask is None else mask & allowed
    # The kernel aligns its own causal flag top-left, which is the same thing only for S == T.
    return fused(q, k, v, scale=scale, causal=causal and mask is None and queries == keys, mask=mask, sinks=sinks)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One call of the fused kernel. `mask` (B or 1, S or 1, T) bool, True where attention is allowed; shapes as in `attend`."""
    width, value_width = q.shape[-1], v.shape[-1]
    # Unequal widths would drop to the unfused path: zeros in the narrower one change no score and no value.
    if value_width < width:
        v = F.pad(v, (0, width - value_width))
    elif width < value_width:
        q, k = F.pad(q, (0, value_width - width)), F.pad(k, (0, value_width - width))
    if sinks is not None:
        q, k, v, mask = _with_sink(q, k, v, mask, sinks / scale, causal)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    folded = q.shape[2] == 1 and k.shape[1] != q.shape[1]
    if folded:  # one query: the heads of a group are the queries of its key, half the time on CPU
        q = q.reshape(q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[-1])
    some_key = None
    if mask is not None:
        if sinks is None:  # otherwise every row has its sink
            some_key = mask.any(-1, keepdim=True)
            mask = mask | ~some_key  # a row without keys sees all of them and is zeroed afterwards
        mask = mask.unsqueeze(1)
        if q.is_cuda and k.shape[1] != q.shape[1]:  # the kernel that takes masks there does not take groups
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    if some_key is not None:
        out = out.masked_fill(~some_key.unsqueeze(1), 0)
    if folded:
        out = out.flatten(1, 2).unsqueeze(2)
    out = out.transpose(1, 2)
    if out.shape[-1] != value_width:
        out = out[..., :value_width]
    return out[:, 1:] if sinks is not None and causal else out


def _with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Tensor, causal: bool):
    """A first key whose score is `scores` (H,) for every query and whose value is zero.

    One width more carries it: that key is 1 there and all others 0. Under the kernel's causal flag a first query that
    nobody reads keeps the diagonal in its place.
    """
    extra = WIDTH_MULTIPLE - q.shape[-1] % WIDTH_MULTIPLE
    at = q.shape[-1]
    carrier = scores.to(q.dtype).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, carrier], -1), (0, extra - 1))
    sink = k.new_zeros(k.shape[0], 1, k.shape[2], at + extra)
    sink[..., at] = 1
    k = torch.cat([sink, F.pad(k, (0, extra))], 1)
    v = F.pad(v, (0, extra, 0, 0, 1, 0))
    if causal:
        q = F.pad(q, (0, 0, 0, 0, 1, 0))
    return q, k, v, mask if mask is None else F.pad(mask, (1, 0), value=True)


def _by_window(q, k, v, scale, causal, window, sinks, key_padding_mask) -> Tensor:
    """Blocks of queries, each with the band of keys that its window reaches, as the batch of one fused call (S == T)."""
    batch, length = q.shape[:2]
    block = max(window, WINDOW_BLOCK)
    blocks = -(-length // block)
    before, after = window - 1, 0 if causal else window - 1
    fill = blocks * block - length
    span = before + block + after

    def bands(x: Tensor) -> Tensor:
        """(B, S, ...) -> (B * blocks, span, ...)."""
        padded = F.pad(x, (*(0, 0) * (x.dim() - 2), before, fill + after))
        return padded.unfold(1, span, block).movedim(-1, 2).flatten(0, 1)

    blocked = F.pad(q, (0, 0, 0, 0, 0, fill)).unflatten(1, (blocks, block)).flatten(0, 1)
    real = q.new_ones(1, length, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    real = bands(real.to(torch.uint8)).bool().unsqueeze(1)  # (B or 1 * blocks, 1, span)
    distance = torch.arange(span, device=q.device) - before - torch.arange(block, device=q.device).unsqueeze(1)
    mask = real & (distance.abs() < window) & ((distance <= 0) | (not causal))
    if mask.shape[0] != blocked.shape[0]:
        mask = mask.repeat(batch, 1, 1)
    out = fused(blocked, bands(k), bands(v), scale=scale, mask=mask, sinks=sinks)
    return out.unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def _by_document(q, k, v, window, key_padding_mask, document_ids, settings: dict) -> Tensor:
    """One call per document of each row: no S x T mask, and nothing of one document enters the sums of another."""
    queries, keys = q.shape[1], k.shape[1]
    dropout: Dropout | None = settings["dropout"]
    rows = []
    for row in range(q.shape[0]):
        ids = document_ids[row]
        slots, pieces = [], []
        for document in ids.unique().tolist():
            inside = (ids == document).nonzero().squeeze(-1)
            asking = inside[inside >= keys - queries] - (keys - queries)
            if asking.numel() == 0:
                continue
            padding = None if key_padding_mask is None else key_padding_mask[row, inside].unsqueeze(0)
            part = (t[row].index_select(0, index).unsqueeze(0) for t, index in ((q, asking), (k, inside), (v, inside)))
            own = settings | {"dropout": None if dropout is None else dropout.part(row, asking, inside)}
            pieces.append(attend(*part, window=window, key_padding_mask=padding, **own).squeeze(0))
            slots.append(asking)
        order = torch.cat(slots).argsort()
        rows.append(torch.cat(pieces).index_select(0, order))
    return torch.stack(rows)
