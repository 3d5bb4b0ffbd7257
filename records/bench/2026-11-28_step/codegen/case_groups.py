"""For gpu_codegen.py: N consecutive blocks as one graph. N=4 READS=30 OPS=60"""

import os

import torch
from case_block import BATCH
from torch import nn

from model import AttnContext, Block, GPTConfig

N = int(os.environ["N"])


class Blocks(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(N))

    def forward(self, x, values, cos, sin):
        kw = dict(cos=cos, sin=sin, doc_starts=None, window=0, mask=None, attn_backend="auto", value_embed=values)
        for block in self.blocks:
            x = block(x, AttnContext(**kw))
        return x


def case():
    cfg = GPTConfig()
    x, values = (torch.empty(BATCH, cfg.seq_len, cfg.n_embd, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    cos, sin = (torch.empty(cfg.seq_len, 1, cfg.rotary_dim // 2, dtype=torch.bfloat16) for _ in range(2))
    return Blocks(cfg), (x, values, cos, sin)
