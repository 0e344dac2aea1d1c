"""Prompts continued token by token, out of caches.

All ranks of a tensor axis run the same loop on the same (gathered) logits, so they stop at the same token; replicas have
nothing to do with each other, so none waits for one that goes on longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parallel_attn.errors import SettingsError
from parallel_attn.models.base import LanguageModel
from parallel_attn.models.sampling import Sampling

END_OF_TEXT, ENOUGH, LENGTH = "end of text", "max_new_tokens", "length"


@dataclass
class Continuation:
    """tokens: those after the prompt, without the end of text. reason: why it stopped, "end of text", "max_new_tokens" or
    "length" (the model's longest sequence)."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ENOUGH


@dataclass
class Generated:
    """continuations: in the order of the prompts. cache_bytes: of this rank's live cache; cache_bytes_per_token: for a
    token of one prompt."""

    continuations: list[Continuation]
    cache_bytes: int = 0
    cache_bytes_per_token: float = 0.0


def room(model: LanguageModel, prompts: Sequence[Sequence[int]], seq_len: int, vocab_size: int) -> list[int]:
    """How many tokens each prompt can go on for. Raises SettingsError for one that is empty, too long, or no tokens."""
    left = []
    for prompt in prompts:
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise SettingsError(f"prompt: token id {wrong} is not in the vocabulary of {vocab_size}")
        most = model.most_tokens(len(prompt), seq_len)
        if len(prompt) > most:
            raise SettingsError(f"prompt: it has {len(prompt)} tokens, the model's longest sequence {most}: shorten it")
        left.append(most - len(prompt))
    return left


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    seq_len: int,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    end_of_text: int | None = None,
    vocab_size: int | None = None,
    numbers: Sequence[int] | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
    compiled: bool = False,
) -> Generated:
    """Continues all prompts as one batch; shorter ones are filled up on their left.

    prompts: token ids. seq_len: the longest sequence that the model was trained for. end_of_text: the token that ends a
    continuation; None: none does. vocab_size: tokens that may come out, where the tokenizer has fewer than the model.
    numbers: of the prompts, for the randomness; by default their places here. on_tokens: told each new token of every
    prompt, None for one that has ended. compiled: torch.compile works on each token: half the time for small models on CPU,
    after a compilation of up to a minute, once for a model in a process.

    Raises SettingsError for a prompt that the model cannot take and for settings that cannot work.
    """
    vocab_size = vocab_size or model.config.vocab_size
    if max_new_tokens < 0:
        raise SettingsError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    sampling.check_vocabulary(vocab_size)
    left = room(model, prompts, seq_len, vocab_size)
    limits = [min(max_new_tokens, most) for most in left]
    rows = [Continuation([], ENOUGH if limit == max_new_tokens else LENGTH) for limit in limits]
    steps = max(limits, default=0)
    if steps == 0:
        return Generated(rows)
    numbers = range(len(prompts)) if numbers is None else numbers
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            decode = compiled_decode(model) if compiled else model.decode
            return _loop(model, decode, prompts, rows, limits, sampling, end_of_text, vocab_size, numbers, on_tokens)
    finally:
        model.train(was_training)


_COMPILED: WeakKeyDictionary[LanguageModel, Callable[..., Tensor]] = WeakKeyDictionary()


def compiled_decode(model: LanguageModel) -> Callable[..., Tensor]:
    """`model.decode`, compiled for any length."""
    if model not in _COMPILED:
        own = weakref.ref(model)
        _COMPILED[model] = torch.compile(lambda tokens, cache: own()(tokens, cache=cache), dynamic=True)
    return _COMPILED[model]


def _loop(model, decode, prompts, rows, limits, sampling, end_of_text, vocab_size, numbers, on_tokens) -> Generated:
    tokens, real = batch_of(prompts, model.embedding.weight.device)
    steps = max(limits)
    logits, cache = model.prefill(tokens, slots=tokens.shape[1] + steps - 1, key_padding_mask=real)
    going = [limit > 0 for limit in limits]
    for position in range(steps):
        picked = sampling.pick(logits[:, :vocab_size], numbers, position)
        fresh: list[int | None] = picked.tolist()
        for row, token in enumerate(fresh):
            if not going[row]:
                fresh[row] = None
            elif token == end_of_text:
                rows[row].reason, going[row], fresh[row] = END_OF_TEXT, False, None
            else:
                rows[row].tokens.append(token)
                going[row] = position + 1 < limits[row]
        if on_tokens is not None:
            on_tokens(fresh)
        if not any(going):
            break
        logits = decode(picked.unsqueeze(1).to(tokens.device), cache)[:, -1]
    return Generated(rows, cache.bytes(), cache.bytes_per_token())


def batch_of(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(tokens (B, P), which are real (B, P), or None where all are), filled up on the left."""
    longest = max(len(prompt) for prompt in prompts)
    filled = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens = torch.tensor(filled, dtype=torch.int64, device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return tokens, None
    starts = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device) >= starts
