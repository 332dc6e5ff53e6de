"""What a model computes and moves, as torch counts it, and as `swarm run --work` reads it."""

from pathlib import Path

from swarm_client.job_key import BY_NAME
from tests.elastic.testing import TRAIN, Script, needs

pytestmark = needs(TRAIN)

MODEL = """
import torch
from swarm_elastic.model_work import describe

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(1000, 8, sparse=True)
        self.layer = torch.nn.Linear(8, 4)
    def forward(self, x):
        return {"logits": self.layer(self.words(x))}

print(describe(Words(), torch.tensor([3, 5, 5, 7])))
try:
    describe(Words(), 3)
except ValueError as error:
    print(error)
"""


def test_figures_of_a_model_are_counted_and_can_be_given_to_swarm_run(tmp_path: Path) -> None:
    """4 samples; a layer of 8 x 4 costs 2 x 32 operations forward and twice that backward; 3 rows of 32 bytes."""
    code, out, err = Script(tmp_path, MODEL, python=str(TRAIN)).finish()
    assert code == 0, err
    told, refused = out.splitlines()
    read = BY_NAME["work"].read
    assert read is not None
    layer_bytes = 4 * (8 * 4 + 4)
    assert read(told) == {
        "local_batch": 4,
        "sample_flops": 3 * 2 * 32,
        "parameter_bytes": 4 * 8_000 + layer_bytes,
        "moved_bytes": 3 * 32 + layer_bytes,
        "largest_bytes": 4 * 8 * 4,
    }
    assert "example must be a tensor" in refused
