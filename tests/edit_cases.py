"""The model and its loss a second time, in plain PyTorch, and what worked edits make of them."""

import contextlib
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.values import derive_seed

OURS = ("common", "train_gpt", "model", "ops", "inference", "sample", "export", "data", "runtime")


def rms_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()


def before(x: Tensor) -> Tensor:
    """x (B, T, ...) of the token before."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


class Plain:
    """The unedited model; an edit's subclass overrides what it changes.

    w: name -> weight; seed: GPT.step_seed.
    """

    def __init__(self, w: dict[str, Tensor], cfg, training: bool = True, seed: int = 0):
        self.w, self.cfg, self.training, self.seed = w, cfg, training, seed
        self.head_dim, self.n_kv_head = cfg.n_embd // cfg.n_head, cfg.n_head

    def embed(self, x: Tensor) -> Tensor:
        out = self.w["wte.weight"][x]
        code = x + 1
        for back in range(1, self.cfg.ngram):
            earlier = F.pad(x + 1, (back, 0))[:, : x.size(1)]
            code = (code * 0x9E3779B1 + earlier) % 2**31
            out = out + self.w["ngrams.weight"][(code * 0x85EBCA6B // 128) % self.cfg.ngram_rows]
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of the first half of each head by angles that grow with the position."""
        half = self.head_dim // 4
        position, i = torch.arange(x.size(1)).double(), torch.arange(half).double()
        angle = torch.outer(position, 10000.0 ** (-i / half))[:, None]
        a, b, *rest = x.split(half, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat((a * cos + b * sin, b * cos - a * sin, *rest), -1)

    def bias(self, length: int) -> Tensor:
        return torch.zeros(length, length)

    def heads(self, x: Tensor, i: int) -> list[Tensor]:
        """Queries, keys and values (B, T, heads, head_dim)."""
        n = self.n_kv_head
        qkv = (x @ self.w[f"blocks.{i}.attn.qkv.weight"].T).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.cfg.n_head, n, n), 2)
        gate = torch.sigmoid(x[..., :16] @ self.w[f"blocks.{i}.attn.gate.weight"].T)[..., None]
        embedded = self.w["value_embed.weight"][self.idx].unflatten(-1, (-1, self.head_dim))
        v = v + 2 * gate * embedded[:, :, :n]
        repeats = self.cfg.n_head // n
        return [q, k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)]

    def attn(self, x: Tensor, i: int) -> Tensor:
        length, (q, k, v) = x.size(1), self.heads(x, i)
        q, k, half = rms_norm(q), rms_norm(k), self.head_dim // 4 * 2
        k = torch.cat((k[..., :half], before(k[..., half:])), -1)
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v))
        scores = q @ k.mT / self.head_dim**0.5 + self.bias(length)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        letters, _, width = self.cfg.window.partition(":")
        if letters[i % len(letters)] == "S":
            seen &= seen.triu(1 - int(width or self.cfg.seq_len // 4))
        y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2) @ self.w[f"blocks.{i}.attn.proj.weight"].T

    def mlp(self, x: Tensor, i: int) -> Tensor:
        return (
            F.leaky_relu(x @ self.w[f"blocks.{i}.mlp.fc.weight"].T, 0.5) ** 2
            @ self.w[f"blocks.{i}.mlp.proj.weight"].T
        )

    def block(self, x: Tensor, i: int) -> Tensor:
        x = x + self.attn(rms_norm(x + self.earlier), i)
        return x + self.mixed_mlp(rms_norm(x + self.earlier), i)

    def mixed_mlp(self, x: Tensor, i: int) -> Tensor:
        y = self.mlp(x + self.w[f"blocks.{i}.previous_in"] * before(x), i)
        return y + self.w[f"blocks.{i}.previous_out"] * before(y)

    def first(self, idx: Tensor) -> Tensor:
        return rms_norm(self.embed(idx))

    def backbone(self, idx: Tensor) -> Tensor:
        self.idx, x = idx, self.first(idx)
        inputs = []
        for i in range(self.cfg.n_layer):
            inputs.append(x)
            self.earlier = 0
            if f"blocks.{i}.skip" in self.w:
                earlier = [0, 2 * self.cfg.n_layer // 3, self.cfg.n_layer - 3]
                skips = [self.w[f"blocks.{i}.skip"][j] * inputs[at] for j, at in enumerate(earlier)]
                self.earlier = sum(skips)
            x = self.block(x, i)
        self.x = rms_norm(x)
        return self.x

    def capped(self, x: Tensor, head: str = "head.weight") -> Tensor:
        logits, cap = x @ self.w[head].T, self.cfg.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def logits(self, idx: Tensor) -> Tensor:
        return self.capped(self.backbone(idx))

    def token_losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", ignore_index=-1)

    def loss(self, idx: Tensor, y: Tensor) -> Tensor:
        return self.token_losses(self.logits(idx), y).sum() / (y >= 0).sum()


class Scaled(Plain):
    def block(self, x, i):
        return self.w[f"blocks.{i}.scale"] * super().block(x, i)


class SwiGLU(Plain):
    def mlp(self, x, i):
        w = {name: self.w[f"blocks.{i}.mlp.{name}.weight"] for name in ("fc", "proj")}
        gate, up = w["fc"].chunk(2)
        return (F.silu(x @ gate.T) * (x @ up.T)) @ w["proj"].T


class LayersLeftOut(Plain):
    def block(self, x, i):
        skipped = self.training and derive_seed(self.seed, i) % 4 == 0
        return x if skipped else super().block(x, i)


class MeanSubtracted(Plain):
    def first(self, idx):
        return rms_norm(self.embed(idx) - self.w["mean"])


class Smoothed(Plain):
    def token_losses(self, logits, y):
        smooth = -logits.log_softmax(-1).mean(-1).flatten() * (y.flatten() >= 0)
        losses = super().token_losses(logits, y)
        return 0.9 * losses + 0.1 * smooth if self.training else losses


class ZLoss(Plain):
    def token_losses(self, logits, y):
        z = logits.exp().sum(-1).log().flatten() ** 2 * (y.flatten() >= 0)
        return super().token_losses(logits, y) + (1e-2 * z if self.training else 0)


class Weighted(Plain):
    def token_losses(self, logits, y):
        losses = super().token_losses(logits, y)
        return losses * torch.where(y.flatten() == 32, 0.5, 1.0) if self.training else losses


class SecondHead(Plain):
    def loss(self, idx, y):
        loss, logits = super().loss(idx, y), self.capped(self.x[:, :-1], "second_head.weight")
        second = self.token_losses(logits, y[:, 1:]).sum() / (y >= 0).sum()
        return loss + 0.3 * second if self.training else loss


class Contrastive(Plain):
    def loss(self, idx, y):
        loss, n = super().loss(idx, y), idx.size(1)
        pairs = F.cosine_similarity(self.x[:, :, None], self.x[:, None], dim=-1).tril(-1)
        return loss + 0.1 * F.relu(pairs - 0.5).sum() / len(idx) / n**2 if self.training else loss


class Experts(Plain):
    """Every expert for every token, and all results but one multiplied by 0."""

    def mlp(self, x, i):
        n, out = 4, 0
        weights = [self.w[f"blocks.{i}.mlp.{name}.weight"] for name in ("router", "fc", "proj")]
        p = (x @ weights[0].T).softmax(-1)
        chosen = F.one_hot(p.argmax(-1), n)
        for e, (fc, proj) in enumerate(zip(weights[1].chunk(n), weights[2].chunk(n, 1))):
            hidden = F.leaky_relu(x @ fc.T, 0.5) ** 2
            out = out + (p * chosen)[..., e : e + 1] * (hidden @ proj.T)
        self.balance = self.balance + n * (chosen.float().mean(1) * p.mean(1)).sum(-1).mean()
        return out

    def backbone(self, idx):
        self.balance = 0.0
        return super().backbone(idx)

    def loss(self, idx, y):
        return super().loss(idx, y) + (0.01 * self.balance if self.training else 0)


class Tied(Plain):
    def capped(self, x, head="wte.weight"):
        return super().capped(x, "wte.weight")


class Grouped(Plain):
    def __init__(self, *args):
        super().__init__(*args)
        self.n_kv_head = self.cfg.n_head // 2


class Alibi(Plain):
    def bias(self, length):
        place = torch.arange(length)
        slopes = 2.0 ** -torch.arange(1, self.cfg.n_head + 1)
        return (place - place[:, None]) * slopes[:, None, None]


class Positions(Plain):
    def embed(self, x):
        return super().embed(x) + self.w["wpe.weight"][: x.size(1)]


class LowRank(Plain):
    def __init__(self, w, *args):
        names = [name.removesuffix(".lora_a") for name in w if name.endswith(".lora_a")]
        merged = {
            f"{n}.weight": w[f"{n}.weight"] + w[f"{n}.lora_b"] @ w[f"{n}.lora_a"] for n in names
        }
        super().__init__(w | merged, *args)


@dataclass
class Case:
    """What a worked edit computes, and what it promises."""

    plain: type[Plain] = Plain
    flags: dict = field(default_factory=dict)
    holds: object = None  # a function of the run that says whether something else holds


@contextlib.contextmanager
def pages(repo: Path):
    """The modules of an edited copy, for as long as the context lasts."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] in OURS}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(repo))
    importlib.invalidate_caches()
    try:
        names = ("train_gpt", "model", "sample", "inference.generation")
        found = {name.split(".")[-1]: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**found)
    finally:
        sys.path.remove(str(repo))
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.modules.update(ours)
