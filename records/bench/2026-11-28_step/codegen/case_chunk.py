"""A chunk of head and loss with its gradients, as CompiledLoss compiles it: model of no blocks, GPT-2's sizes."""
import os, torch
from model import GPT, GPTConfig
from ops.loss import TokenLoss, traceable_gradients
from ops.linear import apply_fp8
CHUNK = int(os.environ.get("CHUNK", 32768))
torch._inductor.config.realize_opcount_threshold = 60
def case():
    gpt = GPT(GPTConfig(n_layer=0), torch.bfloat16)
    if os.environ.get("FP8"): apply_fp8(gpt)
    module = TokenLoss(gpt)
    w = gpt.head.weight.detach().requires_grad_(False)
    x = torch.empty(CHUNK, 768, dtype=torch.bfloat16)
    t = torch.empty(CHUNK, dtype=torch.int64)
    def fn(x, t, factor, w):
        return traceable_gradients(module, x, t, factor, {"model.head.weight": w})
    return fn, (x, t, torch.empty(()), w)
