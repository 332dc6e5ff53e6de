"""The digits of train_digits.py, by a loop whose workers may join, leave and die while it trains.

Run it with `swarm run --gpus 2:4 --elastic -- python train_elastic.py`; elsewhere it trains alone, or by torchrun.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import swarm_elastic


def load():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def accuracy(model, dataset):
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


class Best:
    """The best value of all epochs."""

    def __init__(self):
        self.value = 0.0

    def see(self, value):
        self.value = max(self.value, value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    parser.add_argument(
        "--sample-ms", type=float, default=0.0, help="that a worker waits for each sample, to be watched"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    best = Best()

    parts = {"schedule": schedule, "best": best}  # whatever else a worker that joins must have as the others have it
    training = swarm_elastic.Elastic(model, optimizer, global_batch=options.batch_size, parts=parts)
    for epoch in training.epochs(options.epochs):
        for images, labels in training.batches(train_set):
            time.sleep(options.sample_ms / 1e3 * len(images))
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            training.step(loss)
            if training.is_first and training.step_number % 10 == 0:
                told = f"step {training.step_number:4}  loss {training.loss:.4f}  workers {training.world_size}"
                print(told, flush=True)
        schedule.step()
        best.see(accuracy(model, test_set))  # on all workers, so that all know
        if training.is_first:
            print(f"epoch {epoch:3}  best accuracy so far {best.value:.4f}", flush=True)
            training.checkpoint(f"epoch-{epoch}.pt")  # last: it holds all that was done before

    if training.is_first:
        print(f"world size {training.world_size}, test accuracy {accuracy(model, test_set):.4f}", flush=True)


if __name__ == "__main__":
    main()
