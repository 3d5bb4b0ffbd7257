"""GPT and its optimizer: attention, modules, loss, KV cache, generation, Muon + Adam. Imports torch only.

Read from top to bottom: GPTConfig, attention, modules, loss, KV cache and generation, roles, optimizer.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

# ---------------------------------------------------------------------------------------------------------------------
# 1. GPTConfig


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. A checkpoint stores these fields, and nothing else is needed to build the model again."""

    vocab_size: int = 50304
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 6
    n_embd: int = 768
    window: str = "L"  # a letter a layer, repeated: L full context, S a sliding window; "SSSL:256" sets its size
    softcap: float = 15.0  # logits are squashed to (-softcap, softcap); 0 = off
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def layer_windows(self) -> list[int]:
        """Tokens that each layer's attention sees, itself included (0 = the whole context).

        Raises ValueError when `window` is not letters S and L with an optional `:size` (default: a quarter of seq_len).
        """
        match = re.fullmatch(r"([SL]+)(?::([1-9]\d*))?", self.window)
        if not match:
            raise ValueError(f"window is {self.window!r}; expected letters S and L, as in SSSL or SSSL:256")
        pattern, size = match[1], int(match[2] or max(1, self.seq_len // 4))
        return [size if pattern[i % len(pattern)] == "S" else 0 for i in range(self.n_layer)]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Attention: one function, one meaning: causal, with an optional sliding window


def attention_mask(n_query: int, n_key: int, window: int, device: torch.device) -> Tensor | None:
    """Which keys each query sees, bool (n_query, n_key); None where plain causal attention says the same.

    The queries are the last n_query of the n_key positions.
    """
    if n_query == n_key and (window == 0 or window >= n_key):
        return None
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)
    mask = key <= query
    return mask & (key > query - window) if window else mask


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of q (B, H, T, D) over k and v (B, H, S, D) under `mask` (T, S), or causal where it is None."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Modules


class Linear(nn.Linear):
    """Matrix product without bias in the activations' dtype: the weight stays fp32 and is cast at each use."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain (the next matrix can hold one), over the last dimension."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (B, T, H, D), with cos and sin (T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


class Attention(nn.Module):
    """Multi-head causal attention with normalised queries and keys (QK-norm: Henry et al. 2020)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_head, self.head_dim = cfg.n_head, cfg.head_dim
        self.qkv = Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.proj = Linear(cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: "LayerCache | None") -> Tensor:
        batch, length, n_embd = x.shape
        qk, v = self.qkv(x).view(batch, length, 3 * self.n_head, self.head_dim).split((2 * self.n_head, self.n_head), 2)
        q, k = rotate(norm(qk), cos, sin).split(self.n_head, 2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = past.append(k, v)
        y = attention(q, k, v, mask)
        return self.proj(y.transpose(1, 2).reshape(batch, length, n_embd))


class MLP(nn.Module):
    """Four times as wide inside, with ReLU squared (So et al. 2021)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.proj = Linear(4 * cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square())


class Block(nn.Module):
    """One transformer layer; a function of tensors only, so that one compilation serves every block."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.attn = Attention(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, past=None) -> Tensor:
        x = x + self.attn(norm(x), cos, sin, mask, past)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Token ids in, loss or logits out. Weights are fp32; activations have the dtype `compute_dtype`."""

    def __init__(self, cfg: GPTConfig, compute_dtype: torch.dtype = torch.float32, loss_chunk: int = 0):
        super().__init__()
        self.cfg, self.compute_dtype, self.loss_chunk = cfg, compute_dtype, loss_chunk
        self.windows = cfg.layer_windows()
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.head = Linear(cfg.n_embd, cfg.vocab_size)
        self.loss_grad = cross_entropy_grad
        self.register_buffer("cos", torch.empty(cfg.seq_len, 1, cfg.head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(cfg.seq_len, 1, cfg.head_dim // 2), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """(Re)compute the rotary tables, which no checkpoint holds."""
        half, theta = self.cfg.head_dim // 2, self.cfg.rope_theta
        frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(self.cfg.seq_len, dtype=torch.float64), frequency)[:, None]
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def compile_parts(self, mode: str) -> None:
        """Compile each block and the loss in place: blocks share one compilation, and names of parameters stay."""
        for block in self.blocks:
            block.compile(mode=mode, dynamic=False, fullgraph=True)
        self.loss_grad = torch.compile(cross_entropy_grad, mode=mode, dynamic=False, fullgraph=True)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: "KVCache | None" = None) -> Tensor:
        """idx and targets are integer (B, T), T <= seq_len; a target of -1 is not counted.

        With targets: the *sum* of the token losses in nats, fp32 (), so that means over any split of a batch are exact.
        Without: fp32 logits (B, T, vocab_size). With a cache: idx follows what the cache holds, and the logits are
        those of its last position only, (B, 1, vocab_size).
        """
        past = 0 if cache is None else cache.length
        end = past + idx.size(1)
        if end > self.cfg.seq_len:
            raise ValueError(f"{end} tokens exceed the model's context of {self.cfg.seq_len}; pass fewer tokens")
        cos, sin = (table[past:end].to(self.compute_dtype) for table in (self.cos, self.sin))
        masks = {window: attention_mask(end - past, end, window, idx.device) for window in set(self.windows)}
        x = norm(self.wte(idx).to(self.compute_dtype))
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, masks[self.windows[i]], cache and cache.layers[i])
        x = norm(x)
        if targets is not None:
            return self.loss(x.flatten(0, 1), targets.flatten())
        if cache is not None:
            cache.length = end
            x = x[:, -1:]
        return softcapped(self.head(x).float(), self.cfg.softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of x (N, n_embd) against targets (N,), fp32 ()."""
        if self.loss_chunk:
            return ChunkedLoss.apply(x, self.head.weight, targets, self.cfg.softcap, self.loss_chunk, self.loss_grad)
        logits = softcapped(self.head(x).float(), self.cfg.softcap)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")


# ---------------------------------------------------------------------------------------------------------------------
# 4. Loss


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Squash logits into (-softcap, softcap) (Gemma 2, 2024); 0 leaves them alone."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def cross_entropy_grad(logits: Tensor, targets: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of softcapped logits (N, V), fp32 (), and its gradient by the logits, in their dtype."""
    capped = softcapped(logits.float(), softcap)
    log_z = capped.logsumexp(-1, keepdim=True)
    counted = (targets >= 0)[:, None]
    target = targets.clamp(min=0)[:, None]
    loss = torch.where(counted, log_z - capped.gather(1, target), 0).sum()
    grad = (capped - log_z).exp_().scatter_add_(1, target, torch.full_like(log_z, -1.0))
    if softcap:
        grad = grad * (1 - (capped / softcap).square())
    return loss, torch.where(counted, grad, 0).to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Head and cross entropy, `chunk` rows at a time: the logits of the whole batch never exist.

    The gradients are made in the forward pass while each chunk's logits are at hand, as in Liger Kernel
    (Hsu et al. 2024), so nothing is computed twice and only x and two gradients are kept.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, chunk, loss_grad):
        w = weight.to(x.dtype)
        need_grad = any(ctx.needs_input_grad[:2])
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)) if need_grad else (None, None)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for rows in (slice(i, i + chunk) for i in range(0, x.size(0), chunk)):
            logits = x[rows] @ w.T
            if need_grad:
                loss, dlogits = loss_grad(logits, targets[rows], softcap)
                dx[rows] = dlogits @ w
                dw += dlogits.T @ x[rows]
            else:
                logits = softcapped(logits.float(), softcap)
                loss = F.cross_entropy(logits, targets[rows], ignore_index=-1, reduction="sum")
            total += loss
        if need_grad:
            ctx.save_for_backward(dx, dw.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx * grad.to(dx.dtype), dw * grad.to(dw.dtype), None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# 5. KV cache and generation


class LayerCache:
    """One layer's keys and values, (B, n_head, max_len, head_dim) each, filled from the left."""

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.length = k, v, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v (B, n_head, T, head_dim) behind what is there; returns all keys and values so far."""
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


class KVCache:
    """Keys and values of the tokens a model has read: each new token then costs one position, not the whole text."""

    def __init__(self, model: GPT, batch: int):
        cfg, device = model.cfg, model.wte.weight.device
        shape = (2, batch, cfg.n_head, cfg.seq_len, cfg.head_dim)
        self.layers = [
            LayerCache(*torch.zeros(shape, dtype=model.compute_dtype, device=device)) for _ in range(cfg.n_layer)
        ]
        self.length = 0


@torch.no_grad()
def generate(model: GPT, idx: Tensor, n_tokens: int, vocab_size: int, temperature: float = 1.0, top_k: int = 0,
             top_p: float = 1.0, generator: torch.Generator | None = None, use_cache: bool = True):  # fmt: skip
    """Continue the prompt idx, integer (B, T >= 1): yields n_tokens times the next tokens, int64 (B,).

    temperature 0 takes the likeliest token; top_k keeps the k likeliest (0 = all); top_p the fewest whose probability
    reaches it (Holtzman et al. 2019). Ids from vocab_size on are padding of the head and never drawn. Past the
    model's context, the last half of it is read again as the new context.
    """
    context, cache = idx[:, -model.cfg.seq_len :], None
    for _ in range(n_tokens):
        if context.size(1) > model.cfg.seq_len:
            context, cache = context[:, -(model.cfg.seq_len // 2 or 1) :], None
        if not use_cache:
            logits = model(context)[:, -1]
        elif cache is None:
            cache = KVCache(model, context.size(0))
            logits = model(context, cache=cache)[:, -1]
        else:
            logits = model(context[:, -1:], cache=cache)[:, -1]
        token = draw(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        yield token
        context = torch.cat((context, token[:, None]), dim=1)


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    """One token a row from fp32 logits (B, V), int64 (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    values, order = (logits / temperature).sort(descending=True)
    p = values.softmax(-1)
    if top_k:
        p[:, top_k:] = 0
    if top_p < 1:
        p[p.cumsum(-1) - p >= top_p * p.sum(-1, keepdim=True)] = 0
    return order.gather(1, torch.multinomial(p, 1, generator=generator))[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# 6. Roles and optimizer


class Role(NamedTuple):
    """How the parameters whose names match are initialised and optimized."""

    names: str  # regular expression for the whole name
    std: float  # of the initial normal distribution, times fan_in ** -0.5 for matrices; 0 = zeros
    kind: str  # "muon" or "adam"
    lr: float  # multiple of muon_lr or adam_lr
    betas: tuple[float, float]  # Adam's; Muon's momentum is the first
    decay: float  # multiple of weight_decay
    split: int = 1  # square matrices stacked in this parameter; Muon orthogonalises each on its own


# The one table of parameters: every parameter must match exactly one row.
ROLES = {
    "embedding": Role(r"wte\.weight", 1.0, "adam", 75.0, (0.8, 0.95), 0.0),
    "head": Role(r"head\.weight", 0.0, "adam", 1.0, (0.8, 0.95), 0.0),
    "qkv": Role(r"blocks\.\d+\.attn\.qkv\.weight", 0.33**0.5, "muon", 1.0, (0.95, 0.0), 1.0, split=3),
    "mlp_in": Role(r"blocks\.\d+\.mlp\.fc\.weight", 0.33**0.5, "muon", 1.0, (0.95, 0.0), 1.0),
    "proj": Role(r"blocks\.\d+\.(attn|mlp)\.proj\.weight", 0.0, "muon", 1.0, (0.95, 0.0), 1.0),
}


def role_of(name: str) -> str:
    """The row of ROLES that the parameter belongs to. Raises ValueError unless exactly one row matches."""
    rows = [role for role, row in ROLES.items() if re.fullmatch(row.names, name)]
    if len(rows) != 1:
        raise ValueError(f"parameter {name} matches {len(rows)} rows of ROLES in model.py {rows}; it needs exactly one")
    return rows[0]


def initial_weight(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The full initial tensor, fp32 on the CPU: a function of (seed, name), whatever the ranks and devices."""
    role = ROLES[role_of(name)]
    fan_in = 1 if name == "wte.weight" else shape[-1]
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device="cpu").normal_(0, 1, generator=generator).mul_(role.std / math.sqrt(fan_in))


def optimizer_groups(model: GPT, optimizer: str, muon_lr: float, adam_lr: float, weight_decay: float) -> list[dict]:
    """Parameter groups for `Optimizer`: one a role. With "adamw", one learning rate and decay for every matrix."""
    groups: dict[str, dict] = {}
    for name, param in model.named_parameters():
        role = ROLES[role_of(name)]
        if optimizer == "adamw":
            kind, lr, betas, decay = "adam", adam_lr, (0.9, 0.95), weight_decay
        else:
            lr = role.lr * (muon_lr if role.kind == "muon" else adam_lr)
            kind, betas, decay = role.kind, role.betas, role.decay * weight_decay
        group = groups.setdefault(role_of(name), dict(
            params=[], names=[], role=role_of(name), kind=kind, lr=lr, base_lr=lr, betas=betas, weight_decay=decay,
            split=role.split,
        ))  # fmt: skip
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


def newton_schulz(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix to each of x (M, rows, cols), nearly: singular values end in about [0.7, 1.2].

    Quintic Newton-Schulz iteration of Muon (Jordan et al. 2024), in the dtype of x. All-zero matrices stay zero.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizer(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, Adam (decoupled decay) for the other roles; for 1..N ranks.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): Nesterov momentum, then each matrix's update
    is replaced by its orthogonal factor. All matrices of a shape are stacked and orthogonalised in one batched call,
    in `ns_dtype`; the ranks share the stack out between them, evenly or not, and exchange the results.
    Every rank must hold the same parameters and gradients (as under DDP); they then stay bit-identical.
    """

    def __init__(self, groups: list[dict], ns_dtype: torch.dtype = torch.float32, eps: float = 1e-10):
        super().__init__(groups, dict(lr=0.0))
        self.ns_dtype, self.eps = ns_dtype, eps
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            slots = ("momentum",) if group["kind"] == "muon" else ("exp_avg", "exp_avg_sq")
            for p in group["params"]:
                self.state[p] = {slot: torch.zeros_like(p) for slot in slots}
                if group["kind"] == "adam":
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient, with the groups' present `lr`. Every gradient must be there."""
        for group in self.param_groups:
            update = self.muon_update if group["kind"] == "muon" else self.adam_update
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values():
                update(group, params)

    def adam_update(self, group: dict, params: list[Tensor]) -> None:
        states = [self.state[p] for p in params]
        slots = ([s[slot] for s in states] for slot in ("exp_avg", "exp_avg_sq"))
        adamw(
            params, [p.grad for p in params], *slots, [], [s["step"] for s in states], fused=True, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=self.eps, maximize=False,
        )  # fmt: skip

    def muon_update(self, group: dict, params: list[Tensor]) -> None:
        grads, buffers, beta = [p.grad for p in params], [self.state[p]["momentum"] for p in params], group["betas"][0]
        torch._foreach_lerp_(buffers, grads, 1 - beta)
        count, (rows, cols) = len(params), params[0].shape
        share = -(-count // self.world)
        mine = slice(min(count, self.rank * share), min(count, (self.rank + 1) * share))
        updates = params[0].new_zeros((share, rows, cols), dtype=self.ns_dtype)
        for out, grad, buffer in zip(updates, grads[mine], buffers[mine]):
            out.copy_(grad.lerp(buffer, beta))
        updates = newton_schulz(updates.view(-1, rows // group["split"], cols)).view(share, rows, cols)
        if self.world > 1:
            gathered = updates.new_empty((self.world, share, rows, cols))
            dist.all_gather(list(gathered.unbind()), updates.contiguous())
            updates = gathered.flatten(0, 1)
        scale = max(1.0, rows / group["split"] / cols) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates[:count].to(params[0].dtype).unbind()), alpha=-group["lr"] * scale)
