"""What is computed: GPT, the table of its parameters, and its optimizer (Muon + Adam).

Read from top to bottom: GPTConfig, modules, GPT, parameter table, optimizer. ops/ has other ways to compute the same
(attention backends, chunks of the loss, fp8, checkpointing, sharding); generation.py generates text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from generation import LayerCache, next_logits, shift_right
from ops.attention import attention, attention_mask, cached_attention
from ops.cpu import EagerReLUSquared, EagerRMSNorm, trains_eagerly
from ops.linear import is_matvec, matvec
from ops.loss import SoftcapCrossEntropy, chunked_loss, softcap_fwd_bwd
from ops.parallel import gather_matrices, replica_part, scatter_updates, state_on_device, to_local

# ---------------------------------------------------------------------------------------------------------------------
# 1. GPTConfig


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. A checkpoint stores these fields, and nothing else is needed to rebuild the model."""

    vocab_size: int = 50304
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    window: str = "L"  # one letter per layer, tiled: L full context, S sliding window; "SSSL:256" sets its width
    ngram: int = 0  # longest n-gram with a hashed embedding, added to each token's own; below 2 disables
    ngram_rows: int = 16384  # embeddings that all n-grams share, by hash
    softcap: float = 15.0  # tanh soft-capping of logits to (-softcap, softcap); 0 disables
    rope_theta: float = 10000.0
    version: int = 3  # of the computation below; checkpoints of another version are refused

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated by position; the others are free to carry content."""
        return self.head_dim // 4 * 2

    def layer_windows(self) -> list[int]:
        """Keys that each query sees in each layer, its own included (0 = the whole context)."""
        pattern, _, size = self.window.partition(":")
        size = int(size or max(1, self.seq_len // 4))
        size = size if size < self.seq_len else 0
        return [size if pattern[i % len(pattern)] == "S" else 0 for i in range(self.n_layer)]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Modules


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension of x (..., D), without a gain."""
    return EagerRMSNorm.apply(x) if trains_eagerly(x) else F.rms_norm(x, (x.size(-1),))


def relu_squared(x: Tensor) -> Tensor:
    """ReLU squared (So et al. 2021)."""
    return EagerReLUSquared.apply(x) if trains_eagerly(x) else F.relu(x).square()


class Linear(nn.Linear):
    """Bias-free linear layer in the activations' dtype: the weight stays fp32 and is cast at each use.

    Several n_out: that many matrices stacked in one weight; Muon orthogonalizes each separately.
    """

    matmul = staticmethod(F.linear)  # or another way to compute x @ w.T, as with --fp8

    def __init__(self, n_in: int, *n_out: int):
        super().__init__(n_in, sum(n_out), bias=False)
        self.split = n_out

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.to(x.dtype)
        return matvec(x, w).to(x.dtype) if is_matvec(x) else self.matmul(x, w)


HASH_A, HASH_B, HASH_MODULUS = 0x9E3779B1, 0x85EBCA6B, 1 << 31  # multipliers of xxHash and MurmurHash; int64 suffices


def ngram_hashes(tokens: Tensor, length: int, longest: int, eot: int | None) -> Tensor:
    """Hashes of the n-grams of 2 to `longest` tokens that end at each of the last `length` of tokens (B, S).

    int64 (B, length, longest - 1). Where an n-gram would reach back past the start of the context, or of its document
    (which begins with `eot`), it has "no token".
    """
    tokens = tokens[:, -(length + longest - 1) :]
    doc_ids = None if eot is None else (tokens == eot).cumsum(1)
    code, codes = tokens[:, -length:].long() + 1, []
    for back in range(1, longest):
        before = F.pad(tokens + 1, (back, 0))[:, -length - back : -back]
        if doc_ids is not None:
            same_doc = doc_ids == F.pad(doc_ids, (back, 0), value=-1)[:, :-back]
            before = before * same_doc[:, -length:]
        code = (code * HASH_A + before) % HASH_MODULUS
        codes.append(code)
    return torch.stack(codes, -1)


def hashed_uniform(code: Tensor, place: Tensor, seed: int) -> Tensor:
    """Pseudo-random numbers in [0, 1), fp32: functions of int64 code (N, M), its place (N, 1) and the seed."""
    for mixed_in in (place * HASH_B % HASH_MODULUS, seed % HASH_MODULUS):  # multiplying and folding, as in MurmurHash
        code = (code ^ mixed_in) * HASH_A % HASH_MODULUS
        code = (code ^ (code >> 15)) * HASH_B % HASH_MODULUS
        code = code ^ (code >> 13)
    return (code % (1 << 24)) / (1 << 24)


