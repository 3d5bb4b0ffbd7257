"""The GPT model, the initial values of its parameters, and its optimizer (Muon + Adam).

Differences from GPT-2:
- RMSNorm without gains, also on queries and keys (QK norm)
- rotary position embeddings on half of each head
- the other half of each key comes from the previous token (partial key offset)
- value embeddings, with a gate per head
- optional embeddings of hashed n-grams, added to the token embeddings
- squared leaky ReLU; no biases; an untied head, soft-capped logits
- the MLP's input and output add some of the previous token's, by channel
- in deep models, the final two blocks also read the inputs of earlier ones
- output projections, gates, head, value and n-gram embeddings start at zero; with several layers,
  the last one without a window starts as an induction head

In this file: 1 config, 2 layers, 3 GPT, 4 parameter table, 5 optimizer. In ops/: kernels, chunks of
the loss, float8, hashes of n-grams, communication between ranks. In inference/: generation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.values import derive_seed
from ops.attention import ATTENTION_KERNELS, attention_mask, layer_windows
from ops.cross_entropy import cross_entropy
from ops.elementwise import leaky_relu_squared, norm, previous_token, softcap
from ops.loss import chunked_loss
from ops.ngrams import NgramEmbedding, hash_ngrams, rmsprop_rows_
from ops.optimizer import adam_, batches_by_shape, on_whole_matrices, state_tensors
from ops.parallel import to_local

if TYPE_CHECKING:
    from inference.generation import KVCache, LayerCache
    from ops.attention import Mask

# --------------------------------------------------------------------------------------------------
# 1. Config


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. Checkpoints store these fields."""

    vocab_size: int = 50304
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    window: str = "L"  # layers in turn: L full, S sliding over seq_len / 4 keys; SL:256: 256 keys
    ngram: int = 0  # longest n-gram that has an embedding (3: bigrams and trigrams); 0: none
    ngram_rows: int = 16384  # size of the table that all n-grams share by hash
    softcap: float = 15.0  # tanh soft-cap on the logits; 0 disables
    rope_theta: float = 10000.0
    version: int = 7  # bump it when you change what is computed: older checkpoints are then refused

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated by position: half of them, an even number."""
        return 2 * (self.head_dim // 4)

    @property
    def gate_dim(self) -> int:
        """The gates read the first 16 channels of x: faster on a GPU than all (nanochat)."""
        return min(16, self.n_embd)

    @property
    def skips(self) -> tuple[int, ...]:
        """The blocks whose inputs the final two also read: none in shallow models."""
        return (0, 2 * self.n_layer // 3, self.n_layer - 3) if self.n_layer >= 10 else ()


# --------------------------------------------------------------------------------------------------
# 2. Layers. Shapes: B sequences of T tokens, C = n_embd


class Linear(nn.Linear):
    """A linear layer without bias. Its weight is fp32 and is cast to the dtype of x at each use.

    n_out: the number of outputs; or a list, to stack several matrices in one weight, such as those
    of q, k and v. Muon orthogonalizes each of them separately.
    """

    # What multiplies: --fp8 and sample.py --compile set another function in some layers
    matmul: Callable = staticmethod(F.linear)

    def __init__(self, n_in: int, n_out: int | list[int]):
        rows = [n_out] if isinstance(n_out, int) else n_out
        super().__init__(n_in, sum(rows), bias=False)
        self.matrix_rows = tuple(rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight.to(x.dtype))


def rotary_cos_sin(position: Tensor, cfg: GPTConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of the angles by which rotary embedding turns pairs of dimensions.

    position: int64 (T,). Returns (T, 1, R/2), R being cfg.rotary_dim.
    """
    half = cfg.rotary_dim // 2
    channel = torch.arange(half, device=position.device)
    frequency = cfg.rope_theta ** -(channel / half)
    angle = position[..., None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021): rotate x's dimensions i and i + R/2 as a pair.

    By minus the angle, as in nanochat: attention sees differences only. x: (B, T, n_head, R). cos,
    sin: from rotary_cos_sin. Returns the halves of the result, for the caller to concatenate.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


