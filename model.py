"""What is computed: GPT, the table of its parameters, and its optimizer (Muon + Adam).

Read from top to bottom: GPTConfig, modules, GPT, parameter table, optimizer. ops/ has other ways to compute the same
(attention backends, chunks of the loss, fp8, checkpointing, sharding); inference/ generates text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ops.attention import (
    ATTENTION_BACKENDS,
    attention_mask,
    cached_attention,
    flex_attention,
)
from ops.cpu import CpuReLUSquared, CpuRMSNorm, use_cpu_functions
from ops.linear import is_matvec, matvec
from ops.loss import SoftcapCrossEntropy, chunked_loss, fused_softcap_cross_entropy
from ops.parallel import (
    exchange_updates,
    gather_whole_matrices,
    my_share,
    state_on_device,
    to_local,
)

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
    ngram: int = (
        0  # longest n-gram with a hashed embedding, added to each token's own; below 2 disables
    )
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
        pattern, _, width = self.window.partition(
            ":"
        )  # "SSSL:256": the pattern and the width of S layers
        window = int(width) if width else max(1, self.seq_len // 4)
        if window >= self.seq_len:
            window = 0
        windows = []
        for layer in range(self.n_layer):
            letter = pattern[layer % len(pattern)]
            windows.append(window if letter == "S" else 0)
        return windows


# ---------------------------------------------------------------------------------------------------------------------
# 2. Modules


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension of x (..., D), without a gain."""
    if use_cpu_functions(x):
        return CpuRMSNorm.apply(x)  # the same on a CPU, with half the memory traffic
    return F.rms_norm(x, (x.size(-1),))


def relu_squared(x: Tensor) -> Tensor:
    """ReLU squared (So et al. 2021)."""
    if use_cpu_functions(x):
        return CpuReLUSquared.apply(x)
    return F.relu(x).square()


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
        if is_matvec(x):  # one token at a time in the compiled decode step
            return matvec(x, w).to(x.dtype)
        return self.matmul(x, w)


HASH_A, HASH_B, HASH_MODULUS = (
    0x9E3779B1,
    0x85EBCA6B,
    1 << 31,
)  # multipliers of xxHash and MurmurHash; int64 suffices


def ngram_hashes(tokens: Tensor, length: int, longest: int, eot: int | None) -> Tensor:
    """Hashes of the n-grams of 2 to `longest` tokens that end at each of the last `length` of tokens (B, S).

    int64 (B, length, longest - 1). Where an n-gram would reach back past the start of the context, or of its document
    (which begins with `eot`), it has "no token".
    """
    is_start = None if eot is None else tokens == eot
    before = code = tokens.long() + 1  # 0 stands for "no token"
    codes = []
    for _ in range(2, longest + 1):
        before = shift_right(before)  # one token further back
        if is_start is not None:
            before = before.masked_fill(is_start, 0)  # not past the start of the document
        code = (code * HASH_A + before) % HASH_MODULUS
        codes.append(code)
    return torch.stack(codes, -1)[:, -length:]


def mix(h: Tensor, value) -> Tensor:
    """One round of MurmurHash-like mixing of value into the hashes h."""
    h = (h ^ value) * HASH_A % HASH_MODULUS
    h = (h ^ (h >> 15)) * HASH_B % HASH_MODULUS
    return h ^ (h >> 13)


def hashed_uniform(code, position, seed):
    h = mix(code, position * HASH_B % HASH_MODULUS)
    h = mix(h, seed % HASH_MODULUS)
    return (h % 2**24) / 2**24


