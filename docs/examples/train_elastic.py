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

    training = swarm_elastic.Elastic(model, optimizer, global_batch=options.batch_size)
    for images, labels in training.batches(train_set, epochs=options.epochs):
        time.sleep(options.sample_ms / 1e3 * len(images))
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        training.step(loss)
        if training.is_first and training.step_number % 10 == 0:
            print(f"step {training.step_number:4}  loss {training.loss:.4f}  workers {training.world_size}", flush=True)

    if training.is_first:
        print(f"world size {training.world_size}, test accuracy {accuracy(model, test_set):.4f}", flush=True)


if __name__ == "__main__":
    main()
