"""The trainings behind the table of outer steps, small: each way of training is gone, and learns something."""

from pathlib import Path

from tests.elastic.testing import PACKAGE, ROOT, TRAIN, Script, needs

pytestmark = needs(TRAIN)

TEXT = """
import torch
from dataclasses import replace
from tests.science.outer import Book, Run, _column, trained
from pathlib import Path
torch.set_num_threads(1)
plain = Run("cnn", 48, 2, 0, 0, 0.008, 0.0, 0.0, False, 0, 0, 3)
apart = replace(plain, period=8, rate=1.0, is_quantised=True)
late = replace(apart, learners=4, late=4)
book = Book(Path("runs.csv"))
for run in (plain, apart, replace(apart, overlap=4), late, replace(apart, losses_of_momentum=2)):
    print(book.loss(run))
print(Book(Path("runs.csv")).done[plain.key][0] - trained(plain))
"""


def test_each_way_of_training_learns_and_what_was_run_is_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = f"{PACKAGE.parent}:{ROOT}"
    code, out, err = Script(tmp_path, TEXT, python=str(TRAIN), PYTHONPATH=paths).finish()
    assert code == 0, err
    *losses, same = out.split("\n")[:-1]
    assert len(set(losses)) == 5, "each is a training of its own"
    assert all(0.5 < float(loss) < 2.25 for loss in losses), losses
    assert same == "0.0"
