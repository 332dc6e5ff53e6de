"""Train a network on scikit-learn's handwritten digits, apart: ranks merge what they have learned now and then.

Run it with `swarm run --gpus 2 -- python train_apart.py`.  Each rank trains by itself, and `swarm_elastic.Outer` merges
the changes of all each so many steps, so it needs a hundredth of the network that `--synchronous`, which is torch's
DistributedDataParallel, needs for the same samples.
"""

import argparse
import gc
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swarm_elastic

NOISE = 0.3  # on images of 0 to 1, drawn anew for each step, so that there is always something to learn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128, help="per rank")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--every", type=int, default=64, help="steps between two rounds")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step, as if a GPU worked on it")
    parser.add_argument("--synchronous", action="store_true", help="exchange gradients at each step instead")
    options = parser.parse_args()
    if options.synchronous:
        dist.init_process_group("gloo")
        train(options)
        gc.collect()  # nothing may hold the group when it goes
        dist.destroy_process_group()
    else:
        train(options)


def train(options):
    samples, held_out = load()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, options.width), nn.ReLU(),
        nn.Linear(options.width, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if options.synchronous:
        network, merging = DistributedDataParallel(model), nullcontext()
        number, count = dist.get_rank(), dist.get_world_size()
    else:
        network = model
        merging = swarm_elastic.Outer(model, optimizer, every=options.every, batch=options.batch_size)
        number, count = merging.learner, merging.learners
    chance = torch.Generator().manual_seed(int(os.environ.get("SWARM_WORKER", number)))  # a newcomer draws others
    times = []
    with merging:
        for step in range(1, options.steps + 1):
            began_s = time.monotonic()
            if not options.synchronous:
                number, count = merging.learner, merging.learners  # others may have come or gone
            images, labels = (tensor[number::count] for tensor in samples)  # each rank has samples of its own
            drawn = torch.randint(len(images), (options.batch_size,), generator=chance)
            noise = NOISE * torch.randn(options.batch_size, 64, generator=chance)
            loss = nn.functional.cross_entropy(network(images[drawn] + noise), labels[drawn])
            optimizer.zero_grad()
            time.sleep(max(0.0, began_s + options.step_ms / 1000 - time.monotonic()))
            loss.backward()
            optimizer.step()
            times.append(time.monotonic())
            if number == 0 and step % options.every == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    if number == 0:
        rate = (len(times) - options.every) / (times[-1] - times[options.every - 1])  # without the first round
        print(f"held-out loss {evaluate(model, *held_out):.4f}, {rate:.2f} steps/s", flush=True)


def load():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return (split[0], split[2]), (split[1], split[3])


def evaluate(model, images, labels):
    """Of images that were not trained on, with noise that is always the same."""
    noise = NOISE * torch.randn(len(images), 64, generator=torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images + noise), labels).item()


if __name__ == "__main__":
    main()