def may_attend(
    query: Tensor,
    key: Tensor,
    window: int,
    query_doc: Tensor | bool | None = None,
    key_doc: Tensor | None = None,
) -> Tensor:
    """Return True where a query may attend to a key.

    query, key: positions. window: how many keys back, the query's own included; 0 is all.
    query_doc, key_doc: equal if both are in one document; None without --doc_mask. Training passes
    numbers of documents, generation always passes True and a bool per key.

    Edit this to change the mask. Exceptions: --attn varlen and the export for Transformers have
    their own; --attn blocked and the KV cache leave out keys beyond the window, whatever this says.
    """
    allowed = key <= query
    if window:
        allowed = allowed & (key > query - window)
    if query_doc is not None:
        allowed = allowed & (query_doc == key_doc)
    return allowed


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, attn_backend: str, window: int
) -> Tensor:
    """Softmax attention. q, k, v: (B, n_head, T, head_dim).

    attn_backend: "sdpa" for PyTorch's kernels, or a key of ATTENTION_KERNELS.
    mask: None for plain causal attention, otherwise of the type that the backend takes.
    window: the mask's, for kernels that skip whole blocks of keys.
    """
    if attn_backend == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    # The same result from a different kernel: flash, flex, blocked, ...
    return ATTENTION_KERNELS[attn_backend](q, k, v, mask, window)


class AttnContext(NamedTuple):
    """The inputs of a block besides x."""

    cos: Tensor  # for the positions: (T, 1, R/2)
    sin: Tensor
    doc_starts: Tensor | None  # bool (B, T): True where a document starts, with --doc_mask
    window: int  # this layer's, as in may_attend
    mask: Mask  # for this window, as in attention
    attn_backend: str
    value_embed: Tensor  # (B, T, C)
    skips: tuple[Tensor, ...] = ()  # inputs of earlier blocks, (B, T, C) each; see GPTConfig.skips
    kv_cache: LayerCache | None = None  # this layer's, in generation


class CausalSelfAttention(nn.Module):
    """Multi-head attention with QK norm (Henry et al. 2020) and value embeddings (speedrun)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head = cfg.n_head
        self.head_dim = cfg.head_dim
        self.rotary_dim = cfg.rotary_dim
        self.gate_dim = cfg.gate_dim
        # W_q, W_k and W_v in one weight
        self.qkv = Linear(cfg.n_embd, [cfg.n_embd, cfg.n_embd, cfg.n_embd])
        # Gate of the value embeddings, one per head
        self.gate = Linear(cfg.gate_dim, cfg.n_head)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        B, T, C = x.shape

        # (B, T, n_head, head_dim) each
        qkv = self.qkv(x).view(B, T, 3 * self.n_head, self.head_dim)
        q, k, v = qkv.split((self.n_head, self.n_head, self.n_head), dim=2)
        q, k = norm(q), norm(k)

        # Half of each head is rotated by position. The other half of a key is the previous token's
        # (partial key offset, speedrun): a query that looks for its own token then finds what came
        # after an earlier occurrence. That is induction in one layer instead of two
        halves = (self.rotary_dim, self.head_dim - self.rotary_dim)
        q_rotary, q_rest = q.split(halves, dim=-1)
        k_rotary, k_rest = k.split(halves, dim=-1)
        k_rest = previous_token(k_rest, ctx, "key")  # "key": its name in the KV cache
        q = torch.cat((*rotate(q_rotary, ctx.cos, ctx.sin), q_rest), dim=-1)
        k = torch.cat((*rotate(k_rotary, ctx.cos, ctx.sin), k_rest), dim=-1)

        # Each head adds its part of the value embedding, times a gate between 0 and 2
        gate = 2 * self.gate(x[..., : self.gate_dim]).sigmoid()  # (B, T, n_head)
        v = v + gate[..., None] * ctx.value_embed.view(B, T, self.n_head, self.head_dim)

        # Heads before positions: (B, n_head, T, head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if ctx.kv_cache is None:
            y = attention(q, k, v, ctx.mask, ctx.attn_backend, ctx.window)
        else:
            k, v = ctx.kv_cache.append(k, v)
            y = ctx.kv_cache.attention(q, k, v, ctx.mask)

        # All heads side by side again
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.proj(y)

    def init_as_induction_head(self) -> None:
        """Set W_k = W_q in the dimensions of a key that come from the previous token.

        A query then matches the keys that follow its own token, so the layer can copy what came
        after an earlier occurrence: an induction head (Olsson et al. 2022). From random weights,
        some runs never learn that. It is mimetic initialization (Trockman and Kolter 2023).
        """
        w_q, w_k, _ = self.qkv.weight.split(self.qkv.matrix_rows)
        w_q = w_q.view(self.n_head, self.head_dim, -1)
        w_k = w_k.view(self.n_head, self.head_dim, -1)
        w_k[:, self.rotary_dim :] = w_q[:, self.rotary_dim :]


class MLP(nn.Module):
    """Feed-forward layer with a hidden width of 4 * n_embd; leaky_relu(x, 0.5)^2 in between."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.proj = Linear(4 * cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(leaky_relu_squared(self.fc(x)))


