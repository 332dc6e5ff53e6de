"""Does the outer step train?  The merge rule of shards against synchronous data parallel, both tuned, on real models.

Run by `make science` with the interpreter of .venv-train: `python -m tests.science.outer RESULTS.csv [quick]`.  The
learners of a run take their steps one after another in this process; their rounds go through `swarmsched.aggregation`
and `swarm_elastic._shown`, the code that runs in a swarm.  Each finished run is a line of the file, under a digest of
that code; what the file has is not run again.

All variants see the same number of samples: `learners` times as many as one learner alone.  Rates are tuned for each
of them on a seed that is not among those that are reported.
"""

import csv
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_elastic._shown import Packed, Shown, Version
from swarmsched.aggregation.blocks import Blocks
from swarmsched.aggregation.rule import MergeRule
from swarmsched.aggregation.shard import (
    AggregationPlan,
    AskWeights,
    ContributionCame,
    LearnerCame,
    Origin,
    PlanNumber,
    Publish,
    SendWeights,
    Shard,
    ShardEffect,
    ShardEvent,
    ShardVersion,
    TimePassed,
    WeightsCame,
)

ROOT = Path(__file__).resolve().parents[2]
LEARNERS, BATCH = 4, 8
TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
STEPS = {"transformer": 768, "cnn": 768}
LONGER, LONGER_TASK = 4, "transformer"
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
RULES = ((0.7, 0.9), (0.9, 0.5), (1.0, 0.0))
PERIODS = (16, 64, 256)
OVERLAPS = (0, 4, 16)
SYNCHRONOUS = "synchronous"
PLAN = PlanNumber(1, 1)
LAYOUT = "science"


@dataclass(frozen=True)
class Run:
    """One training.  `period` 0: synchronous, or one learner alone; in `late` of four rounds a learner comes late."""

    task: str
    steps: int
    learners: int
    period: int
    overlap: int
    lr: float
    rate: float
    momentum: float
    is_quantised: bool
    late: int
    losses_of_momentum: int
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(str(each) for each in asdict(self).values())


# What is trained.


class Layer(nn.Module):
    """One of a transformer that looks back."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.told = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.asked(self.before(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.told(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Of characters."""

    def __init__(self, vocabulary: int, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.names, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.names.weight, std=0.02)
        self.layers = nn.Sequential(Layer(width, 4), Layer(width, 4))
        self.last = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.names(x) + self.places)) @ self.names.weight.T


def cnn() -> nn.Module:
    """Of images of 12 x 12."""
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24 * 9, 48), nn.GELU(), nn.Linear(48, 10)),
    )


@dataclass(frozen=True)
class Task:
    """`draw` gives a batch, `held_out` is what no training sees."""

    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


@cache
def task(name: str) -> Task:
    """By its name."""
    return {"transformer": text, "cnn": images}[name]()


