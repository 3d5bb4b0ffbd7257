"""Autoregressive generation: the KV cache, and sampling one token at a time.

GPT.backbone(idx, cache) adds idx to the cache: prompts at once, then one token per row. A layer
attends by SDPA to what its LayerCache holds, under masks that KVCache.add makes.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from common.values import printable
from data.tokenizers import Tokenizer
from inference.decode import Repeats, cached_attention, decode_step, next_logits
from model import GPT, Linear, may_attend
from ops.parallel import reshard

# --------------------------------------------------------------------------------------------------
# KV cache


class LayerCache:
    """Stores one layer's keys and values of the newest `size` tokens of each row, a ring buffer.

    Token p is in slot p % size. Prompts are read first, T > 1 tokens at once; after that one token
    (T = 1) per row.

    length: tokens in each row, those being read included, int64 (1,); all layers share it.
    k, v: (B, heads, size, head_dim), allocated on first use.
    newest: the x (B, 1, ...) of the newest tokens, by the name that shift was called with.
    """

    attention = staticmethod(cached_attention)

    def __init__(self, size: int, length: Tensor):
        self.size = size
        self.length = length
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.newest: dict[str, Tensor] = {}

    def shift(self, name: str, x: Tensor) -> Tensor:
        """Return the x of the previous token for each token being read; x (B, T, ...) is theirs."""
        if name not in self.newest:
            self.newest[name] = torch.zeros_like(x[:, :1])
        previous = torch.cat((self.newest[name], x[:, :-1]), dim=1)
        self.newest[name].copy_(x[:, -1:])
        return previous

    def positions(self) -> Tensor:
        """Return the position of the token in each slot, int64 (size,); negative if empty."""
        newest = self.length - 1
        return newest - (newest - torch.arange(self.size, device=newest.device)) % self.size

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, heads, T, head_dim) of the tokens being read; return what they attend to.

        The ring buffer wraps around after `size` tokens: then slots are not in order of position.
        """
        if self.k is None:  # prompts; empty slots get the first token, but are masked
            positions = self.positions().clamp(min=0)
            self.k = k[:, :, positions]
            self.v = v[:, :, positions]
        else:
            slot = (self.length - 1) % self.size
            self.k[:, :, slot] = k
            self.v[:, :, slot] = v
        if k.size(2) > 1:
            return k, v  # a prompt attends to itself
        return self.k, self.v


class KVCache:
    """Stores keys and values of the tokens read so far, so that a new token costs one position.

    Layers with a sliding window keep that window, the others the newest seq_len tokens: beyond the
    context length, every layer attends to a sliding window (Mistral 7B, 2023), and no token is read
    twice. All tensors have a fixed size.
    """

    def __init__(self, model: GPT, n_rows: int, capacity: int = 0):
        """Make an empty cache for prompts of equal length.

        capacity: how many tokens are expected in all, if fewer than seq_len.
        """
        cfg, device = model.cfg, model.device
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.doc_start = torch.zeros(n_rows, dtype=torch.int64, device=device)
        # The newest tokens, which n-grams reach back to
        self.recent = torch.full((n_rows, max(0, cfg.ngram - 1)), -1, device=device)
        self.layers = []
        for window in model.windows:
            size = min(window or cfg.seq_len, capacity or cfg.seq_len)
            self.layers.append(LayerCache(size, self.length))
        self.compiled_for: dict | None = None  # sampling options of the compiled step that used it

    def tensors(self) -> list[Tensor]:
        """Return every tensor that reading a token changes, once the prompts are read."""
        tensors = [self.length, self.doc_start, self.recent]
        for layer in self.layers:
            if layer.k is not None and layer.v is not None:  # else the layer has no attention
                tensors += [layer.k, layer.v]
            tensors += layer.newest.values()
        return tensors

    def add(self, model: GPT, idx: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor | None]]:
        """Add the tokens idx (B, T), which GPT.backbone is about to read.

        Returns
        - the ngram - 1 tokens before idx, then idx
        - the positions of idx, (T,)
        - each window's mask for SDPA, over the prompt's own tokens or over the slots
        """
        T = idx.size(1)
        position = self.length + torch.arange(T, device=idx.device)
        self.length += T

        # Where the document of each row's newest token starts
        if model.eot is not None:
            newest_start = torch.where(idx == model.eot, position, 0).amax(1)
            self.doc_start.copy_(torch.maximum(self.doc_start, newest_start))

        # Remember the newest tokens
        tokens = torch.cat((self.recent, idx), dim=1)
        self.recent.copy_(tokens[:, T:])

        if T > 1:
            return tokens, position, model.attention_masks(idx, "sdpa")
        # For each window, the slots that the token attends to
        masks = {}
        for window, layer in zip(model.windows, self.layers):
            if window in masks:
                continue
            key = layer.positions()
            same_doc = key >= self.doc_start[:, None, None, None]  # (B, 1, 1, size)
            allowed = may_attend(position[:, None], key, window, True, same_doc)
            masks[window] = allowed & (key >= 0)  # negative: an empty slot
        return tokens, position, masks


# --------------------------------------------------------------------------------------------------
# Preparing and checking a model


def freeze(model: GPT) -> GPT:
    """Prepare a model for inference and return it: no gradients, weights in the compute dtype.

    Linear layers then cast their weight matrices once, not at each use.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.to(model.compute_dtype)
    return model.eval().requires_grad_(False)


def random_tokens(model: GPT, n: int, length: int) -> Tensor:
    """Return random tokens to try a model with, int64 (n, length), always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.cfg.vocab_size, (n, length), generator=generator).to(model.device)