class NgramEmbedding(nn.Embedding):
    def forward(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of rows, int64 (N, M), with weights (N, M) or None (ones): fp32 (N, n_embd)."""
        options = dict(mode="sum", per_sample_weights=weights, sparse=self.sparse)
        return F.embedding_bag(rows, self.weight.float(), **options)


def rotary_tables(cfg: GPTConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies (R/2,) and their cos and sin at each position (seq_len, 1, R/2), fp32; computed in fp64 on the CPU."""
    half = cfg.rotary_dim // 2
    channel = torch.arange(half, dtype=torch.float64, device="cpu")
    position = torch.arange(cfg.seq_len, dtype=torch.float64, device="cpu")
    frequency = cfg.rope_theta ** -(channel / half)
    angle = torch.outer(position, frequency)[:, None]
    return frequency.float(), angle.cos().float(), angle.sin().float()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (B, T, H, D) in its first R dimensions; cos, sin (T, 1, R/2)."""
    half = cos.size(-1)
    x1, x2, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: object, backend: str) -> Tensor:
    """Causal softmax attention, q, k, v: (B, n_head, T, head_dim). mask: of attention_mask; None is plain causal."""
    if backend in ("auto", "sdpa"):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_like(q, mask), is_causal=mask is None
        )
    if backend == "flex":
        return flex_attention(q, k, v, mask)
    return ATTENTION_BACKENDS[backend](q, k, v, mask)  # the same on other kernels: ops/attention.py


def mask_like(q, mask):
    return mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask


class AttnContext(NamedTuple):
    """What a block gets besides x (B, T, n_embd)."""

    cos: Tensor  # (T, 1, rotary_dim / 2) or (B, T, 1, rotary_dim / 2), in the compute dtype
    sin: Tensor
    doc_starts: Tensor | None  # bool (B, T, 1, 1), where a document begins; None: ignore documents
    mask: object  # attention_mask's result for this layer's window
    attn_backend: str
    value_embed: Tensor  # of the tokens, (B, T, n_embd)
    kv_cache: object = None  # this layer's KV cache (generation.LayerCache), during generation only


def shift_right(x: Tensor) -> Tensor:
    """x (B, T, ...) shifted right by one position, with zeros in the first."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (1, -1))


def gather_positions(x: Tensor, index: Tensor) -> Tensor:
    """The entry of x (B, T, ...) at each row's own index, int64 (B,); returns (B, 1, ...)."""
    rows = torch.arange(len(x), device=x.device)
    return x[rows, index][:, None]


def previous_token(name: str, x: Tensor, ctx: AttnContext) -> Tensor:
    """x (B, T, ...) of the previous token, also in cached decoding; zeros where there is none.

    name: the key of this use in the layer's cache, unique within the layer.
    """
    if ctx.kv_cache is None:
        before = shift_right(x)
    else:
        before = ctx.kv_cache.shift(name, x)
    if ctx.doc_starts is not None:  # nothing comes before the first token of a document
        starts = ctx.doc_starts
        while starts.dim() > x.dim():
            starts = starts.squeeze(-1)
        before = before.masked_fill(starts, 0)
    return before


def partial_key_offset(k: Tensor, rotary_dim: int, ctx: AttnContext) -> Tensor:
    """Keys (B, T, H, D) whose dimensions beyond rotary_dim are the previous token's; zeros where there is none.

    Partial key offset (NanoGPT speedrun): one layer instead of two is enough to find what followed an earlier token
    like the query's (one-layer induction).
    """
    k_rot, k_pass = k.split((rotary_dim, k.size(-1) - rotary_dim), dim=-1)
    return torch.cat((k_rot, previous_token("key", k_pass, ctx)), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with QK-norm (Henry et al. 2020) and gated value embeddings (NanoGPT speedrun)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head = cfg.n_head
        self.head_dim = cfg.head_dim
        self.rotary_dim = cfg.rotary_dim
        self.qkv = Linear(
            cfg.n_embd, cfg.n_embd, cfg.n_embd, cfg.n_embd
        )  # three stacked matrices: W_q, W_k, W_v
        self.gate = Linear(cfg.n_embd, cfg.n_head)  # of the value embeddings, one per head
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def init_as_induction_head(self) -> None:
        """Set W_k = W_q in the dimensions that partial_key_offset takes from the previous token."""
        w_q, w_k, _ = self.qkv.weight.split(self.qkv.split)
        w_q = w_q.view(self.n_head, self.head_dim, -1)
        w_k = w_k.view(self.n_head, self.head_dim, -1)
        w_k[:, self.rotary_dim :] = w_q[:, self.rotary_dim :]

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3 * self.n_head, self.head_dim).split(self.n_head, dim=2)

        # Value embeddings: each head adds the tokens' own, times a gate between 0 and 2
        gate = 2 * self.gate(x).sigmoid()  # (B, T, n_head)
        v = v + gate[..., None] * ctx.value_embed.view(B, T, self.n_head, self.head_dim)

        q, k = norm(q), norm(k)  # QK norm
        k = partial_key_offset(k, self.rotary_dim, ctx)
        q = apply_rotary_emb(q, ctx.cos, ctx.sin)
        k = apply_rotary_emb(k, ctx.cos, ctx.sin)

        q, k, v = (
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
        )  # (B, n_head, T, head_dim)
        if ctx.kv_cache is None:
            y = attention(q, k, v, ctx.mask, ctx.attn_backend)
        else:  # generation
            k, v = ctx.kv_cache.append(k, v)
            y = cached_attention(q, k, v, ctx.mask)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.proj(y)


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
        self.softcap = cfg.softcap
        self.kernel = fused_softcap_cross_entropy
        self.fused = 0 < cfg.softcap < 35  # the same loss and gradient in one pass (ops/loss.py)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: of the head, not yet capped, in the compute dtype, (N, vocab_size); targets: int64 (N,)."""
        if self.fused and logits.requires_grad:  # delete these two lines to edit the loss below
            return SoftcapCrossEntropy.apply(logits, targets, self.softcap, self.kernel)
        logits = softcap(logits.float(), self.softcap)
        return F.cross_entropy(logits, targets, ignore_index=-1)


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
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.loss_chunk = loss_chunk
        self.attn_backend = attn
        self.doc_eot = doc_eot
        self.ngram_dropout = ngram_dropout
        self.step_seed = 0  # set by train_step, new in each step
        self.windows = cfg.layer_windows()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.value_embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.ngrams = NgramEmbedding(cfg.ngram_rows, cfg.n_embd) if cfg.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)
        self.cross_entropy = CrossEntropy(cfg)
        frequency, cos, sin = rotary_tables(cfg)
        device = self.wte.weight.device
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)
        self.register_buffer("frequency", frequency.to(device), persistent=False)

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
        masks = self.attention_masks(self.attn_backend, idx)
        x = self.backbone(idx, position, masks, self.attn_backend)
        if targets is None:
            return self.logits(x)
        return self.loss(x, targets)

    def backbone(
        self,
        tokens: Tensor,
        position: Tensor,
        masks: dict,
        backend: str,
        layers: list | None = None,
    ) -> Tensor:
        """The last block's output, normalized, (B, T, n_embd); for training, evaluation and generation.

        tokens, position: as in embed. masks: attention masks of this backend by window. layers: the KV caches.
        """
        cos, sin = self.rotary_tables(position)
        idx = tokens[:, -position.size(-1) :]  # without the tokens that only n-grams reach back to
        doc_starts = None if self.doc_eot is None else (idx == self.doc_eot)[..., None, None]
        value_embed = self.value_embed(idx).to(self.compute_dtype)

        x = self.embed(tokens, position).to(self.compute_dtype)
        x = norm(x)
        for i, block in enumerate(self.blocks):
            ctx = AttnContext(
                cos=cos,
                sin=sin,
                doc_starts=doc_starts,
                mask=masks[self.windows[i]],
                attn_backend=backend,
                value_embed=value_embed,
                kv_cache=layers[i] if layers else None,
            )
            x = block(x, ctx)
        return norm(x)

    def next_logits(self, idx: Tensor, cache=None) -> Tensor:
        """Logits of the token that follows each row of idx (B, T): fp32 (B, 1, vocab_size).

        cache: a generation.KVCache. Empty, it reads idx as prompts; after that idx is (B, 1), each row's newest token.
        """
        position = torch.arange(idx.size(1), device=idx.device)
        if cache is None:
            masks = self.attention_masks(self.attn_backend, idx)
            x = self.backbone(idx, position, masks, self.attn_backend)
            return self.logits(x[:, -1:])
        tokens = cache.read(idx, self.doc_eot)
        if idx.size(1) > 1:  # prompts, padded on the right
            masks = self.attention_masks("sdpa", idx)
            x = self.backbone(tokens, position, masks, "sdpa", cache.layers)
            return self.logits(gather_positions(x, cache.length - 1))
        position = cache.length[:, None] - 1
        masks = cache.masks(self, position)
        x = self.backbone(tokens, position, masks, "sdpa", cache.layers)
        return self.logits(x)

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

        def head_loss(x: Tensor, targets: Tensor) -> Tensor:
            return self.cross_entropy(self.head(x), targets)

        x, targets = x.flatten(0, 1), targets.flatten()
        return chunked_loss(head_loss, list(self.parameters()), x, targets, self.loss_chunk)

    def flops_per_token(self) -> float:
        """Forward and backward FLOPs per token, averaged over a full context.

        6 per matmul weight, counted once per use, and 12 * n_embd per token attended to, in each layer.
        """
        T = self.cfg.seq_len
        attended = 0  # keys that an average query attends to, summed over the layers
        for window in self.windows:
            longest = window or T
            attended += sum(min(position, longest) for position in range(1, T + 1)) / T
        matmul_weights = 0
        for name, p in self.named_parameters(
            remove_duplicate=False
        ):  # a tied weight counts at each use
            if not name.startswith(("wte", "value_embed", "ngrams")):  # lookups
                matmul_weights += p.numel()
        return 6 * matmul_weights + 12 * self.cfg.n_embd * attended


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
    init: Callable | None = (
        None  # fills a tensor on the CPU with a generator; None: as the module made it
    )
    optim: str = (
        ""  # "muon" or "adam"; "": Muon for matrices inside the blocks, Adam for everything else
    )
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