def text(length: int = 32) -> Task:
    """The next characters of this project's manual."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    whole = "".join(page.read_text(encoding="utf-8") for page in pages if page.name != "results.md")
    letters = sorted({*whole}, key=whole.count, reverse=True)[:95]
    code = {letter: at for at, letter in enumerate(letters)}
    data = torch.tensor([code.get(letter, len(letters)) for letter in whole])
    train, rest = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def cut(of: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        places = starts[:, None] + torch.arange(length)
        return of[places], of[places + 1]

    def draw(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        return cut(train, torch.randint(len(train) - length - 1, (count,), generator=chance))

    held_out = cut(rest, torch.arange(0, len(rest) - length - 1, len(rest) // 512)[:512])
    return Task(lambda: Transformer(len(letters) + 1), draw, held_out)


def images() -> Task:
    """Handwritten digits of scikit-learn, turned, moved and noisy."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    kinds = torch.tensor(digits.target)
    chance = torch.Generator().manual_seed(7)
    order = torch.randperm(len(small), generator=chance)
    train, rest = order[450:], order[:450]

    def vary(which: Tensor) -> tuple[Tensor, Tensor]:
        angle, size = (torch.rand(2, len(which), generator=chance) - 0.5) * torch.tensor([[1.0], [0.5]])
        moved = (torch.rand(len(which), 2, generator=chance) - 0.5) * 0.4
        turned = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)], 1).view(
            -1, 2, 2
        )
        matrix = torch.cat([turned * (1.2 + size)[:, None, None], moved[:, :, None]], 2)
        grid = functional.affine_grid(matrix, [len(which), 1, 12, 12], align_corners=False)
        made = functional.grid_sample(small[which], grid, align_corners=False)
        return made + 0.3 * torch.randn(made.shape, generator=chance), kinds[which]

    pool = vary(train.repeat(16))
    held_out = vary(rest.repeat(6))

    def draw(count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        which = torch.randint(len(pool[1]), (count,), generator=chance)
        return pool[0][which], pool[1][which]

    return Task(cnn, draw, held_out)


class Learner:
    """A model whose parameters are one vector, and AdamW on it."""

    def __init__(self, run: Run, name: int) -> None:
        torch.manual_seed(run.seed)
        self.task = task(run.task)
        self.model = self.task.make()
        sizes = [each.numel() for each in self.model.parameters()]
        self.now = torch.cat([each.detach().flatten() for each in self.model.parameters()]).requires_grad_()
        self.now.grad = torch.zeros_like(self.now)
        parts = zip(self.now.detach().split(sizes), self.now.grad.split(sizes), strict=True)
        for each, (value, slope) in zip(self.model.parameters(), parts, strict=True):
            each.data, each.grad = value.view_as(each), slope.view_as(each)
        self.optimizer = torch.optim.AdamW([self.now], lr=run.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _share(step, run.steps))
        self.chance = torch.Generator().manual_seed(1_000 * run.seed + name)
        self.shown = Shown(str(name), self.now.detach().clone(), is_quantised=run.is_quantised)

    def step(self, batch: int) -> None:
        """Of training."""
        x, y = self.task.draw(batch, self.chance)
        self.now.grad.zero_()
        _loss(self.model, x, y).backward()
        self.optimizer.step()
        self.schedule.step()

    def held_out(self) -> float:
        """The loss there."""
        with torch.no_grad():
            return float(_loss(self.model, *self.task.held_out))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def _share(step: int, steps: int) -> float:
    """Of the rate: a twentieth of the steps to warm up, and a cosine down to a tenth."""
    warm = steps / 20
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


# How it is trained.


def synchronous(run: Run) -> float:
    """All learners' batches in one gradient."""
    learner = Learner(run, 0)
    for _ in range(run.steps):
        learner.step(run.learners * BATCH)
    return learner.held_out()


class Rounds:
    """Learners, their shard, and what is under way between them; time is counted in steps."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.learners = [Learner(run, name) for name in range(run.learners)]
        rule = MergeRule(run.rate, run.momentum, is_quantised=run.is_quantised)
        plan = AggregationPlan(PLAN, tuple(str(name) for name in range(run.learners)))
        self.shard = Shard(len(self.learners[0].now), rule, LAYOUT, plan, life=1)
        self.under_way: list[tuple[float, Callable[[], None]]] = []
        for name in range(run.learners):
            self.tell(LearnerCame(str(name), PLAN, LAYOUT, ShardVersion()), 0.0)

    def tell(self, event: ShardEvent, now_s: float) -> None:
        """The shard, and do what follows."""
        for effect in self.shard.step(event, now_s):
            self.act(effect, now_s)

    def act(self, effect: ShardEffect, now_s: float) -> None:
        match effect:
            case AskWeights(learner):
                shown = self.learners[int(learner)].shown
                self.tell(WeightsCame(learner, _named(shown.version), shown.weights.numpy().copy(), {}), now_s)
            case SendWeights(learner):
                weights = torch.from_numpy(self.shard.weights.copy())
                one = self.learners[int(learner)]
                one.now.data += one.shown.replace(Version(*self.shard.version), weights, self.shard.counted)
            case Publish():
                self.under_way.append((now_s + self.run.overlap, lambda: self.merge(effect)))
            case _:
                raise AssertionError(f"step {now_s}: {effect}")

    def merge(self, effect: Publish) -> None:
        """At every learner."""
        change = _packed(effect.change)
        for one in self.learners:
            moved = one.shown.move(Version(*effect.base), Version(*effect.version), change, effect.counted)
            assert moved is not None
            one.now.data += moved

    def train(self) -> float:
        """Return the held-out loss of the outer weights."""
        rounds = self.run.steps // self.run.period
        lost = {rounds * (each + 1) // (self.run.losses_of_momentum + 1) for each in range(self.run.losses_of_momentum)}
        for step in range(1, self.run.steps + 1):
            for one in self.learners:
                one.step(BATCH)
            self.arrive(step)
            if step % self.run.period == 0:
                if step // self.run.period in lost:
                    self.shard.lose_momentum()
                self.contribute(step)
                if self.run.overlap == 0:
                    self.arrive(step)
        self.arrive(math.inf)
        self.learners[0].now.data.copy_(torch.from_numpy(self.shard.weights))
        return self.learners[0].held_out()

    def contribute(self, step: int) -> None:
        """All whose last contribution has come back; the one that is late comes in the middle of the next round."""
        number = step // self.run.period
        late = number // 4 % self.run.learners if number % 4 < self.run.late else -1
        for name, one in enumerate(self.learners):
            if one.shown.is_waiting:
                continue
            packed = one.shown.contribution(one.now.detach())
            base = _named(one.shown.version)
            blocks = Blocks(packed.values.numpy().copy(), None if packed.scales is None else packed.scales.numpy())
            event = ContributionCame(str(name), PLAN, base, self.run.period, self.run.period * BATCH, blocks)
            if name == late:
                at = step + self.run.period / 2
                self.under_way.append((at, lambda event=event, at=at: self.tell(event, at)))  # type: ignore[misc]
            else:
                self.tell(event, step)
        if math.isfinite(self.shard.next_deadline_s):
            self.tell(TimePassed(), self.shard.next_deadline_s)

    def arrive(self, step: float) -> None:
        """What was under way until then."""
        while due := [each for each in self.under_way if each[0] <= step]:
            first = min(due, key=lambda each: each[0])
            self.under_way.remove(first)
            first[1]()


def _named(version: Version) -> ShardVersion:
    return ShardVersion(version.number, Origin(*version.origin))


def _packed(blocks: Blocks) -> Packed:
    scales = None if blocks.scales is None else torch.from_numpy(blocks.scales)
    return Packed(torch.from_numpy(blocks.values), scales)


def trained(run: Run) -> float:
    """The held-out loss."""
    return Rounds(run).train() if run.period else synchronous(run)


# Which trainings there are.


class Book:
    """Finished runs, in a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.digest = path, digest()
        names = ["code", *(each.name for each in fields(Run)), "loss", "cpu_s"]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(names) + "\n", encoding="utf-8")
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row[0] == self.digest]
        self.done = {tuple(row[1:-2]): (float(row[-2]), float(row[-1])) for row in rows}

    def loss(self, run: Run) -> float:
        """Of a run that is trained now if it was not."""
        if run.key not in self.done:
            begun_s = time.process_time()
            loss = trained(run)
            self.done[run.key] = loss, time.process_time() - begun_s
            with self.path.open("a", encoding="utf-8") as file:
                file.write(",".join([self.digest, *run.key, repr(loss), f"{self.done[run.key][1]:.2f}"]) + "\n")
            told = f"{' '.join(run.key)}: {loss:.4f} in {self.done[run.key][1]:.1f} s"
            print(told, file=sys.stderr, flush=True)
        return self.done[run.key][0]

    def best(self, runs: Sequence[Run]) -> Run:
        """The one with the least loss, of those that came to one."""
        return min(runs, key=lambda run: (math.isnan(self.loss(run)), self.loss(run)))


