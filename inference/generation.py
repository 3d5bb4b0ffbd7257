"""Autoregressive generation: the KV cache, and sampling one token at a time.

GPT.backbone(idx, cache) adds idx to the cache: prompts at once, then one token per row. A layer
attends by SDPA to what its LayerCache holds, under masks that KVCache.add makes.
"""

import math

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.values import printable
from model import GPT, Linear, may_attend
from ops.compile import keep_gcc_from_copying
from ops.elementwise import shift_right
from ops.parallel import reshard, unshard

# --------------------------------------------------------------------------------------------------
# KV cache


def gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """Take the entry of x (B, T, ...) at each row's own index, int64 (B,): (B, 1, ...)."""
    rows = torch.arange(len(x), device=x.device)
    return x[rows, index][:, None]


class LayerCache:
    """Stores one layer's keys and values of each row's newest `size` tokens, in a ring buffer.

    Token p is in slot p % size. Prompts are read first, T > 1 tokens at once, padded on the right;
    after that one token (T = 1) per row.

    length: tokens in each row, those being read included, int64 (B,); all layers share it.
    k, v: (B, heads, size, head_dim), allocated on first use.
    newest: the x (B, 1, ...) of each row's newest token, by the name that shift was called with.
    """

    def __init__(self, size: int, length: Tensor):
        self.size = size
        self.length = length
        self.k = None
        self.v = None
        self.newest = {}

    def shift(self, name: str, x: Tensor) -> Tensor:
        """Return the x of the previous token for each token being read; x (B, T, ...) is theirs."""
        if name not in self.newest:
            self.newest[name] = torch.zeros_like(x[:, :1])
        if x.size(1) > 1:  # prompts
            previous = shift_right(x)
            newest = gather_positions(x, self.length - 1)
        else:
            previous = self.newest[name].clone()
            newest = x
        self.newest[name].copy_(newest)
        return previous

    def positions(self) -> Tensor:
        """Return the position of the token in each slot, int64 (B, size); negative if empty."""
        newest = self.length[:, None] - 1
        return newest - (newest - torch.arange(self.size, device=newest.device)) % self.size

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, heads, T, head_dim) of the tokens being read; return what they attend to.

        The ring buffer wraps around after `size` tokens: then slots are not in order of position.
        """
        if self.k is None:  # prompts; empty slots get the first token, but are masked
            positions = self.positions().clamp(min=0)[:, None, :, None]
            self.k = k.take_along_dim(positions, dim=2)
            self.v = v.take_along_dim(positions, dim=2)
        else:
            rows = torch.arange(len(k), device=k.device)
            slots = (self.length - 1) % self.size
            self.k[rows, :, slots] = k[:, :, 0]
            self.v[rows, :, slots] = v[:, :, 0]
        if k.size(2) > 1:
            return k, v  # a prompt attends to itself
        return self.k, self.v


class KVCache:
    """Stores keys and values of the tokens read so far, so that a new token costs one position.

    Layers with a sliding window keep that window, the others the newest seq_len tokens: beyond the
    context length, every layer attends to a sliding window (Mistral 7B, 2023), and no token is read
    twice. All tensors have a fixed size.
    """

    def __init__(self, model: nn.Module, prompt_lengths: Tensor, capacity: int = 0):
        """Make an empty cache for prompts of these lengths, int64 (B,).

        capacity: how many tokens are expected in all, if fewer than seq_len. Prompts are read at
        once, padded on the right with any token; after that one token per row.
        """
        cfg = model.cfg
        self.prompt_lengths = prompt_lengths
        self.length = torch.zeros_like(prompt_lengths)
        self.doc_start = torch.zeros_like(prompt_lengths)
        # The newest tokens, which n-grams reach back to
        n_recent = max(0, cfg.ngram - 1)
        self.recent = torch.full((len(prompt_lengths), n_recent), -1, device=prompt_lengths.device)
        self.layers = []
        for window in model.windows:
            size = min(window or cfg.seq_len, capacity or cfg.seq_len)
            self.layers.append(LayerCache(size, self.length))
        self.compiled_for = None  # sampling options of the compiled step that has used this cache

    def tensors(self) -> list[Tensor]:
        """Return every tensor that reading a token changes, once the prompts are read."""
        tensors = [self.length, self.doc_start, self.recent]
        for layer in self.layers:
            if layer.k is not None:  # else the layer has no attention
                tensors += [layer.k, layer.v]
            tensors += layer.newest.values()
        return tensors

    def add(self, model: GPT, idx: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor | None]]:
        """Add the tokens idx (B, T), which GPT.backbone is about to read.

        Returns
        - the ngram - 1 tokens before idx, then idx
        - the positions of idx, (T,) for prompts, else (B, 1)
        - each window's mask for SDPA, over the prompt's own tokens or over the slots
        """
        n_new = self.prompt_lengths if idx.size(1) > 1 else torch.ones_like(self.length)
        columns = torch.arange(idx.size(1), device=idx.device)
        position = self.length[:, None] + columns
        self.length += n_new

        # Where the document of each row's newest token starts, padding left out
        if model.eot is not None:
            is_start = (idx == model.eot) & (position < self.length[:, None])
            newest_start = torch.where(is_start, position, 0).amax(1)
            self.doc_start.copy_(torch.maximum(self.doc_start, newest_start))

        # Remember the newest tokens
        tokens = torch.cat((self.recent, idx), dim=1)
        newest = n_new[:, None] + torch.arange(self.recent.size(1), device=idx.device)
        self.recent.copy_(tokens.gather(1, newest))

        if idx.size(1) > 1:
            return tokens, columns, model.attention_masks(idx, "sdpa")
        return tokens, position, self.masks(model, position)

    def masks(self, model: nn.Module, position: Tensor) -> dict[int, Tensor]:
        """For each window, the slots that the token at `position` (B, 1) attends to."""
        masks = {}
        for window, layer in zip(model.windows, self.layers):
            if window in masks:
                continue
            query, key = position[:, :, None], layer.positions()[:, None]  # (B, 1, 1), (B, 1, size)
            allowed = may_attend(query, key, window, True, key >= self.doc_start[:, None, None])
            masks[window] = (allowed & (key >= 0))[:, None]  # negative: an empty slot
        return masks


# --------------------------------------------------------------------------------------------------
# Preparing and checking a model


def freeze(model: GPT) -> GPT:
    """Prepare a model for inference and return it: no gradients, weights in the compute dtype.

    Linear layers then cast their weight matrices once, not at each use.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight.data = module.weight.data.to(model.compute_dtype)
    return model.eval().requires_grad_(False)


