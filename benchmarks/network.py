"""Several "machines" on this one, joined by links of a given speed: network namespaces on a bridge. Needs root and ip.

    python benchmarks/network.py NODES MBIT SCRIPT ARGV...

runs SCRIPT as one torchrun rank in each of NODES namespaces, whose links carry MBIT Mbit/s each way (0: no limit).
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import NamedTuple


class Node(NamedTuple):
    """A namespace."""

    name: str  # of the namespace; its interface is eth0
    address: str


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(n: int, mbit: float = 0):
    """Yields n Nodes, each of whose links carries `mbit` Mbit/s each way (0 = as fast as it goes). Removes them."""
    prefix = f"nanonet{os.getpid()}"
    hub, nodes = f"{prefix}hub", [Node(f"{prefix}n{i}", f"10.77.0.{i + 1}") for i in range(n)]
    made = []
    try:
        for name in (hub, *(node.name for node in nodes)):
            run("ip", "netns", "add", name)
            made.append(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "up")
        for i, node in enumerate(nodes):
            run("ip", "-n", node.name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{i}", "netns", hub)
            run("ip", "-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
            run("ip", "-n", node.name, "link", "set", "eth0", "up")
            run("ip", "-n", hub, "link", "set", f"port{i}", "master", "br0", "up")
            for space, device in ((node.name, "eth0"), (hub, f"port{i}")):
                if mbit:
                    limit = ["rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
                    run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield nodes
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_agent(node: Node, rank: int, nodes: list[Node], *argv: str, ranks: int = 1, env=None, **streams):
    """torchrun in the namespace of node number `rank`, a subprocess.Popen. ranks: those it starts.

    All namespaces have one host name, so who hosts the rendezvous, and under which address, has to be said.
    """
    command = ["ip", "netns", "exec", node.name, sys.executable, "-m", "torch.distributed.run",
               f"--nnodes={len(nodes)}", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
               f"--rdzv_endpoint={nodes[0].address}:29500", f"--rdzv_conf=is_host={int(rank == 0)}",
               f"--local_addr={node.address}", *argv]  # fmt: skip
    return subprocess.Popen(command, env={**(env or os.environ), "GLOO_SOCKET_IFNAME": "eth0"}, **streams)


def main(n: int, mbit: float, argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up
    with namespaces(n, mbit) as nodes:
        started = [start_agent(node, i, nodes, *argv) for i, node in enumerate(nodes)]
        try:
            return max(abs(process.wait()) for process in started)
        finally:
            for process in started:
                if process.poll() is None:
                    process.terminate()
                    process.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
