"""Muon's communication: each matrix is orthogonalized by one rank."""

import contextlib
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ops.parallel import chunk_sizes, rank_groups, to_local


def gather_whole_matrices(shards: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """From this rank's shard of every matrix (count, its rows, cols) to the whole matrices it owns (n, rows, cols).

    One all-to-all; matrix i is owned by rank i // ceil(count / world_size) of the group.
    """
    count, _, cols = shards.shape
    rank, world_size = group.rank(), group.size()
    heights, owned = chunk_sizes(rows, world_size), chunk_sizes(count, world_size)
    sent = [n * heights[rank] * cols for n in owned]
    received = [owned[rank] * height * cols for height in heights]
    flat = shards.new_empty(sum(received))
    dist.all_to_all_single(flat, shards.flatten(), received, sent, group=group)
    pieces = [t.view(owned[rank], height, cols) for t, height in zip(flat.split(received), heights)]
    return torch.cat(pieces, dim=1)


def scatter_shards(updates: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """The inverse: from updates of the matrices that this rank owns (n, rows, cols) to its shard of all `count`."""
    _, rows, cols = updates.shape
    rank, world_size = group.rank(), group.size()
    heights, owned = chunk_sizes(rows, world_size), chunk_sizes(count, world_size)
    sent = [owned[rank] * height * cols for height in heights]
    received = [n * heights[rank] * cols for n in owned]
    flat = updates.new_empty(sum(received))
    pieces = torch.cat([piece.flatten() for piece in updates.split(heights, dim=1)])
    dist.all_to_all_single(flat, pieces, received, sent, group=group)
    return flat.view(count, heights[rank], cols)


def start_gather(parts: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to all-gather the other ranks' parts into `parts` (n, ...), n / world_size rows per rank, in rank order.

    They have arrived after wait(); `parts` must not be touched before.
    """
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    return all_gather(parts, parts.chunk(group.size())[group.rank()], group=group, async_op=True)


@contextlib.contextmanager
def state_on_device(device: torch.device, *kept: list[Tensor]):
    """Yields these lists of tensors on the device; those stored elsewhere are copied, and written back at exit."""
    used = [[t.to(device, non_blocking=True) for t in tensors] for tensors in kept]
    yield used
    for ours, theirs in zip(sum(kept, []), sum(used, [])):
        if theirs is not ours:
            ours.copy_(theirs, non_blocking=True)


class MuonSlice(NamedTuple):
    """One unit of Muon's update: one of the matrices in a parameter, or under FSDP this rank's rows of all of them.

    weight, grad and momentum are views of one shape into the parameter, its gradient and its state. split: the row
    counts of the parameter's matrices.
    """

    group: dict
    param: Tensor
    split: tuple[int, ...]
    weight: Tensor
    grad: Tensor
    momentum: Tensor


def matrix_stacks(groups: list[dict], state: dict, numel: int, batched: bool) -> list[list[MuonSlice]]:
    """Muon's matrices that have a gradient, from all groups, in stacks that are orthogonalized in one call each.

    A stack has whole matrices of one shape first, then those of the transposed shape; or, under FSDP, shards of one
    group's parameters of one shape. numel: max elements of a stack per rank, unless one matrix has more. Without
    `batched`, a stack has the matrices of one parameter only.
    """
    alike: dict[object, list[MuonSlice]] = {}
    for group in groups:
        for p in group["params"] if group["kind"] == "muon" else ():
            if p.grad is None:
                continue
            shards, replicas = rank_groups(p)
            split = group["split"] or (len(p),)
            parts = (
                t.split(max(1, len(t)) if shards else split)
                for t in (to_local(p), to_local(p.grad), state[p]["momentum"])
            )
            for views in zip(*parts):
                shape = views[0].shape
                key = (p.shape, id(group)) if shards else frozenset(shape) if replicas else shape
                alike.setdefault(key if batched else (p, shape), []).append(MuonSlice(group, p, split, *views))
    stacks = []
    for stack in alike.values():
        first = stack[0]
        shards, replicas = rank_groups(first.param)
        n_ranks = math.prod(ranks.size() for ranks in (shards, replicas) if ranks)
        most = n_ranks * max(1, numel // (first.param if shards else first.weight).numel())
        stack = sorted(stack, key=lambda matrix: matrix.weight.shape != first.weight.shape)
        stacks += [stack[i : i + most] for i in range(0, len(stack), most)]
    return stacks


def owned_part(stack: list[MuonSlice]) -> slice:
    """The part of a stack that this rank orthogonalizes, or, under FSDP, its shard group as a whole."""
    _, replicas = rank_groups(stack[0].param)
    n_parts, part = (replicas.size(), replicas.rank()) if replicas else (1, 0)
    most = chunk_sizes(len(stack), n_parts)[0]
    return slice(part * most, (part + 1) * most)


def gather_matrices(stack: list[MuonSlice], slices: list[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, int]]:
    """The matrices that this rank owns, in batches (M, rows, cols) of `dtype`; slices: the values of owned_part(stack).

    With each batch, the number of its matrices that are not transposed; these come first.
    """
    shape = stack[0].weight.shape
    transposed = [m.weight.shape != shape for m in stack[owned_part(stack)]]
    x = torch.empty((len(slices), *shape), dtype=dtype, device=stack[0].weight.device)
    if slices:  # there may be more ranks than matrices
        torch._foreach_copy_([t.mT if turn else t for t, turn in zip(x, transposed)], slices)
    shards, _ = rank_groups(stack[0].param)
    if not shards:
        return [(x, transposed.count(False))]
    (rows, cols), split = stack[0].param.shape, stack[0].split
    x = gather_whole_matrices(x, rows, shards)
    batches = [x.view(-1, split[0], cols)] if len(set(split)) == 1 else x.split(split, dim=1)
    return [(batch, len(batch)) for batch in batches]


def scatter_updates(stack: list[MuonSlice], batches: list[list[Tensor]], dtype: torch.dtype):
    """The inverse: from the updates of each batch to those of the whole stack (N, numel), in `dtype`.

    With them, the dist.Work by which other ranks' updates arrive, or None.
    """
    shards, replicas = rank_groups(stack[0].param)
    mine = owned_part(stack)
    n_parts = replicas.size() if replicas else 1
    n_slices = mine.stop - mine.start
    updates = torch.empty((n_parts * n_slices, stack[0].weight.numel()), dtype=dtype, device=stack[0].weight.device)
    ours = updates[mine][: len(stack[mine])]
    if shards:
        rows, cols = stack[0].param.shape
        whole = [upright for upright, _ in batches]
        x = whole[0].reshape(-1, rows, cols) if len(whole) == 1 else torch.cat(whole, dim=1)
        ours.copy_(scatter_shards(x, len(ours), shards).view_as(ours))
    else:
        (parts,) = batches
        for part, rows in zip(parts, ours.split([len(part) for part in parts])):
            rows.view(part.shape).copy_(part)
    return updates, start_gather(updates, replicas) if replicas else None
