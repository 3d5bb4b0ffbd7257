"""Autoregressive generation: the KV cache, and sampling one token at a time."""

import torch
from torch import Tensor, nn

from common import UserError, printable
from model import gather_positions, may_attend, shift_right
from ops.attention import add_bias
from ops.parallel import reshard


class LayerCache:
    """A ring buffer of one layer's keys and values for each row's newest `size` tokens: token p is in slot p % size.

    k, v: (B, heads, size, head_dim), allocated on first use. before: what shift returns for the next token, by name.
    length: int64 (B,), tokens in each row, including those being read; shared by all layers.
    """

    def __init__(self, size: int, length: Tensor):
        self.size, self.length, self.k, self.v, self.before = size, length, None, None, {}

    def shift(self, name: str, x: Tensor) -> Tensor:
        """x (B, T, ...) of the tokens being read; returns, for each of them, the x of the token before it."""
        if name not in self.before:
            self.before[name] = torch.zeros_like(x[:, :1])
        if x.size(1) > 1:
            before, last = shift_right(x), gather_positions(x, self.length - 1)
        else:
            before, last = self.before[name].clone(), x
        self.before[name].copy_(last)
        return before

    def positions(self) -> Tensor:
        """The position of the token in each slot, int64 (B, size); negative if the slot is empty."""
        newest = self.length[:, None] - 1
        return newest - (newest - torch.arange(self.size, device=newest.device)) % self.size

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, heads, T, head_dim) of the tokens being read; returns the keys and values they attend to.

        Beyond the context, slots are no longer ordered by position; GPT.attention_bias is given the positions.
        """
        if k.size(2) > 1:  # a prompt, which attends to itself
            place = self.positions().clamp(min=0)[:, None, :, None]
            self.k, self.v = (
                t.gather(2, place.expand(*t.shape[:2], -1, t.size(3))) for t in (k, v)
            )
            return k, v
        if self.k is None:
            self.k, self.v = (t.new_zeros(*t.shape[:2], self.size, t.size(3)) for t in (k, v))
        row, slot = torch.arange(len(k), device=k.device), (self.length - 1) % self.size
        self.k[row, :, slot], self.v[row, :, slot] = k[:, :, 0], v[:, :, 0]
        return self.k, self.v


class KVCache:
    """Keys and values of the tokens read so far, in fixed-size tensors: each new token costs one position.

    Sliding-window layers keep their window, the others the newest seq_len tokens: beyond the context length, every
    layer attends to a sliding window (Mistral 7B, 2023), and no token is read twice.
    """

    def __init__(self, model: nn.Module, lengths: Tensor, capacity: int = 0):
        """lengths: int64 (B,), of the prompts that will be read; capacity: tokens expected in all, if below seq_len.

        Only prompts are read T > 1 tokens at a time; shorter prompts are right-padded with any token.
        """
        cfg, shape = model.cfg, (len(lengths), max(0, model.cfg.ngram - 1))
        self.lengths, self.length, self.doc_start = (
            lengths,
            torch.zeros_like(lengths),
            torch.zeros_like(lengths),
        )
        self.recent = torch.full(
            shape, -1, device=lengths.device
        )  # tokens that n-grams reach back to
        sizes = [min(window or cfg.seq_len, capacity or cfg.seq_len) for window in model.windows]
        self.layers = [LayerCache(size, self.length) for size in sizes]
        self.compiled_for = None  # the sampling options that a compiled step has read it with

    def tensors(self) -> list[Tensor]:
        """Every tensor that reading a token changes, once a prompt is read."""
        own = [self.length, self.doc_start, self.recent]
        return own + [
            t for layer in self.layers for t in (layer.k, layer.v, *layer.before.values())
        ]

    def read(self, idx: Tensor, eot: int | None) -> Tensor:
        """Register tokens idx (B, T) that are about to be read; returns them after those that n-grams reach back to."""
        tokens, place = (
            torch.cat((self.recent, idx), dim=1),
            torch.arange(idx.size(1), device=idx.device),
        )
        place = place + self.length[:, None]
        read = self.lengths if idx.size(1) > 1 else torch.ones_like(self.length)
        self.length += read
        if eot is not None:
            starts = (idx == eot) & (place < self.length[:, None])
            self.doc_start.copy_(
                torch.maximum(self.doc_start, torch.where(starts, place, 0).amax(1))
            )
        newest = read[:, None] + torch.arange(self.recent.size(1), device=idx.device)
        self.recent.copy_(tokens.gather(1, newest))
        return tokens

    def masks(self, model: nn.Module, position: Tensor) -> dict[int, Tensor]:
        """For each window, the slots that the token at `position` (B, 1) attends to."""
        masks = {}
        for window, layer in zip(model.windows, self.layers):
            if window in masks:
                continue
            slots = layer.positions()
            query, key = position[:, :, None], slots[:, None]  # (B, 1, 1), (B, 1, size)
            allowed = may_attend(query, key, window, True, key >= self.doc_start[:, None, None])
            allowed = (allowed & (key >= 0))[:, None]  # negative: an empty slot
            bias = model.attention_bias(position, slots)
            if bias is not None:
                bias = bias.to(model.compute_dtype)
            masks[window] = add_bias(allowed, bias)
        return masks


def random_tokens(model: nn.Module, n: int, length: int) -> Tensor:
    """Random tokens to try a model with, int64 (n, length), always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.cfg.vocab_size, (n, length), generator=generator).to(model.device)


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raises UserError for a model whose logits depend on later tokens: it would learn to copy, not to predict."""
    half = min(model.cfg.seq_len, 32) // 2
    if not half:
        return
    idx = random_tokens(model, 2, 2 * half)
    other = torch.cat((idx[:, :half], (idx[:, half:] + 1) % model.cfg.vocab_size), dim=1)
    backend, model.attn_backend = (
        model.attn_backend,
        "sdpa",
    )  # others need more tokens, or a compiler
    model.eval()
    logits = []
    for tokens in (idx, other):
        torch.manual_seed(0)  # what an edit draws in eval mode too is no leak
        logits.append(model(tokens)[:, :half])
    model.train()
    model.attn_backend = backend
    if not (logits[0] - logits[1]).abs().max() <= 0.02 * logits[0].std():
        raise UserError(
            "the model's logits change with later tokens; let each depend on itself and earlier ones only"
        )


@torch.no_grad()
def check_cache(model: nn.Module) -> None:
    """Raises UserError if the model's logits with a KV cache differ from those without, for fixed random tokens.

    Anything besides attention that looks at other tokens must go through the cache. The model must be in eval mode.
    """
    n = min(model.cfg.seq_len, max(128, 2 * max(model.windows)))
    if n < 3:
        return
    idx = random_tokens(model, 2, n)
    lengths = torch.tensor(
        [n - 2, max(1, n // 2 - 1)], device=idx.device
    )  # of the prompts; then two tokens are read
    whole, cache = model(idx), KVCache(model, lengths)
    cached = [model.next_logits(idx[:, : n - 2], cache)]
    cached += [model.next_logits(gather_positions(idx, lengths + i), cache) for i in range(2)]
    plain = [gather_positions(whole, lengths - 1 + i) for i in range(3)]
    apart = (torch.cat(cached, 1) - torch.cat(plain, 1)).abs().max().item()
    reshard(model)
    rounded = model.compute_dtype != torch.float32 or any(
        t.dtype == torch.int8 for t in model.buffers()
    )
    if not apart <= (0.5 if rounded else 1e-2) * whole.std().item() + 1e-6:
        raise UserError(
            f"logits with a KV cache differ by {apart:.2g} from those without: what looks at other tokens or positions "
            "must pass through the cache, as previous_token() and GPT.attention_bias do; sample.py --no_cache does without it"
        )


@torch.no_grad()
def generate(
    model,
    prompts,
    n_tokens,
    vocab_size,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seeds=None,
    step=None,
    use_cache=True,
):
    """Continue prompts, integer (T >= 1,) each: yields the next token of each, int64 (B,) on device, n_tokens times.

    temperature 0 is greedy; top_k keeps the k most likely tokens (0 = all), top_p the fewest whose total probability
    reaches it (Holtzman et al. 2019). Ids from vocab_size on are padding of the head and never sampled. seeds: one per
    prompt, so that its samples do not depend on the other prompts (except for rounding). A prompt longer than the
    context is truncated to its end. step: decode_step, or a compiled one. use_cache=False re-reads the last seq_len
    tokens for every new one, as nanoGPT does; its prompts must be equally long (else UserError).
    """
    device, context = model.device, model.cfg.seq_len
    prompts = [prompt[-context:] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    read = nn.utils.rnn.pad_sequence([prompt.long() for prompt in prompts], batch_first=True).to(
        device
    )
    cache, n_read = None, read.size(1) + n_tokens
    if use_cache and (model.extrapolates or n_read <= context):
        capacity = max(128, 1 << (n_read - 1).bit_length())  # few distinct sizes: each one compiles
        cache = KVCache(model, lengths, min(context, capacity))
    elif (lengths != lengths[0]).any():
        raise UserError("without a KV cache, prompts must be equally long; give one at a time")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    draws = torch.stack([torch.rand(n_tokens, 1, generator=g) for g in generators], dim=1).to(
        device
    )
    for i in range(n_tokens):
        decode = step if step and cache and i else decode_step
        token = decode(model, read, cache, draws[i], vocab_size, temperature, top_k, top_p)
        yield token[:, 0]
        read = token if cache else torch.cat((read, token), dim=1)[:, -context:]


def decode_step(
    model: nn.Module, idx: Tensor, cache, draws: Tensor, vocab_size: int, *sampling
) -> Tensor:
    """The token that follows idx (B, T) in each row, int64 (B, 1); written to compile as a single graph.

    cache: a KVCache or None. draws, sampling: as sample_token's draws, and temperature, top_k, top_p.
    """
    return sample_token(model.next_logits(idx, cache)[:, -1, :vocab_size], draws, *sampling)


def compile_decode_step(device: torch.device):
    """decode_step compiled as one graph, with CUDA graphs on a GPU, else a C++ wrapper: Python limits small kernels.

    Guards are checked once per cache and set of sampling options; a cache belongs to one model.
    """
    how = (
        dict(mode="reduce-overhead")
        if device.type == "cuda"
        else dict(options={"cpp_wrapper": True})
    )
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, **how)

    def step(model: nn.Module, idx: Tensor, cache: KVCache, draws: Tensor, *options) -> Tensor:
        checked = cache.compiled_for == options
        if not checked:
            for tensor in cache.tensors():  # CUDA graphs write them where they are
                torch._dynamo.mark_static_address(tensor)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=checked):
            token = compiled(model, idx, cache, draws, *options).clone()
        cache.compiled_for = options
        return token

    return step


def sample_token(
    logits: Tensor, draws: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """One token per row from fp32 logits (B, V), int64 (B, 1); draws: uniform random numbers in [0, 1), (B, 1)."""
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    values, order = logits.topk(
        min(top_k or logits.size(-1), logits.size(-1))
    )  # in descending order
    weights = (
        (values / temperature).softmax(-1) * 2**32
    ).long()  # sums of integers are the same everywhere
    total = weights.cumsum(-1)
    if top_p < 1:
        reached = total - weights >= total[:, -1:] * max(1, int(top_p * 2**24)) >> 24
        weights = weights.masked_fill(reached, 0)
        total = weights.cumsum(-1)
    below = total[:, -1:] * (draws * 2**24).long() >> 24
    place = (
        (total <= below).sum(-1, keepdim=True).clamp(max=values.size(-1) - 1)
    )  # past the end only for NaN logits
    return order.gather(1, place)


def tokens_to_cpu(tokens):
    """What generate yields, as lists of ints; on a GPU, each is handed out while the next is being computed."""
    host, copied = None, None
    for token in tokens:
        if host is not None:
            copied.synchronize()
            yield host.tolist()
        if token.is_cuda:
            host, copied = (
                token.to("cpu", non_blocking=True),
                torch.cuda.current_stream().record_event(),
            )
        else:
            yield token.tolist()
    if host is not None:
        yield token.tolist()


@torch.no_grad()
def sample_continuation(
    model: nn.Module, prompt: Tensor, tokenizer, n_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """The end of a prompt, integer (T,), ">>>" and the continuation by a model in eval mode; or why there is none."""
    try:
        with torch.compiler.set_stance(
            "force_eager"
        ):  # compiled blocks would be compiled again for each length
            check_cache(model)
            drawn = generate(
                model, [prompt], n_tokens, tokenizer.vocab_size, temperature, seeds=[seed]
            )
            tokens = [token for (token,) in tokens_to_cpu(drawn)]
    except Exception as error:  # of an edit that cannot be cached, which training does not need
        return f"(no sample: {'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error})"
    end = prompt[-64:]
    known = end[end < tokenizer.vocab_size].tolist()  # data may hold ids that their tokenizer lacks
    texts = [
        tokenizer.decode_bytes(part).decode("utf-8", errors="replace") for part in (known, tokens)
    ]
    return printable(">>>".join(texts))
