"""Autoregressive generation: the KV cache, and sampling one token at a time."""

import re
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.attention import add_bias
from ops.parallel import reshard
from runtime.errors import UserError


def take_positions(x: Tensor, index: Tensor) -> Tensor:
    """The entry of x (B, T, ...) at each row's own index, int64 (B,); returns (B, 1, ...)."""
    return x[torch.arange(len(x), device=x.device), index][:, None]


def shift_right(x: Tensor) -> Tensor:
    """x (B, T, ...) shifted right by one position, with zeros in the first."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (1, -1))


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
            before, last = shift_right(x), take_positions(x, self.length - 1)
        else:
            before, last = self.before[name].clone(), x
        self.before[name].copy_(last)
        return before

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, heads, T, head_dim) of the tokens being read; returns the keys and values they attend to.

        Beyond the context, slots are no longer ordered by position; GPT.attention_bias is given the positions.
        """
        if self.k is None:
            self.k, self.v = (t.new_zeros((*t.shape[:2], self.size, t.size(3))) for t in (k, v))
        newest = self.length[:, None] - 1
        if k.size(2) > 1:  # a prompt, which attends to itself
            slot = torch.arange(self.size, device=k.device)
            place = (newest - (newest - slot) % self.size).clamp(min=0)[:, None, :, None]
            self.k.copy_(k.gather(2, place.expand(self.k.shape)))
            self.v.copy_(v.gather(2, place.expand(self.v.shape)))
            return k, v
        row, slot = torch.arange(len(k), device=k.device), newest[:, 0] % self.size
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
        cfg, batch, device = model.cfg, len(lengths), lengths.device
        self.lengths, self.length, self.doc_start = lengths, torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.recent = torch.full((batch, max(0, cfg.ngram - 1)), -1, device=device)  # tokens that n-grams reach back to
        self.sizes = {w: min(w or cfg.seq_len, capacity or cfg.seq_len) for w in model.windows}
        self.layers = [LayerCache(self.sizes[window], self.length) for window in model.windows]

    def tensors(self) -> list[Tensor]:
        """Every tensor that reading a token changes."""
        own = [self.length, self.doc_start, self.recent]
        return own + [t for layer in self.layers for t in (layer.k, layer.v, *layer.before.values()) if t is not None]

    def read(self, idx: Tensor, eot: int | None) -> Tensor:
        """Register tokens idx (B, T) that are about to be read; returns them after those that n-grams reach back to.

        Raises ValueError for a prompt if the cache already holds tokens.
        """
        prompt = idx.size(1) > 1
        if prompt and self.length.any():
            raise ValueError("a KV cache that holds tokens takes one token at a time; make a new one for a new prompt")
        tokens, place = torch.cat((self.recent, idx), dim=1), torch.arange(idx.size(1), device=idx.device)
        place = place + self.length[:, None]
        read = self.lengths if prompt else torch.ones_like(self.length)
        self.length += read
        if eot is not None:
            starts = (idx == eot) & (place < self.length[:, None])
            self.doc_start.copy_(torch.maximum(self.doc_start, torch.where(starts, place, 0).amax(1)))
        newest = read[:, None] + torch.arange(self.recent.size(1), device=idx.device)
        self.recent.copy_(tokens.gather(1, newest))
        return tokens

    def positions(self, window: int) -> Tensor:
        """Positions of the tokens in the slots of a layer with this window, int64 (B, size); negative if empty."""
        size, newest = self.sizes[window], self.length[:, None] - 1
        return newest - (newest - torch.arange(size, device=newest.device)) % size

    def mask(self, window: int) -> Tensor:
        """Which slots of a layer with this window the newest token sees, bool (B, 1, 1, size)."""
        return (self.positions(window) >= self.doc_start[:, None])[:, None, None]


