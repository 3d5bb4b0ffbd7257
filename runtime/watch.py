"""Detects ranks that diverge: under FSDP by running different blocks, under DDP by different weight updates."""

import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

from data.shards import RunError, UserError
from runtime.ranks import SAME_BLOCKS, DistContext, gather_objects, printed_by, run_on_rank0


def watch_blocks(model: torch.nn.Module, dist_ctx: DistContext, poll_s: float = 2.0) -> None:
    """Starts a thread that ends this process, with a message, when another rank waits for a block not run here.

    Hooks keep `model.blocks_run` up to date: [forward passes, blocks begun in the last one, whether it is over, a hash
    of all blocks run so far, and check_gradients' hash, in which ranks may be one backward pass apart].
    """
    alive, rank = weakref.ref(model), dist_ctx.rank
    place = model.blocks_run = [0, 0, 0, 0, 0]
    name = run_on_rank0(dist_ctx, lambda: os.urandom(8).hex())

    def begin(*_) -> None:
        place[:3] = place[0] + 1, 0, 0

    def end(*_) -> None:
        place[2] = 1

    def note(index: int) -> None:
        if place[2]:  # recomputed for the backward pass
            return
        place[1] += 1
        place[3] = (place[3] * 1_000_003 + index + 1) % 2**31

    def next_logits(*args):
        begin()
        logits = read(*args)
        end()
        return logits

    read, model.next_logits = model.next_logits, next_logits  # which has no hooks
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)
    for index, block in enumerate(dict.fromkeys(model.blocks)):
        block.register_forward_pre_hook(lambda *_, index=index: note(index), prepend=True)
    if dist_ctx.world_size == 1:
        return
    store = dist.distributed_c10d._get_default_store()

    def look() -> None:
        before = None
        while alive() is not None:
            time.sleep(poll_s)
            now = list(place)
            store.set(f"{name} {rank}", " ".join(map(str, now)))
            for other in range(dist_ctx.world_size) if now == before and now[2] else ():  # else it moves on
                key = f"{name} {other}"
                theirs = [*map(int, store.get(key).split())] if store.check([key]) else now
                if theirs[0] == now[0] and (theirs[1] > now[1] or theirs[2] and theirs[3] != now[3]):
                    said = f"rank {rank} ran {now[1]} blocks where rank {other} has begun {theirs[1]}, or other ones"
                    print(f"error [rank {rank}]: {said}: {SAME_BLOCKS}", file=sys.stderr, flush=True)
                    os._exit(1)
            before = now

    def look_while_there_is_a_store() -> None:
        try:
            look()
        except RuntimeError:  # the run ends
            return

    threading.Thread(target=look_while_there_is_a_store, daemon=True).start()


def check_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for a gradient that the optimizer does not use.

    Under FSDP, hashes which blocks ran and which parameters have a gradient, so that differing ranks are detected.
    Under DDP, raises RunError for a gradient of a parameter that was frozen when DDP was set up.
    """
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        if p.grad is not None and p not in updated:
            raise UserError(
                f"{name.removeprefix('module.')} has a gradient and is in no parameter group of the optimizer, so it "
                "would not be trained: make it in GPT.__init__, for make_optimizer to take, or freeze it with "
                "requires_grad_(False)"
            )
    if hasattr(model, "blocks_run"):
        ran = model.blocks_run
        ran[-1] += ran[-2]
        for name, p in model.named_parameters():
            ran[-1] = (ran[-1] * 3 + (p.grad is not None)) % 2**31
            if p._backward_hooks:
                raise UserError(f"{name} has a hook, which FSDP does not call; change gradients in update_weights")
    for name, p in model.module.named_parameters() if hasattr(model, "synchronized") else ():
        if p.grad is not None and p not in model.synchronized:
            raise RunError(
                f"{name} was frozen when DDP was set up, so its gradient is not averaged over the ranks; leave it "
                "unfrozen then and freeze it in the first step, or use --parallel fsdp"
            )


def check_replicas(model: torch.nn.Module, dist_ctx: DistContext, step: int) -> None:
    """Raises RunError, on every rank, when DDP's ranks no longer hold the same weights."""
    if not hasattr(model, "synchronized"):
        return
    sums = [p.detach().sum(dtype=torch.float64) for p in model.parameters()]
    everyones = gather_objects(dist_ctx, torch.stack(sums).tolist())
    names = [name for name, _ in model.module.named_parameters()]
    for i, numbers in enumerate(zip(*everyones)):
        if len(set(map(repr, numbers))) > 1:
            error = RunError(
                f"at step {step} the ranks hold different values of {names[i]}: something updates it differently on "
                "each, or its gradient is from torch.autograd.grad, which DDP does not average; random numbers in an "
                "update must be the same on all ranks that hold the same weights"
            )
            raise printed_by(error, dist_ctx.rank == 0)
