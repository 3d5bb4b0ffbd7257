"""Text from a model: the KV cache, and tokens drawn one after the other."""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at(x: Tensor, index: Tensor) -> Tensor:
    """Of x (B, T, ...), the entry at each row's own index, int64 (B,): (B, 1, ...)."""
    return x[torch.arange(len(x), device=x.device), index][:, None]


class LayerCache:
    """One layer's keys and values of the newest `size` tokens of each row: token number p is in slot p % size.

    k, v: (B, n_head, size, head_dim). still: (B, 1, n_head, head_dim - rotary_dim), what look_back gives to the next
    token's key. length: int64 (B,), the tokens of each row, those being read included; all layers share it.
    """

    def __init__(self, k: Tensor, v: Tensor, still: Tensor, length: Tensor):
        self.k, self.v, self.still, self.length = k, v, still, length

    def shift(self, still: Tensor) -> Tensor:
        """Of the tokens being read (B, T, n_head, D); returns what belongs to the token before each."""
        if still.size(1) > 1:
            before, last = F.pad(still, (0, 0, 0, 0, 1, -1)), at(still, self.length - 1)
        else:
            before, last = self.still.clone(), still
        self.still.copy_(last)
        return before

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v (B, n_head, T, head_dim) of the tokens being read; returns those that they attend to."""
        size, newest = self.k.size(2), self.length[:, None] - 1
        if k.size(2) > 1:  # a prompt, which attends to itself
            slot = torch.arange(size, device=k.device)
            place = (newest - (newest - slot) % size).clamp(min=0)[:, None, :, None].expand(self.k.shape)
            self.k.copy_(k.gather(2, place))
            self.v.copy_(v.gather(2, place))
            return k, v
        row, slot = torch.arange(len(k), device=k.device), newest[:, 0] % size
        self.k[row, :, slot], self.v[row, :, slot] = k[:, :, 0], v[:, :, 0]
        return self.k, self.v


class KVCache:
    """Keys and values of what a model has read, in tensors of one size: each new token costs one position.

    Layers with a sliding window keep their window, the others the newest seq_len tokens: beyond the context, every
    layer attends to a sliding window of it (Mistral 7B, 2023), and nothing is read twice.
    """

    def __init__(self, model: nn.Module, lengths: Tensor, capacity: int = 0):
        """lengths: int64 (B,), of the prompts that will be read; capacity: tokens to come in all, if less than seq_len.

        Reading T > 1 tokens at once is for prompts, which shorter ones fill up at the end with anything.
        """
        cfg, batch, device = model.cfg, len(lengths), lengths.device
        self.lengths, self.length, self.doc_start = lengths, torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.recent = torch.full((batch, max(0, cfg.ngram - 1)), -1, device=device)  # tokens that n-grams reach back to
        self.sizes = {w: min(w or cfg.seq_len, capacity or cfg.seq_len) for w in model.windows}
        self.layers = []
        for window in model.windows:
            shapes = [(batch, cfg.n_head, self.sizes[window], cfg.head_dim)] * 2
            shapes.append((batch, 1, cfg.n_head, cfg.head_dim - cfg.rotary_dim))
            tensors = (torch.zeros(shape, dtype=model.compute_dtype, device=device) for shape in shapes)
            self.layers.append(LayerCache(*tensors, self.length))

    def tensors(self) -> list[Tensor]:
        """All that a token changes."""
        own = [self.length, self.doc_start, self.recent]
        return own + [tensor for layer in self.layers for tensor in (layer.k, layer.v, layer.still)]

    def read(self, idx: Tensor, eot: int | None) -> Tensor:
        """Note the tokens idx (B, T) that are about to be read; returns them behind those that n-grams reach back to.

        Raises ValueError for a prompt where something has been read before.
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

    def mask(self, window: int) -> Tensor:
        """Which slots of a layer with this window the newest token sees, bool (B, 1, 1, size)."""
        size, newest = self.sizes[window], self.length[:, None] - 1
        age = (newest - torch.arange(size, device=newest.device)) % size
        return (age <= newest - self.doc_start[:, None])[:, None, None]


@torch.no_grad()
def generate(model: nn.Module, prompts: list[Tensor], n_tokens: int, vocab_size: int, temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, seeds: list[int] | None = None, step=None,
             use_cache: bool = True):  # fmt: skip
    """Continue prompts, integer (T >= 1,) each: yields n_tokens times the next token of all, int64 (B,), on the device.

    temperature 0 takes the likeliest token; top_k keeps the k likeliest (0 = all); top_p the fewest whose probability
    reaches it (Holtzman et al. 2019). Ids from vocab_size on are padding of the head and never drawn. seeds: one a
    prompt, so that what is drawn for it does not depend on the others (but for rounding). Of a prompt longer than the
    context, its end is read. step: decode_step, or a compiled one. use_cache=False reads the last seq_len tokens again
    for every token, as nanoGPT does; its prompts must be equally long (else ValueError).
    """
    device, context = model.cos.device, model.cfg.seq_len
    prompts = [prompt[-context:] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    idx = nn.utils.rnn.pad_sequence([prompt.long() for prompt in prompts], batch_first=True).to(device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    drawn, options = uniform(generators, device, n_tokens), (vocab_size, temperature, top_k, top_p)
    if not use_cache:
        if len(set(lengths.tolist())) > 1:
            raise ValueError("without a KV cache, prompts must be equally long")
        for draws in drawn:
            logits = model(idx[:, -context:], last=True)[:, -1, :vocab_size]
            token = sample_token(logits, draws, temperature, top_k, top_p)
            yield token[:, 0]
            idx = torch.cat((idx, token), dim=1)
        return
    capacity = max(128, 1 << (idx.size(1) + n_tokens - 1).bit_length())  # few sizes, as each is a compilation
    cache, token = KVCache(model, lengths.to(device), min(context, capacity)), idx
    for i, draws in enumerate(drawn):
        token = (step if step and i else decode_step)(model, token, cache, draws, *options)
        yield token[:, 0]


def uniform(generators: list[torch.Generator], device: torch.device, n: int):
    """Yields n times a number in [0, 1) from each generator, (B, 1), on the device; few trips there."""
    for start in range(0, n, 1024):
        block = torch.stack([torch.rand(1024, generator=generator) for generator in generators]).to(device)
        yield from block[:, : n - start].split(1, dim=1)


def decode_step(model: nn.Module, idx: Tensor, cache: KVCache, draws: Tensor, vocab_size: int, temperature: float,
                top_k: int, top_p: float) -> Tensor:  # fmt: skip
    """The token that follows idx (B, T) in each row, int64 (B, 1); a function of tensors, to be compiled whole."""
    return sample_token(model(idx, cache=cache)[:, -1, :vocab_size], draws, temperature, top_k, top_p)


def compile_decode_step(device: torch.device):
    """decode_step in one graph, on a GPU a CUDA graph, else called from C++: small kernels wait for Python.

    Whether the compiled code fits is asked once a cache and options of sampling; a cache belongs to one model.
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
    """One token a row from fp32 logits (B, V), int64 (B, 1); draws: uniform in [0, 1), (B, 1)."""
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
    place = (total <= below).sum(-1, keepdim=True).clamp(max=values.size(-1) - 1)  # beyond it are logits of NaN
    return order.gather(1, place)


def on_host(tokens):
    """What generate yields as lists of ints; on a GPU, each is handed out while the next is being made."""
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
