"""What Inductor's CUDA kernels compute: run by Triton's interpreter on emulated CUDA, against fp64 on the CPU.

    TRITON_INTERPRET=1 run.sh python records/bench/2026-11-23_emulated-cuda/interpret.py [FLAGS OF train_gpt.py]

In the repository's root; run.sh is that of the tool emulated_cuda. Prints the largest difference over the largest
number, of outputs and gradients. With flags it trains instead: some tokens a second.
"""

import os
import sys

os.environ |= dict(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_COMPILE_THREADS="1")
sys.path.insert(0, os.getcwd())
import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice
from triton.runtime.interpreter import TensorHandle

from model import apply_rotary_emb
from ops.loss import ce_fwd_bwd, softcap_logits
from ops.pointwise import norm, relu_squared
from train_gpt import main


def interpreted(function):
    def call(x, **_):
        numbers = function(x.handle.data.astype(np.float64)).astype(x.handle.data.dtype)
        return tl.core.tensor(TensorHandle(numbers, x.handle.dtype), x.type)

    return call


def differences(found, expected) -> list[str]:
    pairs = [(a.detach().cpu().double(), b.detach()) for a, b in zip(found, expected)]
    return [f"{((a - b).abs().max() / b.abs().max()).item():.1e}" for a, b in pairs]


def check(name: str, function, *args) -> None:
    """Outputs and gradients of the compiled function of bf16 or fp32 args, against it in fp64."""
    compiled, exact = [x.detach().cuda() for x in args], [x.detach().double() for x in args]
    torch._dynamo.reset()
    results = []
    for call, inputs in ((torch.compile(function), compiled), (function, exact)):
        inputs[0].requires_grad_()
        out = call(*inputs)
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape).to(out))
        results.append([out, inputs[0].grad])
    print(name, args[0].dtype, *differences(*results), flush=True)


# The interpreter leaves CUDA's library of functions out.
for name, function in dict(rsqrt=lambda x: x**-0.5, tanh=np.tanh, exp=np.exp, log=np.log, sqrt=np.sqrt).items():
    setattr(libdevice, name, interpreted(function))
if len(sys.argv) > 1:
    sys.exit(main(sys.argv[1:]))
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    x, q = torch.randn(4, 64, 96).to(dtype), torch.randn(2, 32, 3, 32).to(dtype)
    tables = torch.randn(2, 32, 1, 8).to(dtype)
    check("norm", norm, x)
    check("squared ReLU", relu_squared, x)
    check("rotary of norm", lambda q, cos, sin: apply_rotary_emb(norm(q), cos, sin), q, *tables)
    for vocab_size, softcap in ((1000, 15.0), (1000, 0.0), (1000, 80.0), (5000, 15.0)):
        logits, targets = (4 * torch.randn(8, vocab_size)).to(dtype), torch.randint(0, vocab_size, (8,))
        targets[3] = -1
        torch._dynamo.reset()
        found = torch.compile(ce_fwd_bwd)(logits.cuda(), targets.cuda(), softcap, 1.0)[:2]
        exact = logits.double().requires_grad_()
        loss = F.cross_entropy(softcap_logits(exact, softcap), targets, ignore_index=-1, reduction="sum")
        loss.backward()
        print("loss of", vocab_size, "softcap", softcap, dtype, *differences(found, [loss, exact.grad]), flush=True)