def digest() -> str:
    """Of the code that decides the results."""
    files = [Path(__file__), *(ROOT / f"swarmsched/aggregation/{name}.py" for name in ("blocks", "rule", "shard"))]
    files.append(ROOT / "client/swarm_elastic/_shown.py")
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]


def tuned_synchronous(book: Book, name: str, steps: int, learners: int, rates: Sequence[float] = RATES) -> Run:
    """Of as many steps."""
    run = Run(name, steps, learners, 0, 0, 0.0, 0.0, 0.0, False, 0, 0, TUNING_SEED)
    return book.best([replace(run, lr=lr) for lr in rates])


def tuned_outer(
    book: Book,
    name: str,
    steps: int,
    period: int,
    rules: Sequence[tuple[float, float]] = RULES,
    rates: Sequence[float] = RATES,
) -> Run:
    """The inner rate and the rule, without overlap."""
    run = Run(name, steps, LEARNERS, period, 0, 0.0, 0.0, 0.0, True, 0, 0, TUNING_SEED)
    grid = [replace(run, lr=lr, rate=rate, momentum=momentum) for lr in rates for rate, momentum in rules]
    return book.best(grid)


def variants(book: Book, name: str, *, is_quick: bool) -> Iterator[tuple[str, Run]]:
    """What is reported, with its tuned rates; all that follow are compared with the last one that is synchronous."""
    steps = STEPS[name] // (16 if is_quick else 1)
    yield SYNCHRONOUS, tuned_synchronous(book, name, steps, LEARNERS)
    yield "the same, a quarter of the samples", tuned_synchronous(book, name, steps // 4, LEARNERS)
    yield "one learner alone, a quarter of the samples", tuned_synchronous(book, name, steps, 1)
    for period in PERIODS[:1] if is_quick else PERIODS:
        best = tuned_outer(book, name, steps, period, RULES[:1] if is_quick else RULES)
        for overlap in OVERLAPS:
            yield f"every {period}, overlap {overlap}", replace(best, overlap=overlap)
        if period == 64 or is_quick:
            yield f"every {period}, float32 on the wire", replace(best, is_quantised=False)
            yield f"every {period}, one of four late in each round", replace(best, late=4)
            yield f"every {period}, momentum lost three times", replace(best, losses_of_momentum=3)
            for rule in RULES:
                yield f"every {period}, {rule_text(*rule)}", tuned_outer(book, name, steps, period, [rule])
    if name == LONGER_TASK and not is_quick:
        steps, rates = LONGER * steps, RATES[1:]
        yield f"{LONGER} times the steps: {SYNCHRONOUS}", tuned_synchronous(book, name, steps, LEARNERS, rates)
        yield "one learner alone, a quarter of the samples", tuned_synchronous(book, name, steps, 1, rates)
        for period in PERIODS[:2]:
            yield f"every {period}, overlap 0", tuned_outer(book, name, steps, period, RULES, rates)


def rule_text(rate: float, momentum: float) -> str:
    """A rule in words."""
    return f"rate {rate:g}, momentum {momentum:g}" if momentum else "plain mean"


def table(path: Path, *, is_quick: bool = False) -> str:
    """The rows of docs/research/results.md; trains what the file does not have yet."""
    book = Book(path)
    seeds = SEEDS[:1] if is_quick else SEEDS
    told = ["variant", *(f"{name}: loss, over synchronous (least to most), tuned" for name in STEPS)]
    lines = [f"| {' | '.join(told)} |", "|---|" + "---|" * len(STEPS)]
    columns = [_column(book, name, seeds, is_quick=is_quick) for name in STEPS]
    rows = zip_longest(*columns, fillvalue=("", ""))  # the first task has all rows
    lines += [f"| {row[0][0]} | {' | '.join(told for _, told in row)} |" for row in rows]
    cpu_s = sum(cpu_s for _, cpu_s in book.done.values())
    lines += ["", f"{len(book.done)} runs, {cpu_s / 60:.0f} minutes of one core, code {book.digest}."]
    return "\n".join(lines)


def _column(book: Book, name: str, seeds: Sequence[int], *, is_quick: bool) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    base: list[float] = []
    for told, best in variants(book, name, is_quick=is_quick):
        losses = [book.loss(replace(best, seed=seed)) for seed in seeds]
        base = losses if told.endswith(SYNCHRONOUS) else base
        ratios = [one / other for one, other in zip(losses, base, strict=True)]
        spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
        how = f"lr {best.lr:g}" + (f", {rule_text(best.rate, best.momentum)}" if best.period else "")
        ratio = f"{mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append((told, f"{mean(losses):.3f}{spread}, {ratio}; {how}"))
    return rows


def main(arguments: Sequence[str]) -> None:
    """Train, and print the table."""
    torch.set_num_threads(1)
    print(table(Path(arguments[0]), is_quick="quick" in arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
