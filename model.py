"""What is computed: GPT, the table of its parameters, and its optimizer (Muon + Adam).

Read from top to bottom: GPTConfig, modules, GPT, parameter table, optimizer. Everything that only affects how it is
computed (attention backends, chunked loss, fp8, checkpointing, sharding) is in ops/; generation.py generates text.
"""

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from generation import LayerCache, next_logits, shift_right
from ops import checks
from ops.attention import attention, attention_mask, cached_attention, offsets_of_micro_batches
from ops.checkpointing import apply_ac, offload_activations, recomputed
from ops.exchange import MuonSlice, gather_matrices, matrix_stacks, owned_part, scatter_updates, state_on_device
from ops.init import normal, zeros
from ops.linear import Fp8Linear, is_matvec, matvec
from ops.loss import ChunkedLinearCrossEntropy, ce_fwd_bwd, kernel_fits, softcap_logits
from ops.ngrams import hashed_uniform, ngram_hashes, ngram_rows
from ops.parallel import to_local
from ops.params import ParamGroupSpec, check_param_table, initialize, initialize_buffers, param_spec_name
from ops.pointwise import norm, relu_squared

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
    version: int = 2  # of the computation below; checkpoints of another version are refused

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated by position; the others are free to carry content."""
        return self.head_dim // 4 * 2

    def layer_windows(self) -> list[int]:
        """Keys that each query sees in each layer, its own included (0 = the whole context).

        Raises ValueError unless `window` is letters S and L with an optional `:size` (default: a quarter of seq_len).
        """
        match = re.fullmatch(r"([SL]+)(?::([1-9]\d*))?", self.window)
        if not match:
            raise ValueError(f"window is {self.window!r}; expected letters S and L, as in SSSL or SSSL:256")
        pattern, size = match[1], int(match[2] or max(1, self.seq_len // 4))
        return [size if pattern[i % len(pattern)] == "S" else 0 for i in range(self.n_layer)]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Modules


class Linear(nn.Linear):
    """Bias-free linear layer in the activations' dtype: the weight stays fp32 and is cast at each use.

    Several n_out: that many matrices stacked in one weight; Muon orthogonalizes each separately.
    """

    fp8 = False

    def __init__(self, n_in: int, *n_out: int):
        super().__init__(n_in, sum(n_out), bias=False)
        self.split = n_out

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.to(x.dtype)
        if is_matvec(x):
            return matvec(x, w).to(x.dtype)
        return Fp8Linear.apply(x, w) if self.fp8 else F.linear(x, w)


class NgramEmbedding(nn.Embedding):
    """Sums rows of the table, over all n-grams at once: each separate lookup's gradient would be a whole table."""

    def forward(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """rows: int64 (N, M); weights: one per row, (N, M), or None; returns fp32 (N, n_embd)."""
        return F.embedding_bag(rows, self.weight.float(), mode="sum", per_sample_weights=weights)


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
    """Multi-head causal attention with normalized queries and keys (QK-norm: Henry et al. 2020)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim, self.rotary_dim, self.backend = cfg.n_head, cfg.head_dim, cfg.rotary_dim, "sdpa"
        self.qkv = Linear(cfg.n_embd, cfg.n_embd, cfg.n_embd, cfg.n_embd)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        batch, length, n_embd = x.shape
        # Along the heads: queries, keys, values.
        qk, v = self.qkv(x).view(batch, length, 3 * self.n_head, self.head_dim).split((2 * self.n_head, self.n_head), 2)
        q, k = norm(qk).split(self.n_head, 2)
        q = apply_rotary_emb(q, ctx.cos, ctx.sin)
        k = apply_rotary_emb(shift_keys(k, self.rotary_dim, ctx), ctx.cos, ctx.sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if ctx.past is not None:
            k, v = ctx.past.append(k, v)
        y = attention(q, k, v, ctx.mask, self.backend) if ctx.past is None else cached_attention(q, k, v, ctx.mask)
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
    """One transformer layer; a function of tensors only, so that one compilation serves every block."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.checkpointing, self.offload = "none", False
        self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)
        self.compiled = None  # the compiled forward_with_ac; hooks of wrappers stay outside it

    def __getstate__(self) -> dict:
        return self.__dict__ | dict(compiled=None)  # else a copy, e.g. for an EMA, would run this block

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        if ctx.past is not None:
            return self._forward(x, ctx)
        how = contextlib.nullcontext()
        if self.offload:
            how = offload_activations(self, x.numel() // x.size(-1), self.compiled is not None)
        with how:
            return (self.compiled or self.forward_with_ac)(x, ctx)

    def forward_with_ac(self, x: Tensor, ctx: AttnContext) -> Tensor:
        return apply_ac(self.checkpointing, self, x, ctx)

    def _forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        x = x + self.attn(norm(x), ctx)
        return x + self.mlp(norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# 3. GPT: embeddings, blocks, head, loss


class GPT(nn.Module):
    """Token ids in, loss or logits out. Weights are fp32; activations have the dtype `compute_dtype`.

    Arguments that only affect speed, memory and rounding: `attn` is the attention backend; `loss_chunk` is how many
    tokens' logits exist at once (0 = all); `offload` keeps activations in CPU memory; `fp8` (in the MLP, and in the
    head where the loss kernel computes its gradient) rounds more. Each block's `checkpointing` is none, selective or
    full. Arguments that change the model: `doc_eot` is the token that starts a document; if it is given, tokens do not
    attend across documents. `ngram_dropout` is the probability of dropping an n-gram in training mode. Which ones are
    dropped depends on the n-gram, its position and `step_seed` (new each step), not on ranks or micro-batches.
    """

    extrapolates = True  # False: positions end at seq_len, so longer texts are drawn from their last seq_len tokens

    def __init__(
        self,
        cfg: GPTConfig,
        compute_dtype: torch.dtype = torch.float32,
        loss_chunk: int = 0,
        attn: str = "sdpa",
        doc_eot: int | None = None,
        fp8: bool = False,
        offload: bool = False,
        ngram_dropout: float = 0.0,
    ):
        super().__init__()
        self.cfg, self.compute_dtype, self.loss_chunk = cfg, compute_dtype, loss_chunk
        self.ngram_dropout, self.step_seed = ngram_dropout, 0
        self.attn_backend, self.doc_eot, self.fp8 = attn, doc_eot, fp8
        self.windows = cfg.layer_windows()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.ngrams = NgramEmbedding(cfg.ngram_rows, cfg.n_embd) if cfg.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)
        self.ce_fn, self.compiled_loss = ce_fwd_bwd, None
        for block in self.blocks:
            block.offload, block.attn.backend = offload, attn
            block.mlp.fc.fp8 = block.mlp.proj.fp8 = fp8
        self.register_buffer("cos", torch.empty(cfg.seq_len, 1, cfg.rotary_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(cfg.seq_len, 1, cfg.rotary_dim // 2), persistent=False)
        self.register_buffer("frequency", torch.empty(cfg.rotary_dim // 2), persistent=False)
        self.reset_buffers()
        check_param_table(self, PARAM_TABLE, OPTIMIZERS)

    def __getstate__(self) -> dict:
        return self.__dict__ | dict(compiled_loss=None)  # as in Block

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Compute the rotary tables."""
        half, theta = self.cfg.rotary_dim // 2, self.cfg.rope_theta
        frequency = theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        position = torch.arange(self.cfg.seq_len, dtype=torch.float64, device="cpu")  # not every device has float64
        angle = torch.outer(position, frequency)[:, None]
        self.frequency.copy_(frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def attention_bias(self, query: Tensor, key: Tensor) -> Tensor | None:
        """A bias added to the attention scores, fp32 (..., H, T, S), or None: ALiBi and relative positions go here.

        query, key: positions, int64 (..., T) and (..., S). Called in training, evaluation and generation.
        """
        return None

    def attention_masks(self, backend: str, idx: Tensor, cu_seqlens: Tensor | None = None) -> dict[int, object]:
        """The attention mask for each distinct window, by window; idx: tokens (B, T); cu_seqlens: see forward."""
        position = torch.arange(idx.size(1), device=idx.device)
        bias = self.attention_bias(position, position)
        return {w: attention_mask(backend, idx, w, self.doc_eot, bias, cu_seqlens) for w in set(self.windows)}

    def rotary_tables(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of rotary position embedding; position: as in embed."""
        if position.dim() == 1:  # 0, 1, 2, ...
            cos, sin = self.cos[: position.size(0)], self.sin[: position.size(0)]
        else:  # during generation, which may exceed the context
            angle = position[..., None, None] * self.frequency
            cos, sin = angle.cos(), angle.sin()
        return cos.to(self.compute_dtype), sin.to(self.compute_dtype)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """idx and targets: integer (B, T), T <= seq_len; targets of -1 are ignored.

        With targets: the *sum* of the token losses in nats, fp32 (), so that means over any split of a batch are exact.
        Without: fp32 logits (B, T, vocab_size). cu_seqlens: document_offsets(idx), if already computed, for the
        attention backend "varlen". Raises ValueError if T exceeds seq_len.
        """
        length = idx.size(1)
        if length > self.cfg.seq_len:
            raise ValueError(f"{length} tokens exceed the model's context of {self.cfg.seq_len}; pass fewer tokens")
        position = torch.arange(length, device=idx.device)
        x = self.hidden(idx, position, self.attention_masks(self.attn_backend, idx, cu_seqlens))
        if targets is None:
            return self.logits(x)
        return self.loss(x.flatten(0, 1), targets.flatten())

    def hidden(self, tokens: Tensor, position: Tensor, masks: dict, layers: list[LayerCache] | None = None) -> Tensor:
        """The last block's output, normalized, (B, T, n_embd); for training, evaluation and generation.

        tokens, position: as in embed. masks: attention masks by window. layers: the KV caches.
        """
        cos, sin = self.rotary_tables(position)
        starts = None
        if self.doc_eot is not None:
            starts = (tokens[:, -position.size(-1) :] == self.doc_eot)[..., None, None]
        x = norm(self.embed(tokens, position).to(self.compute_dtype))
        for i, block in enumerate(self.blocks):
            x = block(x, AttnContext(cos, sin, starts, masks[self.windows[i]], layers and layers[i]))
        return norm(x)

    offsets_of_micro_batches = offsets_of_micro_batches
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
        return x + self.ngrams(ngram_rows(codes, self.cfg.ngram_rows), weights).view(x.shape).to(x.dtype)

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
        weights = sum(p.numel() for name, p in places if name not in ("wte.weight", "ngrams.weight"))
        return 6 * weights + 12 * self.cfg.n_embd * attended

    def logits(self, x: Tensor) -> Tensor:
        """Soft-capped logits, fp32 (..., vocab_size), of the last block's normalized output x (..., n_embd)."""
        return softcap_logits(self.head(x).float(), self.cfg.softcap)

    @property
    def loss_kernel(self) -> bool:
        """Whether the fused kernel computes the loss gradient; with an edited loss or another head, autograd does."""
        head, functions = self.head, [getattr(f, "__func__", f) for f in (self.logits, self.chunk_loss)]
        hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
        return type(head) is Linear and not any(hooks) and kernel_fits(Linear.forward, *functions, cross_entropy)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Summed loss of x (N, n_embd) against targets (N,), fp32 (), computed in chunks of tokens."""
        chunk = self.loss_chunk or len(x)
        if self.loss_kernel and self.loss_chunk and torch.is_grad_enabled():
            options = (self.cfg.softcap, chunk, self.ce_fn, self.fp8)
            return ChunkedLinearCrossEntropy.apply(x, self.head.weight, targets, *options)
        function = self.compiled_loss or self.chunk_loss
        if self.loss_chunk and torch.is_grad_enabled():
            function = recomputed(self, function)
        return torch.stack([function(*chunks) for chunks in zip(x.split(chunk), targets.split(chunk))]).sum()

    def chunk_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(x), targets, self.training)


def cross_entropy(logits: Tensor, targets: Tensor, training: bool) -> Tensor:
    """Summed loss of fp32 logits (N, V) against targets (N,), fp32 (); targets of -1 are ignored.

    training: False in evaluation.
    """
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


# ---------------------------------------------------------------------------------------------------------------------
# 4. The parameter table

MUON = dict(betas=(0.95, 0.0), wd_mul=1.0)  # the first is the momentum, the second is unused
# Every parameter must match exactly one row. Matrices inside the blocks are for Muon, everything else is for Adam.
PARAM_TABLE = {
    "embedding": ParamGroupSpec(r"wte\.weight", normal(1.0, by_fan_in=False), "adam", lr_mul=75.0),
    "ngrams": ParamGroupSpec(r"ngrams\.weight", zeros, "adam", lr_mul=12.0),
    "head": ParamGroupSpec(r"head\.weight", zeros, "adam"),
    "qkv": ParamGroupSpec(r"blocks\.\d+\.attn\.qkv\.weight", normal(0.33**0.5), "muon", **MUON),
    "mlp_in": ParamGroupSpec(r"blocks\.\d+\.mlp\.fc\.weight", normal(0.33**0.5), "muon", **MUON),
    "proj": ParamGroupSpec(r"blocks\.\d+\.(attn|mlp)\.proj\.weight", zeros, "muon", **MUON),
}


def init_weights(model: GPT, seed_of: Callable[[str], int]) -> None:
    """Initialize weights and buffers. seed_of: parameter name -> seed; each is drawn whole, by its own generator."""
    initialize(model, PARAM_TABLE, lambda: GPT(model.cfg), seed_of)  # builds a model for rows with init "module"


def init_buffers(model: GPT, seed_of: Callable[[str], int]) -> None:
    """Initialize the buffers only."""
    initialize_buffers(model, PARAM_TABLE, lambda: GPT(model.cfg), seed_of)


def check_model(model: GPT) -> list[str]:
    """Raises ModelError if the model would silently train something wrong. Overwrites weights and buffers.

    Returns lines for the log.
    """
    return checks.check_model(model, cross_entropy, PARAM_TABLE, OPTIMIZERS)


def optimizer_groups(model: GPT, optimizer: str, muon_lr: float, adam_lr: float, weight_decay: float) -> list[dict]:
    """Parameter groups for `Optimizer`: parameters of one row of the table with equal settings share a group.

    "adamw": the same learning rate and decay for all.
    """
    groups: dict[tuple, dict] = {}
    for name, param in model.named_parameters():
        row = param_spec_name(name, PARAM_TABLE)
        spec = PARAM_TABLE[row]
        if optimizer == "adamw":
            kind, lr, betas, decay = "adam", adam_lr, (0.9, 0.95), weight_decay
        else:
            lr = spec.lr_mul * (muon_lr if spec.optim == "muon" else adam_lr)
            kind, betas, decay = spec.optim, spec.betas, spec.wd_mul * weight_decay
        place = re.sub(r"\.parametrizations\.(\w+)\.original\d?$", r".\1", name)  # of torch.nn.utils.parametrize
        module, _, leaf = place.rpartition(".")
        split = getattr(model.get_submodule(module), "split", ()) if leaf == "weight" else ()
        settings = dict(
            role=row,
            kind=kind,
            lr=lr,
            initial_lr=lr,
            betas=betas,
            weight_decay=decay,
            split=split if len(split) > 1 else (),
        )
        group = groups.setdefault(tuple(settings.values()), dict(params=[], names=[], **settings))
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


# ---------------------------------------------------------------------------------------------------------------------
# 5. Muon + Adam

# ParamGroupSpec.optim -> names of each parameter's state tensors, and update(group, param, grad, *state), which works
# elementwise and in place (under FSDP on this rank's rows only); None where Optimizer implements it itself.
OPTIMIZERS = {"muon": (("momentum",), None), "adam": (("exp_avg", "exp_avg_sq"), None)}

MAX_STACK_NUMEL = 2**26  # elements that a rank orthogonalizes at once; this takes several times their memory
# Polar Express coefficients (Amsel et al. 2025): each quintic a x + b x^3 + c x^5 is minimax-optimal on the
# singular-value interval left by the previous one, starting from [0.01, 1], with a 1 % safety margin.
NEWTON_SCHULZ = ((7.9339, -22.2516, 15.7938), (3.5701, -2.5678, 0.4861), (2.6780, -1.9908, 0.4541))


def newton_schulz(x: Tensor) -> Tensor:
    """A nearly semi-orthogonal matrix for each of x (M, rows, cols), by Muon's quintic Newton-Schulz iteration.

    Singular values above 0.01 of the largest end up in [0.7, 1.3]; smaller ones grow 76-fold. (Jordan et al. 2024.)
    Runs in the dtype of x. All-zero matrices stay zero.
    """
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    gram = x @ x.mT
    scale = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp(min=1e-14)
    gram, x = gram / scale, x / scale.sqrt()  # bounds the largest singular value more tightly than the norm of x
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    # Aspect ratio >= 4 in full fp32: iterate on the Gram matrix and apply the accumulated polynomial to x once
    # (17 small-matmul equivalents instead of 27). Unstable in bf16 and TF32.
    if exact and x.size(2) >= 4 * x.size(1):
        product, factor = None, None
        for a, b, c in NEWTON_SCHULZ:
            gram = gram if product is None else factor @ gram @ factor
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=1, dim2=2).add_(a)
            product = factor if product is None else factor @ product
        x = product @ x
    else:
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


def orthogonalize(x: Tensor, n_upright: int) -> list[Tensor]:
    """Muon's updates from x (M, rows, cols), where the matrices after the first n_upright are transposed.

    Rows have equal norm, times max(1, rows / cols) ** 0.5. Returns both parts, each in its parameters' orientation.
    """
    x = newton_schulz(x)
    updates = [normalize_rows(part) for part in (x[:n_upright], x[n_upright:].mT)]
    for update in updates:
        update.mul_(max(1.0, update.size(1) / update.size(2)) ** 0.5)
    return updates


class Optimizer(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, Adam (decoupled weight decay) for all else; for 1..N ranks.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), for one matrix w with gradient g:

        momentum.lerp_(g, 1 - beta)
        update = newton_schulz(g.lerp(momentum, beta))  # Nesterov
        update = normalize_rows(update) * max(1, rows / cols) ** 0.5
        w -= lr * (update + weight_decay * w)

    Matrices of one shape or its transpose are stacked across groups and orthogonalized in one batched call, in
    `ns_dtype`. The ranks split each stack, evenly or not, and exchange the results, also in `ns_dtype`, overlapped with
    the next stack or Adam.
    Under DDP every rank holds whole parameters, which stay bit-identical. Under FSDP each holds rows: every matrix is
    gathered on its owner, so that no shard is orthogonalized alone, and its update is scattered back; a stack then has
    one group and shape. With hybrid sharding both apply: shards are gathered within their group, and the groups split
    the matrices.
    `state[p]` holds this rank's part, on the device or, with `offload`, in (pinned) CPU memory.
    """

    fused = True  # False: a plain loop over parameters, bench.py's baseline, in which Adam ignores `skip`

    def __init__(self, groups: list[dict], ns_dtype=torch.float32, eps: float = 1e-10, offload: bool = False):
        super().__init__(groups, dict(lr=0.0))
        self.ns_dtype, self.eps = ns_dtype, eps
        self.offload = offload
        for group in self.param_groups:
            group.setdefault("momentum", group["betas"][0])
            if group["kind"] == "muon":
                group.setdefault("initial_momentum", group["momentum"])  # the final value of get_momentum's schedule
            for p in group["params"]:
                if p.requires_grad:
                    self.make_state(group, p)

    def make_state(self, group: dict, p: Tensor) -> None:
        place = dict(device="cpu", pin_memory=p.is_cuda) if self.offload else dict(device=p.device)
        slots, _ = OPTIMIZERS[group["kind"]]
        self.state[p] = {slot: torch.zeros(to_local(p).shape, dtype=p.dtype, **place) for slot in slots}
        if group["kind"] == "adam":
            self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, at its group's current `lr`; leave the others alone.

        skip: bool () on the device. If true, weights and state stay unchanged (though a -0 may become 0); it requires
        the fused kernels.
        """
        device = self.param_groups[0]["params"][0].device
        skip = torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip
        if device.type == "mps" and skip.item():  # MPS's fused kernels ignore found_inf
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self.state:  # it was frozen until now
                    self.make_state(group, p)
        pending = []
        for stack in matrix_stacks(self.param_groups, self.state, MAX_STACK_NUMEL, self.fused):
            updates, arrival = self.muon_updates(stack, skip)
            pending.append((stack, updates, arrival))
            if len(pending) > 1 or not arrival:  # exchange one stack while computing the next
                self.apply_updates(*pending.pop(0), skip)
        for group in self.param_groups:
            if group["kind"] == "muon":
                continue
            update = self.adam_update if group["kind"] == "adam" else self.other_update
            by_shape: dict[object, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape if self.fused else p, []).append(p)
            for params in by_shape.values():
                update(group, params, skip)
        for last in pending:
            self.apply_updates(*last, skip)

    def other_update(self, group: dict, params: list[Tensor], skip: Tensor) -> None:
        slots, update = OPTIMIZERS[group["kind"]]
        for p in params:
            with state_on_device(skip.device, [self.state[p][slot] for slot in slots]) as (state,):
                tensors = [to_local(p), *state]
                before = [t.clone() for t in tensors]
                update(group, tensors[0], to_local(p.grad), *state)
                for t, was in zip(tensors, before):
                    torch.where(skip, was, t, out=t)

    def adam_update(self, group: dict, params: list[Tensor], skip: Tensor) -> None:
        slots = [[self.state[p][slot] for p in params] for slot in ("exp_avg", "exp_avg_sq", "step")]
        with state_on_device(skip.device, *slots[:2]) as (exp_avgs, exp_avg_sqs):
            adamw(
                [to_local(p) for p in params],
                [to_local(p.grad) for p in params],
                exp_avgs,
                exp_avg_sqs,
                [],
                slots[2],
                fused=self.fused,
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
                found_inf=skip.float() if self.fused else None,
            )

    def muon_updates(self, stack: list[MuonSlice], skip: Tensor) -> tuple[Tensor, dist.Work | None]:
        """The updates of a stack, one per row, and a handle to wait on for those of other ranks, or None.

        Overwrites the gradients.
        """
        grads = [m.grad for m in stack]
        betas = [m.group["momentum"] for m in stack]
        mine = owned_part(stack)
        with state_on_device(skip.device, [m.momentum for m in stack]) as (momenta,):
            for grad, momentum in zip(grads, momenta):
                # Skipped step: momentum stands in for the gradient, so the lerp leaves the buffer unchanged.
                torch.where(skip, momentum, grad, out=grad)
            torch._foreach_lerp_(momenta, grads, [1 - beta for beta in betas])
            nesterov = torch._foreach_lerp(grads[mine], momenta[mine], betas[mine]) if grads[mine] else []
        updates = [orthogonalize(*batch) for batch in gather_matrices(stack, nesterov, self.ns_dtype)]
        return scatter_updates(stack, updates, self.ns_dtype)

    def apply_updates(self, stack: list[MuonSlice], updates: Tensor, arrival: dist.Work | None, skip: Tensor) -> None:
        if arrival:
            arrival.wait()
        for _, alike in itertools.groupby(stack, lambda matrix: (id(matrix.group), matrix.weight.shape)):
            matrices = list(alike)
            group, weight, n = matrices[0].group, matrices[0].weight, len(matrices)
            these, updates = updates[:n], updates[n:]
            sgd(  # without momentum: w -= lr * (update + weight_decay * w)
                [m.weight for m in matrices],
                list(these.view(n, *weight.shape).to(weight.dtype).unbind()),
                [None] * n,
                fused=True,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                found_inf=skip.float(),
            )