def next_logits(model: nn.Module, idx: Tensor, cache: KVCache | None = None) -> Tensor:
    """Logits of the token that follows each row of idx (B, T), fp32 (B, 1, vocab_size), with the blocks of training.

    With a cache, idx is the prompts if the cache is empty, else (B, 1): the tokens after those that it holds.
    """
    tokens = idx if cache is None else cache.read(idx, model.doc_eot)
    if cache is not None and idx.size(1) == 1:
        position = cache.length[:, None] - 1
        biases = {w: model.attention_bias(position, cache.positions(w)) for w in set(model.windows)}
        masks = {w: add_bias(cache.mask(w), bias) for w, bias in biases.items()}
        backend = "sdpa"
    else:
        position = torch.arange(idx.size(1), device=idx.device)
        backend = model.attn_backend if cache is None else "sdpa"
        masks = model.attention_masks(backend, idx)
    x = model.hidden(tokens, position, masks, backend, cache and cache.layers)
    last = x[:, -1:] if cache is None or idx.size(1) == 1 else take_positions(x, cache.lengths - 1)
    return model.logits(last)


def some_tokens(model: nn.Module, n: int, length: int) -> Tensor:
    """Random tokens to try a model with, int64 (n, length), always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.cfg.vocab_size, (n, length), generator=generator).to(model.device)


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raises UserError for a model whose logits depend on later tokens: it would learn to copy, not to predict."""
    n = min(model.cfg.seq_len, 32)
    if n < 2:
        return
    idx = some_tokens(model, 2, n)
    other = torch.cat((idx[:, : n // 2], (idx[:, n // 2 :] + 1) % model.cfg.vocab_size), dim=1)
    backend, model.attn_backend = model.attn_backend, "sdpa"  # others need more tokens, or a compiler
    model.eval()
    logits = []
    for tokens in (idx, other):
        torch.manual_seed(0)  # what an edit draws in eval mode too is no leak
        logits.append(model(tokens)[:, : n // 2])
    before, after = logits
    model.train()
    model.attn_backend = backend
    if not (after - before).abs().max() <= 0.02 * before.std():
        found = "the model's logits change with later tokens, so it would see the tokens that it is to predict"
        raise UserError(f"{found}; let each position depend on itself and earlier ones only")


@torch.no_grad()
def check_cache(model: nn.Module) -> None:
    """Raises UserError if the model's logits with a KV cache differ from those without, for fixed random tokens.

    Anything besides attention that looks at other tokens must go through the cache. The model must be in eval mode.
    """
    n = min(model.cfg.seq_len, max(128, 2 * max(model.windows)))
    if n < 3:
        return
    idx, apart = some_tokens(model, 2, n), 0.0
    rounded = model.compute_dtype != torch.float32 or any(name.endswith("_int8") for name, _ in model.named_buffers())
    whole = model(idx)
    for lengths in ([n - 2, max(1, n // 2 - 1)], [1, 1]):  # of the prompts
        lengths = torch.tensor(lengths, device=idx.device)
        cache = KVCache(model, lengths)
        for place in (lengths - 1, lengths, lengths + 1):  # of the newest tokens: the prompt's end, two steps
            read = take_positions(idx, place) if cache.length.any() else idx[:, : lengths.max()]
            apart = max(apart, (model.next_logits(read, cache) - take_positions(whole, place)).abs().max().item())
    reshard(model)
    if not apart <= (0.5 if rounded else 1e-2) * whole.std().item() + 1e-6:
        advice = "what looks at other tokens or at positions must pass through the cache, as previous(), "
        advice += "GPT.attention_bias and GPT.embed's position do; sample.py --no_cache samples without it"
        raise UserError(f"logits with a KV cache differ by {apart:.2g} from those without: {advice}")


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[Tensor],
    n_tokens: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seeds: list[int] | None = None,
    step=None,
    use_cache: bool = True,
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
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    idx = nn.utils.rnn.pad_sequence([prompt.long() for prompt in prompts], batch_first=True).to(device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    drawn, options = uniform(generators, device, n_tokens), (vocab_size, temperature, top_k, top_p)
    if not model.extrapolates and idx.size(1) + n_tokens > context:
        use_cache = False
    if not use_cache:
        if len(set(lengths.tolist())) > 1:
            raise UserError("without a KV cache, prompts must be equally long; give one at a time")
        for draws in drawn:
            logits = model.next_logits(idx[:, -context:])[:, -1, :vocab_size]
            token = sample_token(logits, draws, temperature, top_k, top_p)
            yield token[:, 0]
            idx = torch.cat((idx, token), dim=1)
        return
    capacity = max(128, 1 << (idx.size(1) + n_tokens - 1).bit_length())  # few distinct sizes: each one compiles
    cache, token = KVCache(model, lengths.to(device), min(context, capacity)), idx
    for i, draws in enumerate(drawn):
        token = (step if step and i else decode_step)(model, token, cache, draws, *options)
        yield token[:, 0]


def uniform(generators: list[torch.Generator], device: torch.device, n: int):
    """Yields, n times, a uniform number in [0, 1) from each generator, (B, 1) on the device; copied there in blocks."""
    for start in range(0, n, 1024):
        block = torch.stack([torch.rand(1024, generator=generator) for generator in generators]).to(device)
        yield from block[:, : n - start].split(1, dim=1)


def decode_step(model: nn.Module, idx: Tensor, cache: KVCache, draws: Tensor, vocab_size: int, *options) -> Tensor:
    """The token that follows idx (B, T) in each row, int64 (B, 1); written to compile as a single graph.

    options: of sample_token.
    """
    return sample_token(model.next_logits(idx, cache)[:, -1, :vocab_size], draws, *options)


def compile_decode_step(device: torch.device):
    """decode_step compiled as one graph, with CUDA graphs on a GPU, else a C++ wrapper: Python limits small kernels.

    Guards are checked once per cache and set of sampling options; a cache belongs to one model.
    """
    how = dict(mode="reduce-overhead") if device.type == "cuda" else dict(options={"cpp_wrapper": True})
    compiled, seen = torch.compile(decode_step, fullgraph=True, dynamic=False, **how), weakref.WeakKeyDictionary()

    def step(model: nn.Module, idx: Tensor, cache: KVCache, *args) -> Tensor:
        checked = seen.get(cache) == args[1:]
        if not checked:
            for tensor in cache.tensors():  # CUDA graphs write them where they are
                torch._dynamo.mark_static_address(tensor)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=checked):
            token = compiled(model, idx, cache, *args).clone()
        seen[cache] = args[1:]
        return token

    return step


def sample_token(logits: Tensor, draws: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """One token per row from fp32 logits (B, V), int64 (B, 1); draws: uniform random numbers in [0, 1), (B, 1)."""
    if temperature < 1e-6:  # dividing by less overflows
        return logits.argmax(-1, keepdim=True)
    values, order = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # in descending order
    weights = ((values / temperature).softmax(-1) * 2**32).long()  # sums of integers are the same everywhere
    total = weights.cumsum(-1)
    if top_p < 1:
        reached = total - weights >= total[:, -1:] * max(1, int(top_p * 2**24)) >> 24
        weights = weights.masked_fill(reached, 0)
        total = weights.cumsum(-1)
    below = total[:, -1:] * (draws * 2**24).long() >> 24
    place = (total <= below).sum(-1, keepdim=True).clamp(max=values.size(-1) - 1)  # past the end only for NaN logits
    return order.gather(1, place)


def on_host(tokens):
    """What generate yields, as lists of ints; on a GPU, each is handed out while the next is being computed."""
    pending = []
    for token in tokens:
        if token.is_cuda:
            host = torch.empty(token.shape, dtype=token.dtype, pin_memory=True).copy_(token, non_blocking=True)
            pending.append((host, torch.cuda.current_stream().record_event()))
        else:
            pending.append((token, None))
        while len(pending) > token.is_cuda:
            yield read_when_there(*pending.pop(0))
    for item in pending:
        yield read_when_there(*item)


def read_when_there(host: Tensor, event) -> list[int]:
    if event is not None:
        event.synchronize()
    return host.tolist()


def printable(text: str) -> str:
    """The text with control characters, which can change a terminal's state, replaced."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


@torch.no_grad()
def complete(model: nn.Module, prompt: Tensor, tokenizer, n_tokens: int, seed: int, temperature: float = 0.8) -> str:
    """A prompt, integer (T,), ">>>" and the continuation by a model in eval mode; or why there is none."""
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled blocks would be compiled again for each length
            check_cache(model)
            drawn = generate(model, [prompt], n_tokens, tokenizer.vocab_size, temperature, seeds=[seed])
            tokens = [token for (token,) in on_host(drawn)]
    except Exception as error:  # of an edit that cannot be cached, which training does not need
        return f"(no sample: {'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error})"
    known = prompt[prompt < tokenizer.vocab_size].tolist()  # data may hold ids that their tokenizer lacks
    texts = [tokenizer.decode_bytes(part).decode("utf-8", errors="replace") for part in (known, tokens)]
    return printable(">>>".join(texts))
