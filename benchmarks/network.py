"""Several "machines" on this one, joined by links of a given speed: network namespaces on a bridge. Needs root and ip.

    python benchmarks/network.py NODES MBIT SCRIPT ARGV...

runs SCRIPT as one torchrun rank in each of NODES namespaces, whose links carry MBIT Mbit/s each way (0: no limit).
"""

import contextlib
import os
import signal
import subprocess
import sys


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def namespaces(n: int, mbit: float = 0):
    """Yields the names of n namespaces, whose links carry `mbit` Mbit/s each way (0 = as fast as it goes).

    Number i has the address 10.77.0.(i + 1) at eth0. Removes them at the end.
    """
    hub, *nodes = [f"nanonet{os.getpid()}{name}" for name in ("hub", *(f"n{i}" for i in range(n)))]
    made = []
    try:
        for name in (hub, *nodes):
            run(f"ip netns add {name}")
            made.append(name)
            run(f"ip -n {name} link set lo up")
        run(f"ip -n {hub} link add br0 type bridge")
        run(f"ip -n {hub} link set br0 up")
        for i, node in enumerate(nodes):
            run(f"ip -n {node} link add eth0 type veth peer name port{i} netns {hub}")
            run(f"ip -n {node} addr add 10.77.0.{i + 1}/24 dev eth0")
            run(f"ip -n {node} link set eth0 up")
            run(f"ip -n {hub} link set port{i} master br0 up")
            for space, device in ((node, "eth0"), (hub, f"port{i}")) if mbit else ():
                run(f"tc -n {space} qdisc add dev {device} root tbf rate {mbit}mbit burst 128kb latency 100ms")
        yield nodes
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_agent(node: str, rank: int, nodes: list[str], *argv: str, ranks: int = 1, env=None, **streams):
    """torchrun in the namespace of node number `rank`, a subprocess.Popen. ranks: those it starts.

    All namespaces share one host name, so the rendezvous host and its address are given explicitly.
    """
    command = f"ip netns exec {node} {sys.executable} -m torch.distributed.run --nnodes={len(nodes)}"
    command += f" --nproc_per_node={ranks} --rdzv_backend=c10d --rdzv_endpoint=10.77.0.1:29500"
    command += f" --rdzv_conf=is_host={int(rank == 0)} --local_addr=10.77.0.{rank + 1}"
    env = {**(env or os.environ), "GLOO_SOCKET_IFNAME": "eth0"}
    return subprocess.Popen([*command.split(), *argv], env=env, **streams)


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