NO_CACHE = (
    "sampling without a KV cache, which is slower, because logits with one differ: what looks at "
    "other tokens must pass through the cache, as previous_token() does, and what depends on "
    "positions must use those of GPT.backbone"
)


@torch.no_grad()
def cache_is_exact(model: GPT) -> bool:
    """Return True if logits with a KV cache are those without, for random tokens.

    An edit may look at other tokens without the cache. The model must be in eval mode.
    """
    T = min(model.cfg.seq_len, max(128, 2 * max(model.windows)))
    if T < 3:
        return True
    # Read two prompts, then two more tokens of each
    idx = random_tokens(model, 2, T)
    logits = model(idx)
    cache = KVCache(model, len(idx))
    try:
        cached = [next_logits(model, part, cache) for part in idx.split((T - 2, 1, 1), dim=1)]
        difference = (torch.cat(cached, dim=1) - logits[:, -3:]).abs().max().item()
    except Exception:  # an edited model may not know what to do with a cache at all
        return False
    reshard(model)

    tolerance = 1e-2
    in_int8 = any(buffer.dtype == torch.int8 for buffer in model.buffers())
    if in_int8 or model.compute_dtype != torch.float32:
        tolerance = 0.5
    return difference <= tolerance * logits.std().item() + 1e-6  # False if it is NaN


# --------------------------------------------------------------------------------------------------
# Generation


# How text is sampled by default. A small model misspells words; min_p prevents that, but makes it
# repeat itself, as temperatures below 1 do. dry_multiplier prevents that (docs/using.md)
SAMPLING = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05, dry_multiplier=3.0)


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Tensor,
    *,
    n_tokens: int,
    vocab_size: int,
    seeds: Sequence[int] | None = None,
    use_cache: bool = True,
    step: Callable[..., Tensor] = decode_step,
    **sampling: float,
) -> Iterator[Tensor]:
    """Continue prompts of equal length, integer (B, T >= 1): yield the next token of each.

    Tokens are int64 (B,) on the model's device, n_tokens times. Prompts longer than the context are
    truncated to their end.

    vocab_size: ids from vocab_size on are padding of the head and are never sampled.
    seeds: one per prompt, so that its samples do not depend on the other prompts, except for
    rounding. Default: 0, 1, 2, ...
    use_cache: False re-reads the last seq_len tokens for every new one, as nanoGPT does.
    step: decode_step, or from compile_decode_step; it reads no prompts, and needs the cache.

    sampling: options that differ from SAMPLING
    - temperature: 0 is greedy decoding, without the other options.
    - top_k: sample from the k most likely tokens; 0 = all.
    - top_p: of these, from the fewest whose probabilities sum to it (Holtzman et al. 2019).
    - min_p: of these, from those at least min_p times as likely as the first (Nguyen et al. 2024).
    - dry_multiplier: subtract it from logits of tokens that lengthen an exact repeat (Repeats).
    """
    context = model.cfg.seq_len
    idx = prompts[:, -context:].long().to(model.device)
    cache = None
    if use_cache:
        # Powers of 2, because each size is compiled
        capacity = max(128, 2 ** math.ceil(math.log2(idx.size(1) + n_tokens)))
        cache = KVCache(model, len(idx), min(context, capacity))

    repeats = Repeats(idx)
    sampling = SAMPLING | sampling
    if sampling["temperature"] == 0:
        sampling["dry_multiplier"] = 0.0

    # All random numbers are drawn before: n_tokens for each prompt
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(idx))]
    draws = [torch.rand(n_tokens, 1, generator=generator) for generator in generators]
    uniform = torch.stack(draws, dim=1).to(model.device)

    decode = decode_step  # eager for prompts: each length would be compiled
    for i in range(n_tokens):
        token = decode(model, idx, cache, repeats, uniform[i], vocab_size=vocab_size, **sampling)
        yield token[:, 0]
        if cache is None:
            idx = torch.cat((idx, token), dim=1)[:, -context:]
        else:
            idx = token
            decode = step


def tokens_to_cpu(steps: Iterable[Tensor]) -> Iterator[list[int]]:
    """Yield what generate yields as lists; on a GPU, step i while step i + 1 is computed."""
    on_cpu = None
    copied = None
    for tokens in steps:
        if not tokens.is_cuda:
            yield tokens.tolist()
            continue
        if on_cpu is not None:
            copied.synchronize()
            yield on_cpu.tolist()
        on_cpu = tokens.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
    if on_cpu is not None:
        copied.synchronize()
        yield on_cpu.tolist()


@torch.no_grad()
def sample_continuation(
    model: GPT, prompt: Tensor, tokenizer: Tokenizer, n_tokens: int, seed: int
) -> str:
    """Return the end of a prompt, integer (T,), ">>>" and its continuation, from a whole line on.

    The model must be in eval mode.
    """
    # Eager, because compiled blocks would be compiled again for each length
    with torch.compiler.set_stance("force_eager"):
        use_cache = cache_is_exact(model)
        steps = generate(
            model,
            prompt[None],
            n_tokens=n_tokens,
            vocab_size=tokenizer.vocab_size,
            seeds=[seed],
            use_cache=use_cache,
        )
        tokens = [token for (token,) in tokens_to_cpu(steps)]

    # Data may hold ids that their tokenizer lacks
    end = [token for token in prompt[-256:].tolist() if token < tokenizer.vocab_size]
    shown = tokenizer.decode_bytes(end)[-200:]
    # Start at a document or a whole line
    shown = re.sub(rb"(?s).*<\|endoftext\|>|[^\n]*\n", b"", shown, count=1)
    raw = shown + b">>>" + tokenizer.decode_bytes(tokens)
    text = printable(raw.decode("utf-8", errors="replace"))
    return text if use_cache else f"({NO_CACHE})\n{text}"