class NgramEmbedding(nn.Embedding):
    def forward(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of rows, int64 (N, M), with weights (N, M) or None (ones): fp32 (N, n_embd)."""
        options = dict(mode="sum", per_sample_weights=weights, sparse=self.sparse)
        return F.embedding_bag(rows, self.weight.float(), **options)


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (B, T, H, D) in its first R dimensions; cos, sin (T, 1, R/2)."""
    half = cos.size(-1)
    x1, x2, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest), dim=-1)


class AttnContext(NamedTuple):
    """What a block gets besides x (B, T, n_embd)."""

    cos: Tensor  # (T, 1, rotary_dim / 2) or (B, T, 1, rotary_dim / 2), in the compute dtype
    sin: Tensor
    starts: Tensor | None  # bool (B, T, 1, 1), where a document begins; None: ignore documents
    mask: object  # attention_mask's result for this layer's window
    backend: str  # of attention
    values: Tensor  # value embeddings of the tokens, (B, T, n_embd)
    past: LayerCache | None = None  # this layer's KV cache, during generation only


def previous(name: str, x: Tensor, ctx: AttnContext) -> Tensor:
    """x (B, T, ...) of the previous token, also in cached decoding; zeros where there is none.

    name: the key of this use in the layer's cache, unique within the layer.
    """
    before = shift_right(x) if ctx.past is None else ctx.past.shift(name, x)
    if ctx.starts is None:
        return before
    return before.masked_fill(ctx.starts.view(*ctx.starts.shape[:2], *[1] * (x.dim() - 2)), 0)


