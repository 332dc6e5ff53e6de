"""A small convolutional network in mixed precision, on the GPU that the job was given; it resumes by itself.

Which quarter of a picture is brighter than the others is to be found.  STEPS says when it ends, EVERY how often it
makes a checkpoint.
"""

import os
from itertools import pairwise

import torch
from torch import nn

import swarm_elastic


def pictures(count: int = 4_096) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, 32, 32) and the number of the bright quarter."""
    random = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, 32, 32, generator=random)
    labels = torch.randint(4, (count,), generator=random)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = 16 * (label // 2), 16 * (label % 2)
        image[:, top : top + 16, left : left + 16] += 0.2
    return images, labels


def network() -> nn.Module:
    widths = (3, 64, 128, 256)
    blocks = [
        layer
        for before, after in pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256 * 16, 4))


def main() -> None:
    torch.manual_seed(0)
    steps, every = int(os.environ["STEPS"]), int(os.environ.get("EVERY", "0"))
    device = torch.device("cuda")
    images, labels = pictures()
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    training = swarm_elastic.Elastic(model, optimizer, global_batch=256, scaler=scaler)
    print(f"begins at step {training.step_number} on {torch.cuda.get_device_properties(0).uuid}", flush=True)
    for x, y in training.batches(torch.utils.data.TensorDataset(images, labels), epochs=-(-steps // 16)):
        with torch.autocast("cuda", torch.float16):
            outputs = model(x.to(device, non_blocking=True))
            loss = nn.functional.cross_entropy(outputs, y.to(device, non_blocking=True))
        scaler.scale(loss).backward()
        training.step(loss)
        if training.step_number % 20 == 0:
            print(f"step {training.step_number} loss {training.loss:.4g}", flush=True)
        if every and training.step_number % every == 0:
            training.checkpoint("all")
    print(f"done {training.step_number} loss {training.loss:.4g}", flush=True)


if __name__ == "__main__":
    main()