class Block(nn.Module):
    """One transformer layer. layer: its index. dropout: of what attention and MLP add to x."""

    def __init__(self, cfg: GPTConfig, layer: int, dropout: float):
        super().__init__()
        self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)
        self.dropout = nn.Dropout(dropout)
        # For each channel, how much the previous token's is added to the MLP's input and output
        self.previous_in = nn.Parameter(torch.zeros(cfg.n_embd))
        self.previous_out = nn.Parameter(torch.zeros(cfg.n_embd))
        # The final two of a deep model also read the inputs of earlier ones
        has_skips = cfg.skips and layer >= cfg.n_layer - 2
        self.skip = nn.Parameter(torch.zeros(len(cfg.skips))) if has_skips else None

    def forward(self, x: Tensor, ctx: AttnContext) -> Tensor:
        # What attention and MLP read besides x: inputs of earlier blocks, each times a weight
        # (DenseFormer, Pagliardini et al. 2024). Added to x itself, they would get gradients of
        # rounding errors in step 2, when all inputs are still equal, and Adam would magnify them
        has_skips = self.skip is not None
        if has_skips:
            earlier = sum(weight * skip for weight, skip in zip(self.skip.to(x.dtype), ctx.skips))

        x = x + self.dropout(self.attn(norm(x + earlier if has_skips else x), ctx))

        h = norm(x + earlier if has_skips else x)
        # Shifted after the product: for its gradient, autograd then keeps no shifted copy
        h = h + previous_token(self.previous_in.to(x.dtype) * h, ctx, "mlp_in")
        y = self.mlp(h)
        y = y + previous_token(self.previous_out.to(x.dtype) * y, ctx, "mlp_out")
        return x + self.dropout(y)


# --------------------------------------------------------------------------------------------------
# 3. GPT: embeddings, blocks, head, loss