def shift_keys(k: Tensor, rotary_dim: int, ctx: AttnContext) -> Tensor:
    """Keys (B, T, H, D) whose dimensions beyond rotary_dim are the previous token's; zeros where there is none.

    Partial key offset (NanoGPT speedrun): one layer instead of two is enough to find what followed an earlier token
    like the query's (one-layer induction).
    """
    k_rot, k_pass = k.split((rotary_dim, k.size(-1) - rotary_dim), dim=-1)
    return torch.cat((k_rot, previous("key", k_pass, ctx)), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with QK-norm (Henry et al. 2020) and gated value embeddings (NanoGPT speedrun)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim, self.rotary_dim = cfg.n_head, cfg.head_dim, cfg.rotary_dim
        self.qkv = Linear(cfg.n_embd, cfg.n_embd, cfg.n_embd, cfg.n_embd)
        self.gate = Linear(cfg.n_embd, cfg.n_head)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def start_as_induction_head(self) -> None:
        """Give keys the queries' weights where they are the previous token's: what followed a like token is found.

        Left to chance, some runs never learn to copy from their context. Induction heads: Olsson et al. 2022; starts
        like this: mimetic initialization (Trockman and Kolter 2023).
        """
        q, k = (w.view(-1, self.head_dim, w.size(1)) for w in self.qkv.weight.split(self.qkv.split)[:2])
        k[:, self.rotary_dim :] = q[:: len(q) // len(k), self.rotary_dim :]

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        batch, length, n_embd = x.shape
        qk, v = self.qkv(x).view(batch, length, 3 * self.n_head, self.head_dim).split((2 * self.n_head, self.n_head), 2)
        v = v + 2 * self.gate(x).sigmoid()[..., None] * ctx.values.view(v.shape)
        q, k = norm(qk).split(self.n_head, 2)
        q = apply_rotary_emb(q, ctx.cos, ctx.sin)
        k = apply_rotary_emb(shift_keys(k, self.rotary_dim, ctx), ctx.cos, ctx.sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if ctx.past is not None:
            k, v = ctx.past.append(k, v)
        y = attention(q, k, v, ctx.mask, ctx.backend) if ctx.past is None else cached_attention(q, k, v, ctx.mask)
        return self.proj(y.transpose(1, 2).reshape(batch, length, n_embd))


class MLP(nn.Module):
    """Feed-forward layer with a hidden width of 4 * n_embd and squared ReLU."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.proj = Linear(4 * cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(relu_squared(self.fc(x)))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        x = x + self.attn(norm(x), ctx)
        return x + self.mlp(norm(x))


def softcap(logits: Tensor, cap: float) -> Tensor:
    """tanh soft-capping to (-cap, cap) (Gemma 2, 2024); 0 disables."""
    return cap * torch.tanh(logits / cap) if cap else logits


class CrossEntropy(nn.Module):
    """The loss, in training and evaluation: the mean over targets that are not -1."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.softcap, self.kernel = cfg.softcap, softcap_fwd_bwd

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: of the head, not yet capped, in the compute dtype, (N, vocab_size); targets: int64 (N,)."""
        if logits.requires_grad and 0 < self.softcap < 35:
            # What follows, with its gradient by hand: 8,192 tokens of 1,024, bf16, with the head's matmuls, take 34 ms
            # instead of 47, compiled 30 instead of 46 (2 cores of an EPYC). Edits of the loss go above it
            return SoftcapCrossEntropy.apply(logits, targets, self.softcap, self.kernel)
        return F.cross_entropy(softcap(logits.float(), self.softcap), targets, ignore_index=-1)


# ---------------------------------------------------------------------------------------------------------------------
# 3. GPT: embeddings, blocks, head, loss


class GPT(nn.Module):
    """Token ids in, loss or logits out. Weights are fp32; activations have the dtype `compute_dtype`.

    Only speed, memory and rounding depend on `attn`, the attention backend, and `loss_chunk`, how many tokens' logits
    exist at once (0 = all). `doc_eot` is the token that starts a document; if given, tokens do not attend across
    documents. `ngram_dropout` is the probability of dropping an n-gram in training mode, which depends on the n-gram,
    its position and `step_seed` (new each step), not on ranks or micro-batches.
    """

    extrapolates = True  # False: positions end at seq_len, so longer texts are drawn from their last seq_len tokens

    def __init__(
        self,
        cfg: GPTConfig,
        compute_dtype: torch.dtype = torch.float32,
        loss_chunk: int = 0,
        attn: str = "sdpa",
        doc_eot: int | None = None,
        ngram_dropout: float = 0.0,
    ):
        super().__init__()
        self.cfg, self.compute_dtype, self.loss_chunk, self.attn_backend = cfg, compute_dtype, loss_chunk, attn
        self.doc_eot, self.ngram_dropout, self.step_seed = doc_eot, ngram_dropout, 0
        self.windows = cfg.layer_windows()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.value_embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.ngrams = NgramEmbedding(cfg.ngram_rows, cfg.n_embd) if cfg.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)
        self.cross_entropy = CrossEntropy(cfg)
        half = cfg.rotary_dim // 2
        frequency = cfg.rope_theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        angle = torch.outer(torch.arange(cfg.seq_len, dtype=torch.float64, device="cpu"), frequency)[:, None]
        for name, table in dict(cos=angle.cos(), sin=angle.sin(), frequency=frequency).items():
            self.register_buffer(name, table.float().to(self.wte.weight.device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def attention_bias(self, query: Tensor, key: Tensor) -> Tensor | None:
        """A bias added to the attention scores, fp32 (..., H, T, S), or None: ALiBi and relative positions go here.

        query, key: positions, int64 (..., T) and (..., S). Called in training, evaluation and generation.
        """
        return None

    def attention_masks(self, backend: str, idx: Tensor) -> dict[int, object]:
        """The attention mask for each distinct window, by window; idx: tokens (B, T)."""
        position = torch.arange(idx.size(1), device=idx.device)
        bias = self.attention_bias(position, position)
        return {w: attention_mask(backend, idx, w, self.doc_eot, bias) for w in set(self.windows)}

    def rotary_tables(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of rotary position embedding; position: as in embed."""
        if position.dim() == 1:  # 0, 1, 2, ...
            cos, sin = self.cos[: position.size(0)], self.sin[: position.size(0)]
        else:  # during generation, which may exceed the context
            angle = position[..., None, None] * self.frequency
            cos, sin = angle.cos(), angle.sin()
        return cos.to(self.compute_dtype), sin.to(self.compute_dtype)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """idx and targets: integer (B, T), T <= seq_len; targets of -1 are ignored.

        With targets: their mean loss in nats, fp32 (), or 0 if there are none; the caller weights it by their number.
        Without: fp32 logits (B, T, vocab_size).
        """
        position = torch.arange(idx.size(1), device=idx.device)
        x = self.hidden(idx, position, self.attention_masks(self.attn_backend, idx), self.attn_backend)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def hidden(self, tokens: Tensor, position: Tensor, masks: dict, backend: str, layers: list | None = None) -> Tensor:
        """The last block's output, normalized, (B, T, n_embd); for training, evaluation and generation.

        tokens, position: as in embed. masks: attention masks of this backend by window. layers: the KV caches.
        """
        cos, sin = self.rotary_tables(position)
        newest = tokens[:, -position.size(-1) :]
        starts = None if self.doc_eot is None else (newest == self.doc_eot)[..., None, None]
        values = self.value_embed(newest).to(self.compute_dtype)
        x = norm(self.embed(tokens, position).to(self.compute_dtype))
        for i, block in enumerate(self.blocks):
            x = block(x, AttnContext(cos, sin, starts, masks[self.windows[i]], backend, values, layers and layers[i]))
        return norm(x)

    next_logits = next_logits  # a method, so that FSDP gathers the weights for it

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Summed embeddings of the last T of tokens (B, S) and of the n-grams ending at each: (B, T, n_embd).

        position: of those T tokens in the context, int64 (T,) or (B, T). Hashed n-grams as in Over-Tokenized
        Transformer (Huang et al. 2025): attention need not learn what follows a few letters.
        """
        length = position.size(-1)
        x = self.wte(tokens[:, -length:])
        if self.ngrams is None:
            return x
        codes = ngram_hashes(tokens, length, self.cfg.ngram, self.doc_eot).flatten(0, 1)
        weights = None
        if self.ngram_dropout and self.training:
            place = torch.arange(length, device=tokens.device).repeat(len(tokens))[:, None]
            kept = hashed_uniform(codes, place, self.step_seed) >= self.ngram_dropout
            weights = kept / (1 - self.ngram_dropout)
        rows = ((codes * HASH_B) >> 7) % self.cfg.ngram_rows
        return x + self.ngrams(rows, weights).view(x.shape).to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Soft-capped logits, fp32 (..., vocab_size), of the last block's normalized output x (..., n_embd)."""
        return softcap(self.head(x).float(), self.cfg.softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of x (B, T, n_embd) against targets (B, T), fp32 (), `loss_chunk` tokens at a time."""
        flat, params = (x.flatten(0, 1), targets.flatten()), [*self.parameters()]  # of which the loss uses a few
        return chunked_loss(lambda x, y: self.cross_entropy(self.head(x), y), params, *flat, self.loss_chunk)

    def freeze(self) -> "GPT":
        """For inference: no gradients; weight matrices are cast to the compute dtype once, not at each use."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.data = module.weight.data.to(self.compute_dtype)
        return self.eval().requires_grad_(False)

    def flops_per_token(self) -> float:
        """Forward and backward FLOPs per token, averaged over a full context.

        6 per matmul weight, counted once per use, and 12 * n_embd per token attended to, in each layer.
        """
        t = self.cfg.seq_len
        attended = sum(sum(min(i, w or t) for i in range(1, t + 1)) / t for w in self.windows)
        places = self.named_parameters(remove_duplicate=False)
        weights = sum(p.numel() for name, p in places if not name.startswith(("wte", "value_embed", "ngrams")))
        return 6 * weights + 12 * self.cfg.n_embd * attended


# ---------------------------------------------------------------------------------------------------------------------
# 4. The parameter table


def normal(std: float, by_fan_in: bool = True) -> Callable:
    """Normal with this standard deviation; with by_fan_in, that of matrices is scaled by fan_in ** -0.5."""

    def fill(x: Tensor, generator: torch.Generator) -> Tensor:
        scale = x.size(-1) ** 0.5 if by_fan_in and x.dim() > 1 else 1.0
        return x.normal_(0, 1, generator=generator).mul_(std / scale)

    return fill


def zeros(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.zero_()


class ParamSpec(NamedTuple):
    """How the parameters whose names match are initialized and optimized."""

    pattern: str = ""  # regular expression for the whole name
    init: Callable | None = None  # fills a tensor on the CPU with a generator; None: as the module made it
    optim: str = ""  # "muon" or "adam"; "": Muon for matrices inside the blocks, Adam for everything else
    lr_mul: float = 1.0  # multiple of muon_lr or adam_lr
    betas: tuple[float, float] = (0.8, 0.95)  # of Adam


# Only for what differs: a parameter without a row starts as its module made it, and is trained as ParamSpec says.
# Head and projections start at zero, so that a new model predicts every token alike, and blocks pass x through. The
# rates of embedding and n-grams are the best of a few for `laptop`; the speedrun's embedding has 100 times the head's.
PARAM_TABLE = [
    ParamSpec(r"wte\.weight", normal(1.0, by_fan_in=False), lr_mul=75.0),
    ParamSpec(r"ngrams\.weight", zeros, lr_mul=12.0),
    ParamSpec(r"head\.weight", zeros),
    ParamSpec(r"blocks\.\d+\.(attn\.qkv|mlp\.fc)\.weight", normal(0.33**0.5)),
    ParamSpec(r"blocks\.\d+\.(attn|mlp)\.proj\.weight", zeros),
    ParamSpec(r"blocks\.\d+\.attn\.gate\.weight", zeros, "adam"),
    ParamSpec(r"value_embed\.weight", zeros, lr_mul=5.0),
]


def spec_of(name: str, param: Tensor) -> ParamSpec:
    """The first row of the table that matches a parameter's name, or the default, with its optimizer filled in."""
    spec = next((spec for spec in PARAM_TABLE if re.fullmatch(spec.pattern, name)), ParamSpec())
    is_matrix = name.startswith("blocks.") and param.dim() == 2
    return spec._replace(optim=spec.optim or ("muon" if is_matrix else "adam"))


@torch.no_grad()
def init_weights(model: GPT, seed_of: Callable[[str], int]) -> None:
    """Draw the initial values of the table, each parameter's whole, on the CPU, by the seed of its name."""
    for name, param in model.named_parameters():
        if init := spec_of(name, param).init:
            generator = torch.Generator().manual_seed(seed_of(name))
            param.copy_(init(torch.empty(param.shape, device="cpu"), generator))
    for module in model.blocks[1:2].modules():  # of the second layer
        if isinstance(module, CausalSelfAttention):
            module.start_as_induction_head()


def optimizer_groups(model: GPT, optimizer: str, muon_lr: float, adam_lr: float, weight_decay: float) -> list[dict]:
    """Parameter groups for `Optimizer`: parameters with equal settings share one.

    "adamw": Adam for all, with one learning rate and decay.
    """
    groups: dict[tuple, dict] = {}
    for name, param in model.named_parameters():
        spec = spec_of(name, param)
        kind, betas, lr, decay = spec.optim, spec.betas, spec.lr_mul * adam_lr, 0.0
        if optimizer == "adamw":
            kind, betas, lr, decay = "adam", (0.9, 0.95), adam_lr, weight_decay
        elif kind == "muon":
            lr, decay = spec.lr_mul * muon_lr, weight_decay
        settings = dict(kind=kind, lr=lr, initial_lr=lr, weight_decay=decay)
        if kind == "muon":
            module = model.get_submodule(name.rpartition(".")[0])
            split = getattr(module, "split", ()) if name.endswith(".weight") else ()
            settings |= dict(momentum=0.95, split=split or (len(param),))
        else:
            settings |= dict(betas=betas, fused=True)  # fused: load_state_dict then keeps `step` on the device
        groups.setdefault(tuple(settings.values()), dict(params=[], **settings))["params"].append(param)
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------------------------
# 5. Muon + Adam

MAX_STACK_NUMEL = 2**26  # elements that a rank orthogonalizes at once; this takes several times their memory
# Polar Express coefficients (Amsel et al. 2025): each quintic a x + b x^3 + c x^5 is minimax-optimal on the
# singular-value interval left by the previous one, starting from [0.01, 1], with a 1 % safety margin.
NEWTON_SCHULZ = ((7.9339, -22.2516, 15.7938), (3.5701, -2.5678, 0.4861), (2.6780, -1.9908, 0.4541))


def newton_schulz(x: Tensor) -> Tensor:
    """A nearly semi-orthogonal matrix for each of x (M, rows, cols), by Muon's quintic Newton-Schulz iteration.

    Jordan et al. 2024. x is first divided by |x x^T| ** 0.5, at least its largest singular value; those that are then
    above 0.01 end up in [0.7, 1.3], and smaller ones grow 76-fold. Zeros stay zero.
    """
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    gram = x @ x.mT
    scale = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp(min=1e-14)
    gram, x = gram / scale, x / scale.sqrt()  # bounds the largest singular value more tightly than the norm of x
    for i, (a, b, c) in enumerate(NEWTON_SCHULZ):
        gram = x @ x.mT if i else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def normalize_rows(x: Tensor) -> Tensor:
    """Rescale the rows of each of x (M, rows, cols) to equal norm, keeping its Frobenius norm; zero rows stay zero.

    Every neuron's update is then equally large. NorMuon (Li et al. 2025) divides by a running mean, this by the norm.
    """
    even = F.normalize(x.float(), dim=-1)
    norms = [torch.linalg.vector_norm(t, dim=(1, 2), keepdim=True, dtype=torch.float32) for t in (x, even)]
    return (even * (norms[0] / norms[1].clamp(min=1e-6))).to(x.dtype)


def orthogonalize(x: Tensor) -> Tensor:
    """Muon's update of each of x (M, rows, cols): rows have equal norm, times max(1, rows / cols) ** 0.5."""
    return normalize_rows(newton_schulz(x)) * max(1.0, x.size(1) / x.size(2)) ** 0.5


class Optimizer(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, Adam (decoupled weight decay) for all else; for 1..N ranks.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), for one matrix w with gradient g:

        momentum.lerp_(g, 1 - beta)
        update = newton_schulz(g.lerp(momentum, beta))  # Nesterov
        update = normalize_rows(update) * max(1, rows / cols) ** 0.5
        w -= lr * (update + weight_decay * w)

    Parameters of one shape are orthogonalized together, in `ns_dtype`. Under DDP, ranks take a part of them each and
    exchange the updates; under FSDP, a matrix is gathered on one rank, as no shard may be orthogonalized alone; with
    hybrid sharding both apply. `state[p]` is as large as this rank's part of p, and on its device or, with `offload`,
    in (pinned) CPU memory.
    """

    def __init__(self, groups: list[dict], ns_dtype=torch.float32, eps: float = 1e-10, offload: bool = False):
        super().__init__(groups, {})
        self.ns_dtype, self.eps, self.offload = ns_dtype, eps, offload

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient, at its group's current settings; leave the others alone."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            update = getattr(self, group["kind"])  # muon or adam, below
            for params in by_shape.values():
                update(group, params)

    def slots(self, name: str, params: list[Tensor]) -> list[Tensor]:
        """The state tensors of this name, one per parameter; zeros at first."""
        for p in params:
            kept = to_local(self.state[p][name] if name in self.state[p] else torch.zeros_like(p))
            self.state[p][name] = kept.cpu().pin_memory() if self.offload and kept.is_cuda else kept
        return [self.state[p][name] for p in params]

    def muon(self, group: dict, params: list[Tensor]) -> None:
        """Muon for parameters of one shape; what cannot be orthogonalized at once comes afterwards."""
        n_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        at_once = n_ranks * max(1, MAX_STACK_NUMEL // params[0].numel())
        params, others = params[:at_once], params[at_once:]
        weights, grads = [to_local(p) for p in params], [to_local(p.grad) for p in params]
        mine = replica_part(params)  # a slice: under DDP the part of this rank, else all
        with state_on_device(weights[0].device, self.slots("momentum", params)) as (momenta,):
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            nesterov = [g.lerp(m, group["momentum"]) for g, m in zip(grads[mine], momenta[mine])]
        x = torch.stack(nesterov) if nesterov else grads[0].new_empty((0, *grads[0].shape))  # more ranks than matrices
        x = gather_matrices(x.to(self.ns_dtype), params[0])  # (n, rows, cols), whole also under FSDP
        x = torch.cat([orthogonalize(part) for part in x.split(group["split"], dim=1)], dim=1)
        updates = scatter_updates(x, params)  # of all params, (len(params), this rank's rows, cols)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates.to(weights[0].dtype)), alpha=-group["lr"])
        if others:
            self.muon(group, others)

    def adam(self, group: dict, params: list[Tensor]) -> None:
        """Adam for parameters of one shape, by PyTorch's fused kernel."""
        weights, grads = [to_local(p) for p in params], [to_local(p.grad) for p in params]
        steps = [self.state[p].setdefault("step", torch.zeros((), device=p.device)) for p in params]
        settings = dict(lr=group["lr"], weight_decay=group["weight_decay"], eps=self.eps, fused=True)
        settings |= dict(beta1=group["betas"][0], beta2=group["betas"][1], amsgrad=False, maximize=False)
        kept = [self.slots(name, params) for name in ("exp_avg", "exp_avg_sq")]
        with state_on_device(weights[0].device, *kept) as (exp_avgs, exp_avg_sqs):
            adamw(weights, grads, exp_avgs, exp_avg_sqs, [], steps, **settings)
