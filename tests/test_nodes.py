"""Several nodes on one machine: torchrun agents that meet by c10d, and the ranks that they start."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import ROOT, TINY, assert_same_run, python_process, read_checkpoint, rows, tiny_run
from test_train import COMPILED, plain_loop, worker

NODE_CASES = {
    "ddp": dict(micro_batch=4),
    "ddp_bf16": dict(micro_batch=2, grad_comm="bf16", bucket_cap_mb=1),
    "ddp_half": dict(micro_batch=4, save_every=10, keep=0),
    "fsdp": dict(parallel="fsdp", micro_batch=4),
    "fsdp_bf16": dict(parallel="fsdp", micro_batch=2, grad_comm="bf16"),
    "hsdp": dict(parallel="hsdp", micro_batch=4, save_every=10, keep=0),
    "hsdp_accum": dict(parallel="hsdp", micro_batch=2, checkpointing="full"),
    "hsdp_offload": dict(parallel="hsdp", micro_batch=4, offload="optimizer"),
    "hsdp_one_group": dict(parallel="hsdp", micro_batch=4, shard_size=4),
    "hsdp_resumed": dict(parallel="hsdp", micro_batch=4, resume="ddp_half/ckpt_10.pt", init_from=""),
    "ddp_resumed": dict(micro_batch=4, resume="hsdp/ckpt_10.pt", init_from=""),
    "hsdp_thin": dict(parallel="hsdp", micro_batch=4, n_embd=2, n_head=1, n_layer=3, init_from="", max_steps=5,
                      vocab_size=257),
    "hsdp_bf16": dict(parallel="hsdp", micro_batch=2, grad_comm="bf16"),
    "hsdp_ngrams": dict(parallel="hsdp", micro_batch=4, ngram=3, ngram_rows=65, init_from="", max_steps=5),
}  # fmt: skip
COMPILED_NODE_CASES = {"hsdp_compiled": COMPILED | dict(parallel="hsdp", micro_batch=4, max_steps=6)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_node(port: int, *argv, nnodes="2", ranks=2, options=(), env=os.environ, **streams) -> subprocess.Popen:
    """One torchrun agent of several: `ARGV` as its ranks."""
    rendezvous = ("--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test")
    torchrun = ("-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--nproc_per_node={ranks}", *rendezvous)
    return subprocess.Popen(**python_process(*torchrun, *options, *argv, env=env), **streams)


@pytest.fixture(scope="module")
def two_nodes(data, noisy, tmp_path_factory) -> Path:
    """The folder of what two nodes of two ranks each left behind."""
    folder, port = tmp_path_factory.mktemp("nodes"), free_port()
    (folder / "data").symlink_to(data)
    (folder / "noisy.pt").symlink_to(noisy)
    with open(folder / "output.txt", "w") as output:
        nodes = [start_node(port, __file__, folder, stdout=output, stderr=output) for _ in range(2)]
    assert [node.wait(300) for node in nodes] == [0, 0], (folder / "output.txt").read_text()
    return folder


EXACT = ["ddp", "fsdp", "hsdp", "hsdp_accum", "hsdp_offload", "hsdp_one_group"]


@pytest.mark.parametrize("case", EXACT)
def test_two_nodes_train_as_one_rank(case, two_nodes, plain, data, noisy):
    assert_same_run(two_nodes / case, plain)
    expected = plain_loop(data, noisy, steps=1)[1]
    for rank in range(4):
        grads = torch.load(two_nodes / f"{case}.grads{rank}.pt")
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)


def test_ranks_of_two_nodes_agree_to_the_bit(two_nodes):
    report = json.loads((two_nodes / "report.json").read_text())
    assert set(report.values()) == {True} and set(report) >= set(NODE_CASES)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), NODE_CASES | (COMPILED_NODE_CASES if "compiled" in sys.argv else {}))