def random_tokens(model: nn.Module, n: int, length: int) -> Tensor:
    """Return random tokens to try a model with, int64 (n, length), always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.cfg.vocab_size, (n, length), generator=generator).to(model.device)


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raise UserError if logits depend on later tokens: the model would learn to copy them."""
    half = min(model.cfg.seq_len, 32) // 2
    if half == 0:
        return
    idx = random_tokens(model, 2, 2 * half)
    changed = (idx + 1) % model.cfg.vocab_size
    changed[:, :half] = idx[:, :half]

    backend = model.attn_backend
    model.attn_backend = "sdpa"  # others need more tokens, or a compiler
    model.eval()
    logits = []
    for tokens in (idx, changed):
        torch.manual_seed(0)  # for models that draw random numbers in eval mode, too
        logits.append(model(tokens)[:, :half])
    model.train()
    model.attn_backend = backend

    difference = (logits[0] - logits[1]).abs().max()
    if not difference <= 0.02 * logits[0].std():  # also if it is NaN
        raise UserError(
            "the model's logits change with later tokens; "
            "let each depend on itself and earlier ones only"
        )


@torch.no_grad()
def check_cache(model: nn.Module) -> None:
    """Raise UserError if logits with a KV cache differ from those without, for random tokens.

    Anything besides attention that looks at other tokens must go through the cache. The model must
    be in eval mode.
    """
    T = min(model.cfg.seq_len, max(128, 2 * max(model.windows)))
    if T < 3:
        return
    # Read two prompts of different lengths, then two more tokens of each
    idx = random_tokens(model, 2, T)
    lengths = torch.tensor([T - 2, max(1, T // 2 - 1)], device=idx.device)
    logits = model(idx)
    expected = [gather_positions(logits, lengths - 1)]
    cache = KVCache(model, lengths)
    cached = [next_logits(model, idx[:, : T - 2], cache)]
    for i in range(2):
        expected.append(gather_positions(logits, lengths + i))
        cached.append(next_logits(model, gather_positions(idx, lengths + i), cache))
    reshard(model)

    difference = (torch.cat(cached, 1) - torch.cat(expected, 1)).abs().max().item()
    tolerance = 1e-2
    in_int8 = any(buffer.dtype == torch.int8 for buffer in model.buffers())
    if in_int8 or model.compute_dtype != torch.float32:
        tolerance = 0.5
    if not difference <= tolerance * logits.std().item() + 1e-6:  # also if it is NaN
        raise UserError(
            f"logits with a KV cache differ by {difference:.2g} from those without: what looks at "
            "other tokens must pass through the cache, as previous_token() does, and what depends "
            "on positions must use those of GPT.backbone; sample.py --no_cache does without it"
        )


# --------------------------------------------------------------------------------------------------
# Generation


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[Tensor],
    *,
    n_tokens: int,
    vocab_size: int,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seeds=None,
    step=None,
    use_cache=True,
):
    """Continue prompts, integer (T >= 1,) each: yield the next token of each, n_tokens times.

    Tokens are int64 (B,) on the model's device. A prompt longer than the context is truncated to
    its end.

    vocab_size: ids from vocab_size on are padding of the head and are never sampled.
    temperature: 0 is greedy decoding.
    top_k: sample from the k most likely tokens; 0 = all.
    top_p: of these, from the fewest whose probabilities sum to it (Holtzman et al. 2019).
    seeds: one per prompt, so that its samples do not depend on the other prompts, except for
    rounding. Default: 0, 1, 2, ...
    step: of compile_decode_step; by default, decode_step.
    use_cache: False re-reads the last seq_len tokens for every new one, as nanoGPT does. Then
    prompts must be equally long (else UserError).
    """
    device = model.device
    context = model.cfg.seq_len
    prompts = [prompt[-context:].long() for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    idx = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
    total = idx.size(1) + n_tokens
    cache = None
    if use_cache:
        # Powers of 2, because each size is compiled
        capacity = max(128, 2 ** math.ceil(math.log2(total)))
        cache = KVCache(model, lengths, min(context, capacity))
    elif (lengths != lengths[0]).any():
        raise UserError("without a KV cache, prompts must be equally long; give one at a time")

    # All random numbers are drawn before: n_tokens for each prompt
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    uniform = torch.stack([torch.rand(n_tokens, 1, generator=g) for g in generators], dim=1)
    uniform = uniform.to(device)

    sampling = dict(vocab_size=vocab_size, temperature=temperature, top_k=top_k, top_p=top_p)
    decode = decode_step  # eager for prompts: each length would be compiled
    for i in range(n_tokens):
        token = decode(model, idx, cache, uniform[i], **sampling)
        yield token[:, 0]
        if cache is None:
            idx = torch.cat((idx, token), dim=1)[:, -context:]
        else:
            idx = token
            decode = step or decode_step


def next_logits(model: GPT, idx: Tensor, cache: KVCache | None) -> Tensor:
    """Return the logits of the token that follows each row of idx (B, T): fp32 (B, 1, vocab_size).

    With an empty cache, idx is prompts, padded on the right; then the newest token of each row.
    """
    unshard(model)
    x = model.backbone(idx, cache)
    if cache is not None and idx.size(1) > 1:
        x = gather_positions(x, cache.length - 1)  # before the padding
    return model.logits(x[:, -1:])


def decode_step(
    model: nn.Module,
    idx: Tensor,
    cache: KVCache | None,
    uniform: Tensor,
    vocab_size: int,
    **sampling,
) -> Tensor:
    """Return the token that follows idx (B, T) in each row, int64 (B, 1); compiles as one graph.

    uniform, sampling: the arguments of sample_token.
    """
    logits = next_logits(model, idx, cache)[:, -1, :vocab_size]
    return sample_token(logits, uniform, **sampling)


def compile_decode_step(device: torch.device):
    """Compile decode_step as one graph, with CUDA graphs on a GPU, else with a C++ wrapper.

    Both keep Python's overhead away from small kernels. Guards are checked once per cache and set
    of sampling options; a cache belongs to one model.
    """
    if device.type == "cuda":
        backend = dict(mode="reduce-overhead")
    else:
        keep_gcc_from_copying()
        backend = dict(options={"cpp_wrapper": True})
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, **backend)

    def step(model, idx, cache, uniform, **sampling):
        guards_checked = cache.compiled_for == sampling
        if not guards_checked:
            for tensor in cache.tensors():  # CUDA graphs write them where they are
                torch._dynamo.mark_static_address(tensor)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=guards_checked):
            token = compiled(model, idx, cache, uniform, **sampling).clone()
        cache.compiled_for = sampling
        return token

    return step


def sample_token(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Tensor:
    """Draw one token per row from fp32 logits (B, V): int64 (B, 1).

    uniform: random numbers in [0, 1), (B, 1). Probabilities become integers, whose sums are exact:
    the same seed gives the same text on every device.
    """
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    k = min(top_k or logits.size(-1), logits.size(-1))
    top_logits, tokens = logits.topk(k)  # in descending order
    weights = ((top_logits / temperature).softmax(-1) * 2**32).long()
    cumulative = weights.cumsum(-1)
    if top_p < 1:
        # Drop the tokens before which the sum has reached top_p already
        threshold = (cumulative[:, -1:] * max(1, int(top_p * 2**24))) >> 24
        weights = weights.masked_fill(cumulative - weights >= threshold, 0)
        cumulative = weights.cumsum(-1)
    # Inverse transform sampling: the first token at which the sum exceeds a part of the total
    target = (cumulative[:, -1:] * (uniform * 2**24).long()) >> 24
    index = (cumulative <= target).sum(-1, keepdim=True)
    return tokens.gather(1, index.clamp(max=k - 1))  # NaN logits would give k


def tokens_to_cpu(steps):
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
    model: nn.Module, prompt: Tensor, tokenizer, n_tokens: int, seed: int
) -> str:
    """Return the end of a prompt, integer (T,), ">>>" and its continuation, or why there is none.

    The model must be in eval mode.
    """
    tokens = []
    try:
        # Eager, because compiled blocks would be compiled again for each length
        with torch.compiler.set_stance("force_eager"):
            check_cache(model)
            steps = generate(
                model,
                [prompt],
                n_tokens=n_tokens,
                vocab_size=tokenizer.vocab_size,
                temperature=0.8,
                seeds=[seed],
            )
            for step_tokens in tokens_to_cpu(steps):
                tokens += step_tokens
    except UserError as error:
        return f"(no sample: {error})"
    except Exception as error:  # training goes on with an edited model that cannot be cached
        return f"(no sample: {type(error).__name__}: {error})"

    # Data may hold ids that their tokenizer lacks
    end = [token for token in prompt[-64:].tolist() if token < tokenizer.vocab_size]
    text = tokenizer.decode_bytes(end) + b">>>" + tokenizer.decode_bytes(tokens)
    return printable(text.decode("utf-8", errors="replace"))
