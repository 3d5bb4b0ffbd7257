"""A block of gpt2-small, 65,536 tokens in bf16; LAYER: its index, 5 or one that has skips, 11."""

import os

import torch
from torch import nn

from model import AttnContext, Block, GPTConfig

LAYER = int(os.environ.get("LAYER", "5"))


class OneBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.block = Block(cfg, LAYER)

    def forward(self, x, values, cos, sin, *skips):
        ctx = AttnContext(cos, sin, None, 0, None, "sdpa", values, skips)
        return self.block(x, ctx)


def case():
    cfg = GPTConfig()
    n_skips = len(cfg.skips) if LAYER >= cfg.n_layer - 2 else 0
    x, values, *skips = (
        torch.empty(64, cfg.seq_len, cfg.n_embd, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2 + n_skips)
    )
    cos, sin = (
        torch.empty(cfg.seq_len, 1, cfg.rotary_dim // 2, dtype=torch.bfloat16) for _ in range(2)
    )
    return OneBlock(cfg), (x, values, cos, sin, *skips)
