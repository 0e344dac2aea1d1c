"""softmax(q k^T * scale + mask) v by the fused kernel of torch wherever it can serve.

Shapes: B batch, S queries, T keys, H/K query/KV heads of this rank (H % K == 0), E query-key width, Ev value width.

Masked slots cannot leak, not even a NaN: the caller zeroes the inputs of padded slots, and documents are computed apart
(0 * NaN is NaN, so a weight of zero alone would not protect anybody). Rows without any key give zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """q (B, S, H, E), k (B, T, K, E), v (B, T, K, Ev) -> (B, S, H, Ev).

    causal: bottom-right aligned, the last query sees every key (S <= T: the queries are the last S of T positions)
    key_padding_mask (B, T) bool, True where the key is real; document_ids (B, T) integers: attention stays inside
    equal ids (the last S of them are the queries').
    """
    if document_ids is not None:
        return _by_document(q, k, v, scale, causal, key_padding_mask, document_ids)
    mask = None
    if key_padding_mask is not None or (causal and q.shape[1] != k.shape[1] and q.shape[1] != 1):
        mask = _mask(q.shape[1], k.shape[1], causal, key_padding_mask, q.device)
    # The kernel aligns its own causal flag top-left, which is the same thing only for S == T.
    return fused(q, k, v, scale=scale, causal=causal and mask is None and q.shape[1] == k.shape[1], mask=mask)


def fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """One call of the fused kernel. `mask` (B or 1, S, T) bool, True where attention is allowed; shapes as in `attend`."""
    width, value_width = q.shape[-1], v.shape[-1]
    # Unequal widths would drop to the unfused path: zeros in the narrower one change no score and no value.
    if value_width < width:
        v = F.pad(v, (0, width - value_width))
    elif width < value_width:
        q, k = F.pad(q, (0, value_width - width)), F.pad(k, (0, value_width - width))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    some_key = None
    if mask is not None:
        some_key = mask.any(-1, keepdim=True)
        mask = (mask | ~some_key).unsqueeze(1)  # a row without keys sees all of them and is zeroed afterwards
        if q.is_cuda and k.shape[1] != q.shape[1]:  # the kernel that takes masks there does not take groups
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    if some_key is not None:
        out = out.masked_fill(~some_key.unsqueeze(1), 0)
    return out.transpose(1, 2)[..., :value_width]


def _mask(queries: int, keys: int, causal: bool, key_padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """(B or 1, S, T) bool, True where attention is allowed."""
    allowed = torch.ones(1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed.tril(keys - queries)
    return allowed if key_padding_mask is None else allowed & key_padding_mask.unsqueeze(1)


def _by_document(q, k, v, scale, causal, key_padding_mask, document_ids) -> Tensor:
    """One call per document of each row: no S x T mask, and nothing of one document enters the sums of another."""
    queries, keys = q.shape[1], k.shape[1]
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
            pieces.append(attend(*part, scale=scale, causal=causal, key_padding_mask=padding).squeeze(0))
            slots.append(asking)
        order = torch.cat(slots).argsort()
        rows.append(torch.cat(pieces).index_select(0, order))
    return torch.stack(rows)