def get_spec(name: str, param: Tensor) -> ParamSpec:
    """The first row of the table that matches a parameter's name, or the default, with its optimizer filled in."""
    found = ParamSpec()
    for spec in PARAM_TABLE:
        if re.fullmatch(spec.pattern, name):
            found = spec
            break
    if found.optim:
        return found
    is_block_matrix = name.startswith("blocks.") and param.dim() == 2
    return found._replace(optim="muon" if is_block_matrix else "adam")


@torch.no_grad()
def init_weights(model: GPT, seed_of: Callable[[str], int]) -> None:
    """Draw the initial values of the table, each parameter's whole, on the CPU, by the seed of its name."""
    for name, param in model.named_parameters():
        init = get_spec(name, param).init
        if init is not None:
            generator = torch.Generator().manual_seed(seed_of(name))
            values = torch.empty(param.shape, device="cpu")
            param.copy_(init(values, generator))
    if len(model.blocks) > 1:
        for module in model.blocks[1].modules():
            if isinstance(module, CausalSelfAttention):
                module.init_as_induction_head()


def optimizer_groups(
    model: GPT, optimizer: str, muon_lr: float, adam_lr: float, weight_decay: float
) -> list[dict]:
    """Parameter groups for `Optimizer`: parameters with equal settings share one.

    "adamw": Adam for all, with one learning rate and decay.
    """
    groups: dict[tuple, dict] = {}  # by settings
    for name, param in model.named_parameters():
        spec = get_spec(name, param)
        if optimizer == "adamw":
            settings = dict(
                kind="adam", lr=adam_lr, weight_decay=weight_decay, betas=(0.9, 0.95), fused=True
            )
        elif spec.optim == "muon":
            split = rows_of_stacked_matrices(model, name, param)
            settings = dict(
                kind="muon",
                lr=spec.lr_mul * muon_lr,
                weight_decay=weight_decay,
                momentum=0.95,
                split=split,
            )
        else:
            settings = dict(
                kind=spec.optim,
                lr=spec.lr_mul * adam_lr,
                weight_decay=0.0,
                betas=spec.betas,
                fused=True,
            )
        settings["initial_lr"] = settings["lr"]  # what the schedule multiplies
        key = tuple(settings.values())
        if key not in groups:
            groups[key] = dict(params=[], **settings)
        groups[key]["params"].append(param)
    return list(groups.values())


