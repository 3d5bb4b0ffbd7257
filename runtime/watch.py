"""Ranks under FSDP must run the same blocks: else they wait for each other for ever, or take each other's weights."""

import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

from runtime.ranks import SAME_BLOCKS, DistContext, run_on_rank0


def watch_blocks(model: torch.nn.Module, dist_ctx: DistContext, poll_s: float = 2.0) -> list[int]:
    """Starts a thread that ends this process, with a sentence, when another rank waits for a block not run here.

    Returns [forward passes, blocks begun in the last one, whether it is over, a hash of all blocks run so far], kept up
    to date by hooks.
    """
    place, alive, rank = [0, 0, 0, 0], weakref.ref(model), dist_ctx.rank
    name = run_on_rank0(dist_ctx, lambda: os.urandom(8).hex())

    def begin(*_) -> None:
        place[:3] = place[0] + 1, 0, 0

    def end(*_) -> None:
        place[2] = 1

    def note(index: int) -> None:
        place[1] += 1
        place[3] = (place[3] * 1_000_003 + index + 1) % 2**31

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)
    for index, block in enumerate(dict.fromkeys(model.blocks)):
        block.register_forward_pre_hook(lambda *_, index=index: note(index), prepend=True)
    if dist_ctx.world_size == 1:
        return place
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
    return place