class GPT(nn.Module):
    """Takes token ids; returns the loss, or logits if there are no targets. Parameters are fp32.

    cfg: the shape
    compute_dtype: dtype of the activations
    loss_chunk: tokens per chunk of head and loss, so that few logits exist at once; 0 is all
    attn_backend: as in attention(); like loss_chunk, it changes results by rounding only
    eot: the end-of-text token, which precedes each document; if given, documents are masked from
        each other
    dropout: probability of dropping a number that attention or MLP adds to x, in training; which
        numbers depends on ranks and micro-batches
    ngram_dropout: probability of dropping an n-gram's embedding in training
    seed: of the initial values (init_weights); None leaves them to a checkpoint
    """

    def __init__(
        self,
        cfg: GPTConfig,
        compute_dtype: torch.dtype = torch.float32,
        loss_chunk: int = 0,
        attn_backend: str = "sdpa",
        eot: int | None = None,
        dropout: float = 0.0,
        ngram_dropout: float = 0.0,
        seed: int | None = 0,
    ):
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.loss_chunk = loss_chunk
        self.attn_backend = attn_backend
        self.eot = eot
        self.ngram_dropout = ngram_dropout
        self.step_seed = 0  # for n-gram dropout, equal on all ranks; the trainer sets it per step
        self.compiled_loss: Any = None  # apply_compile sets it, to LossFunctions
        self.windows = layer_windows(cfg.window, cfg.n_layer, cfg.seq_len)

        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.value_embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.ngrams = None
        if cfg.ngram > 1:
            self.ngrams = NgramEmbedding(cfg.ngram_rows, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg, layer, dropout) for layer in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)

        if seed is not None:  # at the end, because it needs every parameter
            init_weights(self, seed)

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """idx, targets: integer (B, T), T <= seq_len; targets of -1 are left out of the loss.

        With targets: the mean loss over them in nats, as a scalar in fp32; 0 if all are -1.
        Without: logits, fp32 (B, T, vocab_size).
        """
        x = self.backbone(idx)
        if targets is None:
            return self.logits(x)
        return self.loss(x, targets)

    def backbone(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Embeddings and blocks: the normalized output of the last block, (B, T, C).

        idx: integer (B, T). cache: in generation, of the tokens before idx, which is added to it.
        """
        T = idx.size(1)
        if T > self.cfg.seq_len:
            raise ValueError(f"got {T} tokens; the model's context is {self.cfg.seq_len}: cut them")
        # tokens: idx; in generation, those that its n-grams reach back to come first. position and
        # masks are for idx only
        if cache is None:
            tokens = idx
            position = torch.arange(T, device=idx.device)
            masks = self.attention_masks(idx, self.attn_backend)
        else:
            tokens, position, masks = cache.add(self, idx)

        # The same inputs for all blocks
        cos, sin = rotary_cos_sin(position, self.cfg, self.compute_dtype)
        value_embed = self.value_embed(idx).to(self.compute_dtype)
        doc_starts = None
        if self.eot is not None:
            doc_starts = idx == self.eot

        x = self.embed(tokens, T).to(self.compute_dtype)
        x = norm(x)
        skips = []
        for layer, block in enumerate(self.blocks):
            if layer in self.cfg.skips:
                skips.append(x)
            window = self.windows[layer]
            ctx = AttnContext(
                cos=cos,
                sin=sin,
                doc_starts=doc_starts,
                window=window,
                mask=masks[window],
                attn_backend=self.attn_backend,
                value_embed=value_embed,
                skips=tuple(skips) if block.skip is not None else (),
                kv_cache=None if cache is None else cache.layers[layer],
            )
            x = block(x, ctx)
        return norm(x)

    def embed(self, tokens: Tensor, T: int) -> Tensor:
        """Embed the final T of the tokens, and the n-grams that end at each: (B, T, C).

        tokens: (B, T), in generation a few more, which came before.
        """
        x = self.wte(tokens[:, -T:])
        if self.ngrams is None:
            return x

        # A number for each n-gram that ends at a token, a hash of its tokens: it selects the row
        # that NgramEmbedding adds
        hashes = hash_ngrams(tokens, self.cfg.ngram, self.eot)[:, -T:]  # (B, T, ngram - 1)
        dropout = self.ngram_dropout if self.training else 0.0
        return x + self.ngrams(hashes, dropout, self.step_seed).to(x.dtype)

    def attention_masks(self, idx: Tensor, attn_backend: str) -> dict[int, Mask]:
        """Make the mask of each window, for idx (B, T), in the form that attn_backend takes.

        attn_backend: self.attn_backend, except in generation: the KV cache needs masks as tensors,
        those of "sdpa".
        """
        masks = {}
        for window in set(self.windows):
            masks[window] = attention_mask(attn_backend, may_attend, idx, window, self.eot)
        return masks

    def logits(self, x: Tensor) -> Tensor:
        """Apply head and soft-cap to backbone's output x (..., C): fp32 (..., vocab_size)."""
        return softcap(self.head(x).float(), self.cfg.softcap)

    def token_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of N tokens: backbone's x (N, C), targets int64 (N,).

        To change the loss, edit this. It must return the mean over targets that are not -1.
        cross_entropy soft-caps the logits, as self.logits does.
        """
        return cross_entropy(self.head(x), targets, self.cfg.softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The token_loss of x (B, T, C) and targets (B, T), in chunks of `loss_chunk` tokens."""
        # chunked_loss computes the gradients itself, in the forward pass. It needs the parameters
        # that token_loss may use: all outside of the blocks
        params = [p for name, p in self.named_parameters() if not name.startswith("blocks.")]
        return chunked_loss(
            self.token_loss,
            params,
            x.flatten(0, 1),
            targets.flatten(),
            chunk=self.loss_chunk,
            compiled=self.compiled_loss,
        )

    def generate(self, idx: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Sample tokens after idx, integer (B, T): returns int64 (B, T + max_new_tokens).

        options: of inference.generation.generate, such as temperature. Call eval() first.
        """
        from inference.generation import generate  # which imports this file

        options = dict(vocab_size=self.cfg.vocab_size) | options
        tokens = generate(self, idx, n_tokens=max_new_tokens, **options)
        return torch.cat((idx.long().to(self.device), *(t[:, None] for t in tokens)), dim=1)

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token: of matmuls with weights, and of attention."""
        # Keys that a query of a full context attends to, on average, summed over the layers: the
        # i-th query attends to min(i, window)
        T = self.cfg.seq_len
        attended = 0.0
        for window in self.windows:
            longest = window or T
            attended += longest - longest * (longest - 1) / (2 * T)

        # Tables are looked up, not multiplied (NgramEmbedding, too, is an nn.Embedding)
        matmul_weights = 0
        for module in self.modules():
            if not isinstance(module, nn.Embedding):
                params = module.parameters(recurse=False)
                matmul_weights += sum(p.numel() for p in params if p.dim() > 1)
        # Forward, 2 FLOPs per weight; and 2 * n_embd per key for q k^T, as much for scores times v.
        # Backward takes twice as many
        return 6 * matmul_weights + 12 * self.cfg.n_embd * attended


# --------------------------------------------------------------------------------------------------
# 4. Parameter table


def normal(std: float) -> Callable:
    """Return an initializer: normal, with this standard deviation."""
    return lambda x, generator: x.normal_(0, std, generator=generator)


def scaled_normal(std: float) -> Callable:
    """Return an initializer: normal, with a standard deviation of std / sqrt(number of inputs)."""
    return lambda x, generator: x.normal_(0, std / x.size(-1) ** 0.5, generator=generator)


def zeros(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.zero_()


class ParamSpec(NamedTuple):
    """How parameters, by name, are initialized and (except with --optimizer adamw) optimized."""

    pattern: str = ""  # regular expression for the whole name
    init: Callable | None = None  # None: keep the module's initialization
    optim: str = ""  # "muon", "adam", "rmsprop"; default: Muon for matrices in blocks, else Adam
    lr_mul: float = 1.0  # learning rate, relative to --muon_lr or --adam_lr
    betas: tuple[float, float] = (0.8, 0.95)  # for Adam; RMSprop uses the second
    decay: float = 0.0  # times --embed_decay; not for Muon, which has --weight_decay


# The first matching row applies. Parameters without one keep their module's initialization and
# ParamSpec's defaults. The rates of the embeddings were tuned on the laptop preset.
PARAM_TABLE = [
    ParamSpec(r"wte\.weight", init=normal(1.0), lr_mul=75.0, decay=1.0),
    ParamSpec(r"value_embed\.weight", init=zeros, lr_mul=5.0, decay=1.0),
    # A step reads few rows of this table. Momentum would keep moving the others
    ParamSpec(
        r"ngrams\.weight", init=zeros, optim="rmsprop", lr_mul=17.0, betas=(0.0, 0.9), decay=1.0
    ),
    # Zero: a new model gives all tokens the same probability, its blocks pass x through, and its
    # gates are 1
    ParamSpec(r"head\.weight", init=zeros),
    ParamSpec(r"blocks\.\d+\.(attn|mlp)\.proj\.weight", init=zeros),
    ParamSpec(r"blocks\.\d+\.previous_(in|out)", init=zeros),
    # Weights of skips end far from zero, at 10 and more
    ParamSpec(r"blocks\.\d+\.skip", init=zeros, lr_mul=20.0),
    # Gates are matrices of a few rows, one per head, which gain nothing from Muon
    ParamSpec(r"blocks\.\d+\.attn\.gate\.weight", init=zeros, optim="adam"),
    # sqrt(0.33 / inputs): nn.Linear's default but for 0.33 instead of 1/3, kept for recorded runs
    ParamSpec(r"blocks\.\d+\.(attn\.qkv|mlp\.fc)\.weight", init=scaled_normal(0.33**0.5)),
]


def get_spec(name: str, param: Tensor) -> ParamSpec:
    """Return the row of a parameter, or the defaults, with its optimizer filled in."""
    found = ParamSpec()
    for spec in PARAM_TABLE:
        if re.fullmatch(spec.pattern, name):
            found = spec
            break
    if found.optim:
        return found
    return found._replace(optim="muon" if is_block_matrix(name, param) else "adam")


def is_block_matrix(name: str, param: Tensor) -> bool:
    """True for what Muon trains by default: matrices in blocks.

    Parameters of three dimensions, such as stacked experts, go to Adam.
    """
    return name.startswith("blocks.") and param.dim() == 2


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialize the parameters of PARAM_TABLE; start one of several layers as an induction head.

    Each parameter has a seed of its own, from its name, and is drawn on the CPU: its values do not
    depend on the device, on other parameters or on the number of ranks.
    """
    for name, param in model.named_parameters():
        init = get_spec(name, param).init
        if init is not None:
            # >> 1: 63 bits, as the recorded runs were drawn
            generator = torch.Generator().manual_seed(derive_seed(seed, name) >> 1)
            values = torch.empty(param.shape, device="cpu")
            param.copy_(init(values, generator))

    # Of several layers, the last that attends to everything, or simply the last. An earlier one was
    # worse in deep models (docs/recipe.md)
    if len(model.blocks) > 1:
        unlimited = [b for b, window in zip(model.blocks, model.windows) if window == 0]
        block = unlimited[-1] if unlimited else model.blocks[-1]
        block.attn.init_as_induction_head()


def optimizer_groups(
    model: GPT,
    *,
    optimizer: str,
    muon_lr: float,
    adam_lr: float,
    weight_decay: float,
    embed_decay: float,
    max_steps: int,
) -> list[dict]:
    """Parameter groups for Optimizer: parameters with equal settings share one.

    optimizer: "muon", or "adamw" for Adam everywhere, with adam_lr and weight_decay for all.
    weight_decay: a step multiplies the blocks' matrices by 1 - lr * weight_decay.
    embed_decay: max_steps steps at the peak rate multiply embeddings by exp(-embed_decay) (Wang and
    Aitchison 2024).
    """
    decay_per_step = 1 - math.exp(-embed_decay / max_steps)
    groups: dict[tuple, dict] = {}  # settings -> group
    for name, param in model.named_parameters():
        # Muon has muon_lr and weight_decay; Adam and RMSprop have adam_lr and embed_decay. A method
        # of your own gets Muon's settings for matrices in blocks, Adam's for the rest
        spec = get_spec(name, param)
        has_muon_lr = spec.optim == "muon"
        if spec.optim not in ("muon", "adam", "rmsprop"):
            has_muon_lr = is_block_matrix(name, param)
        if optimizer == "adamw":
            settings = dict(
                kind="adam",
                lr=adam_lr,
                betas=(0.9, 0.95),
                weight_decay=weight_decay,
            )
        elif has_muon_lr:
            settings = dict(
                kind=spec.optim,
                lr=spec.lr_mul * muon_lr,
                momentum=0.95,  # of Muon, train_step sets it: get_momentum
                betas=spec.betas,  # for a method of your own
                weight_decay=weight_decay,
                matrix_rows=get_matrix_rows(model, name, param),
            )
        else:
            lr = spec.lr_mul * adam_lr
            # A step decays by lr * weight_decay: divide by the peak rate
            decay = spec.decay * decay_per_step / lr if lr else 0.0
            settings = dict(kind=spec.optim, lr=lr, betas=spec.betas, weight_decay=decay)

        # Parameters with equal settings share a group
        key = tuple(settings.values())
        if key not in groups:
            groups[key] = dict(params=[], **settings)
        groups[key]["params"].append(param)
    return list(groups.values())


def get_matrix_rows(model: GPT, name: str, param: Tensor) -> tuple[int, ...]:
    """The row counts of the matrices that are stacked in this parameter (see Linear)."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, Linear) and name.endswith(".weight"):
        return module.matrix_rows
    return (len(param),)


# --------------------------------------------------------------------------------------------------
# 5. Optimizer: Muon + Adam

# Polar Express (Amsel et al. 2025): tuned coefficients of the Newton-Schulz iteration. Iteration i
# maps each singular value s to a s + b s^3 + c s^5 with row i's (a, b, c)
POLAR_EXPRESS_COEFFS = [
    (7.9339, -22.2516, 15.7938),
    (3.5701, -2.5678, 0.4861),
    (2.6780, -1.9908, 0.4541),
]


def newton_schulz(x: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix of each one in a batch x (M, rows, cols).

    Muon's quintic Newton-Schulz iteration (Jordan et al. 2024). x is first scaled so that no
    singular value exceeds 1; those above 0.01 then end up in [0.7, 1.3]. Zeros stay zero.
    """
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT

    # |x x^T| is at least the largest singular value squared, and at most |x|^2, by which Muon
    # divides: a tighter bound
    gram = x @ x.mT
    scale = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True).clamp(min=1e-14)
    gram = gram / scale
    x = x / scale.sqrt()

    # One quintic after the other
    for i, (a, b, c) in enumerate(POLAR_EXPRESS_COEFFS):
        if i > 0:
            gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, poly, x, beta=a)  # a x + poly x

    if tall:
        x = x.mT
    return x


def normalize_rows(x: Tensor) -> Tensor:
    """Give all rows of a matrix the same norm, keeping the norm of the whole. x: (M, rows, cols).

    NorMuon (Li et al. 2025) divides rows by a running mean of their norms instead.
    """

    def frobenius_norm(t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, dim=(1, 2), keepdim=True, dtype=torch.float32)

    unit_rows = F.normalize(x.float(), dim=-1)
    scale = frobenius_norm(x) / frobenius_norm(unit_rows).clamp(min=1e-6)
    return (unit_rows * scale).to(x.dtype)


def orthogonalize(x: Tensor, matrix_rows: tuple[int, ...]) -> Tensor:
    """Muon's updates for a batch x (M, rows, cols), before the learning rate.

    matrix_rows: the numbers of rows of the matrices that each x[i] stacks, from Linear.
    """
    updates = []
    for part in x.split(matrix_rows, dim=1):
        rows, cols = part.shape[1:]
        part = normalize_rows(newton_schulz(part))
        updates.append(part * max(1.0, rows / cols) ** 0.5)
    return torch.cat(updates, dim=1)


class Optimizer(torch.optim.Optimizer):
    """Muon for matrices in blocks, RMSprop for n-grams, Adam (decoupled weight decay) for the rest.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), for a matrix w with
    gradient g:

        momentum.lerp_(g, 1 - beta)
        update = newton_schulz(g.lerp(momentum, beta))  # Nesterov
        update = normalize_rows(update) * max(1, rows / cols) ** 0.5
        w -= lr * (update + weight_decay * w)

    Matrices of one shape are stacked and updated together.

    groups: from optimizer_groups. ns_dtype: of Newton-Schulz. eps: for Adam and RMSprop.
    offload: keep momentum and Adam's means in pinned CPU memory.
    """

    def __init__(
        self,
        groups: list[dict],
        ns_dtype: torch.dtype = torch.float32,
        eps: float = 1e-10,
        offload: bool = False,
    ):
        super().__init__(groups, {})
        self.ns_dtype = ns_dtype
        self.eps = eps
        self.offload = offload

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            update = getattr(self, group["kind"])  # muon, adam or rmsprop, below
            params = [p for p in group["params"] if p.grad is not None]
            for same_shape in batches_by_shape(params):  # can be stacked
                update(group, same_shape)

    def muon(self, group: dict, params: list[Tensor]) -> None:
        """Update matrices of one shape by Muon."""
        weights = [to_local(p) for p in params]
        grads = [to_local(p.grad) for p in params]
        lr, beta = group["lr"], group["momentum"]

        # Momentum, zeros at first, and Nesterov's step. With --offload, momenta are copies, which
        # leaving the `with` statement writes back to CPU memory
        with state_tensors(self, "momentum", params) as momenta:
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            nesterov = torch._foreach_lerp(grads, momenta, beta)

        # In ns_dtype, stacked. Several ranks share the matrices: each orthogonalizes some, then
        # receives its rows of all (ops/optimizer.py)
        updates = on_whole_matrices(
            lambda x: orthogonalize(x, group["matrix_rows"]), nesterov, params, self.ns_dtype
        )

        # Decoupled weight decay, and the update
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)

    def adam(self, group: dict, params: list[Tensor]) -> None:
        """Update parameters of one shape by Adam, PyTorch's fused kernel (ops/optimizer.py)."""
        adam_(self, group, params)

    def rmsprop(self, group: dict, params: list[Tensor]) -> None:
        """Update tables by RMSprop, with one mean square per row (ops/ngrams.py)."""
        for p in params:
            rmsprop_rows_(
                to_local(p),
                to_local(p.grad),
                self.state[p],
                lr=group["lr"],
                beta=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
            )