def rows_of_stacked_matrices(model: GPT, name: str, param: Tensor) -> tuple[int, ...]:
    """Heights of the matrices stacked in a Linear's weight, which Muon orthogonalizes one by one."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, Linear) and name.endswith(".weight"):
        return module.split
    return (len(param),)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Muon + Adam

MAX_STACK_NUMEL = (
    2**26
)  # elements that a rank orthogonalizes at once; this takes several times their memory
# Polar Express coefficients (Amsel et al. 2025): each quintic a x + b x^3 + c x^5 is minimax-optimal on the
# singular-value interval left by the previous one, starting from [0.01, 1], with a 1 % safety margin.
POLAR_EXPRESS_COEFFS = (
    (7.9339, -22.2516, 15.7938),
    (3.5701, -2.5678, 0.4861),
    (2.6780, -1.9908, 0.4541),
)


def newton_schulz(x: Tensor) -> Tensor:
    """A nearly semi-orthogonal matrix for each of x (M, rows, cols), by Muon's quintic Newton-Schulz iteration.

    Jordan et al. 2024. x is first divided by |x x^T| ** 0.5, at least its largest singular value; those that are then
    above 0.01 end up in [0.7, 1.3], and smaller ones grow 76-fold. Zeros stay zero.
    """
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    gram = x @ x.mT
    scale = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp(min=1e-14)
    gram, x = gram / scale, x / scale.sqrt()
    for i, (a, b, c) in enumerate(POLAR_EXPRESS_COEFFS):
        if i > 0:
            gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b * gram + c * gram @ gram
        x = torch.baddbmm(x, poly, x, beta=a)  # a * x + poly @ x
    if tall:
        x = x.mT
    return x


def normalize_rows(x: Tensor) -> Tensor:
    """Rescale the rows of each of x (M, rows, cols) to equal norm, keeping its Frobenius norm; zero rows stay zero.

    Every neuron's update is then equally large. NorMuon (Li et al. 2025) divides by a running mean, this by the norm.
    """

    def frobenius_norm(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, dim=(1, 2), keepdim=True, dtype=torch.float32)

    unit_rows = F.normalize(x.float(), dim=-1)
    scale = frobenius_norm(x) / frobenius_norm(unit_rows).clamp(min=1e-6)
    return (unit_rows * scale).to(x.dtype)


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

    def __init__(
        self, groups: list[dict], ns_dtype=torch.float32, eps: float = 1e-10, offload: bool = False
    ):
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

    def state_tensors(self, name: str, params: list[Tensor]) -> list[Tensor]:
        """The state tensors of this name, one per parameter; zeros at first."""
        for p in params:
            kept = to_local(self.state[p][name] if name in self.state[p] else torch.zeros_like(p))
            self.state[p][name] = kept.cpu().pin_memory() if self.offload and kept.is_cuda else kept
        return [self.state[p][name] for p in params]

    def muon(self, group: dict, params: list[Tensor]) -> None:
        """Muon for parameters of one shape, as many at a time as MAX_STACK_NUMEL allows."""
        n_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        at_once = n_ranks * max(1, MAX_STACK_NUMEL // params[0].numel())
        for first in range(0, len(params), at_once):
            self.muon_at_once(group, params[first : first + at_once])

    def muon_at_once(self, group: dict, params: list[Tensor]) -> None:
        lr, beta, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
        weights = [to_local(p) for p in params]
        grads = [to_local(p.grad) for p in params]

        # Momentum of all matrices; Nesterov's step for those that this rank orthogonalizes (without DDP: all)
        mine = my_share(params)
        with state_on_device(weights[0].device, self.state_tensors("momentum", params)) as (
            momenta,
        ):
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            nesterov = [g.lerp(m, beta) for g, m in zip(grads[mine], momenta[mine])]
        if nesterov:
            x = torch.stack(nesterov)
        else:  # there are more ranks than matrices
            x = grads[0].new_empty((0, *grads[0].shape))

        # Orthogonalize whole matrices, then send every rank its rows of all updates
        x = gather_whole_matrices(x.to(self.ns_dtype), params[0])
        parts = x.split(group["split"], dim=1)  # q, k and v are stacked in one weight
        x = torch.cat([orthogonalize(part) for part in parts], dim=1)
        updates = exchange_updates(x, params)

        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, list(updates.to(weights[0].dtype)), alpha=-lr)

    def adam(self, group: dict, params: list[Tensor]) -> None:
        """Adam for parameters of one shape, by PyTorch's fused kernel."""
        weights = [to_local(p) for p in params]
        grads = [to_local(p.grad) for p in params]
        steps = [self.state[p].setdefault("step", torch.zeros((), device=p.device)) for p in params]
        exp_avgs, exp_avg_sqs = (
            self.state_tensors("exp_avg", params),
            self.state_tensors("exp_avg_sq", params),
        )
        beta1, beta2 = group["betas"]
        with state_on_device(weights[0].device, exp_avgs, exp_avg_sqs) as (exp_avgs, exp_avg_sqs):
            adamw(
                weights,
                grads,
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs=[],
                state_steps=steps,
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=self.eps,
            )
