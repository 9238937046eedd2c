"""Start the ranks of one node as torchrun does, with torchrun's store on loopback.

    python -m runtime.torchrun --nproc-per-node=2 train_rl.py --config exp.yaml

The options are those of torchrun. torchrun's own store listens on all interfaces without a password, and with
--standalone it unpickles what it reads from the store, so that whoever reaches the port runs code as the
user. Several nodes need a store on the network: docs/trust.md says whom to keep away from it.
"""

import functools
import socket
import sys

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous


def main(argv: list[str]) -> None:
    """Run torchrun with a store on a free port of 127.0.0.1."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={listener.getsockname()[1]}"]
    options = [argument.split("=")[0].replace("_", "-") for argument in argv]
    if refused := {"--nnodes", "--standalone", "--rdzv-backend", "--rdzv-endpoint", "--master-addr",
                   "--master-port"} & {*options}:  # fmt: skip
        sys.exit(f"runtime.torchrun: {', '.join(sorted(refused))}: ranks of one node only; use torchrun")
    static_tcp_rendezvous.TCPStore = functools.partial(dist.TCPStore, master_listen_fd=listener.detach())
    run.main([*address, *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
