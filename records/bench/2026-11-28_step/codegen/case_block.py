import torch
from torch import nn
from model import AttnContext, Block, GPTConfig
import torch._inductor.config as ic
import os
if os.environ.get("READS"): ic.realize_reads_threshold = int(os.environ["READS"])
if os.environ.get("OPS"): ic.realize_opcount_threshold = int(os.environ["OPS"])
from ops.compile import reduce_short_rows_at_once
reduce_short_rows_at_once()
BATCH = 128
class OneBlock(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.block = Block(cfg)
    def forward(self, x, values, cos, sin, doc_starts=None):
        kw = dict(cos=cos, sin=sin, doc_starts=doc_starts, window=0, mask=None, attn_backend="auto", value_embed=values)
        return self.block(x, AttnContext(**kw))
def case():
    cfg = GPTConfig()
    x, values = (torch.empty(BATCH, cfg.seq_len, cfg.n_embd, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    cos, sin = (torch.empty(cfg.seq_len, 1, cfg.rotary_dim // 2, dtype=torch.bfloat16) for _ in range(2))
    docs = (torch.empty(BATCH, cfg.seq_len, dtype=torch.bool),) if os.environ.get("DOCS") else ()
    return OneBlock(cfg), (x, values, cos, sin, *docs)
