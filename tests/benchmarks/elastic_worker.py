"""What the processes of `bench_elastic` run: MODE says what, MODEL the number of layers and their width."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

import torch

import swarm_elastic

DEVICE = os.environ.get("DEVICE", "cpu")
BATCH = 64
LAYERS, WIDTH = (int(number) for number in os.environ["MODEL"].split("x"))
CHECKPOINT_EVERY = 10
BLOCKS, BLOCK_STEPS = 30, 4


def tell(**line):
    print(json.dumps(line), flush=True)


def make(width=WIDTH):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    )
    model.to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def one_pass(model, samples):
    return model(torch.randn(samples, WIDTH, device=DEVICE)).square().mean()


def train():
    """Steps without end, each with the moment at which it was done."""
    training = swarm_elastic.Elastic(*(pair := make()), global_batch=BATCH)
    while True:
        version = training.version
        loss = one_pass(pair[0], BATCH // training.world_size)
        training.expect(BATCH // training.world_size)
        loss.backward()
        if training.step(loss):
            tell(step=training.step_number, version=version, t=time.monotonic())


def overhead():
    """The same steps by this library and by DistributedDataParallel, in turns: seconds of each block."""
    own, plain = make(), make()
    training = swarm_elastic.Elastic(*own, global_batch=BATCH)
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, rank=training.rank, world_size=training.world_size)
    wrapped = torch.nn.parallel.DistributedDataParallel(plain[0])
    share = BATCH // training.world_size

    def elastic_step():
        loss = one_pass(own[0], share)
        loss.backward()
        training.step(loss)

    def plain_step():
        loss = one_pass(wrapped, share)
        loss.backward()
        loss.item()  # as the other has it, too
        plain[1].step()
        plain[1].zero_grad()

    took = {"elastic": [], "plain": []}
    computed = {"elastic": [], "plain": []}
    for block in range(BLOCKS + 1):
        order = [("elastic", elastic_step), ("plain", plain_step)]
        for name, step in order if block % 2 else reversed(order):
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(BLOCK_STEPS):
                step()
            if block:
                took[name].append(time.perf_counter() - begun_s)
                computed[name].append(time.process_time() - begun_cpu_s)
    tell(done=True, took=took, computed=computed)


def copy():
    """Seconds to send the state of the model to another process, by a group and by a plain socket beside it."""
    from torch.distributed import PrefixStore, TCPStore

    from swarm_elastic._group import GlooGroup
    from swarm_elastic._handover import receive_tensors, send_tensors

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    group = GlooGroup(PrefixStore("copy", store), rank, 2, "127.0.0.1", 60.0)
    tensors = [each.detach() for each in make()[0].parameters()] * 2  # weights and momentum
    connection = _connected(store, rank)
    turns = {"group": [], "socket": []}
    for _ in range(6):
        for name, turn in turns.items():
            group.gather([0])
            begun_s = time.perf_counter()
            if name == "group":
                send_tensors(group, tensors, [0], [1]) if rank == 0 else receive_tensors(group, tensors, [0], [1])
            else:
                for tensor in tensors:
                    data = memoryview(tensor.numpy()).cast("B")
                    connection.sendall(data) if rank == 0 else _fill(connection, data)
            group.gather([0])
            turn.append(time.perf_counter() - begun_s)
    tell(done=True, bytes=sum(each.numel() * each.element_size() for each in tensors), **turns)


def _connected(store, rank):
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("port", str(server.getsockname()[1]))
            return server.accept()[0]
    return socket.create_connection(("127.0.0.1", int(store.get("port"))))


def _fill(connection, data):
    at = 0
    while at < len(data):
        at += connection.recv_into(data[at:])


def torchrun():
    """As a script for torchrun does it: a checkpoint every few steps, and from the newest on after each restart."""
    torch.distributed.init_process_group("gloo")
    model, optimizer = make()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    path, step = Path("snapshot.pt"), 0
    if path.exists():
        step, weights, moments = torch.load(path)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    world = torch.distributed.get_world_size()
    while True:
        loss = one_pass(wrapped, BATCH // world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if torch.distributed.get_rank() == 0:
            if step % CHECKPOINT_EVERY == 0:
                torch.save((step, model.state_dict(), optimizer.state_dict()), "snapshot.new")
                Path("snapshot.new").replace(path)
            with Path("steps.log").open("a") as log:
                print(json.dumps({"step": step, "version": world, "t": time.monotonic()}), file=log)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.suppress(BrokenPipeError):
        {"train": train, "overhead": overhead, "copy": copy, "torchrun": torchrun}[os.environ["MODE"]]()
