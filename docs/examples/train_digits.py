"""Train a small network on scikit-learn's handwritten digits, data-parallel, with plain torch.distributed.

An ordinary DDP script: it reads torch's own environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and
knows nothing of the scheduler.  Run it with `swarm run --gpus 4 -- python train_digits.py`, or with torchrun.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def accuracy(model, dataset, device):
    images, labels = (tensor.to(device) for tensor in dataset.tensors)
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    # Nothing may hold the group any more, or its threads would still run while the interpreter ends (and abort it).
    gc.collect()
    dist.destroy_process_group()


def train(options):
    use_cuda = torch.cuda.is_available()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    torch.manual_seed(0)

    train_set, test_set = load()
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}", flush=True)

    if rank == 0:
        print(f"world size {world_size}, test accuracy {accuracy(model, test_set, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
