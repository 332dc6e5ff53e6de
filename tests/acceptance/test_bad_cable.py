"""Two hosts whose cable is bad: ranks that train apart keep their speed, where synchronous training loses most of it.

Each host is a network namespace with one simulated GPU; the cable between them carries 100 Mbit/s with 10 ms, and the
training is the example of the tutorial.  Speeds are ratios of runs in one test, losses those of equal samples.
"""

import re
from pathlib import Path

import pytest

from tests.agent.testing import wait_until_sync
from tests.chaos.machines import start_machines
from tests.testbed.netns import Cables, why_not

pytestmark = [pytest.mark.root, pytest.mark.acceptance, pytest.mark.torch]

BAD = Cables(mbit_s=100, delay_ms=5)  # a frame passes two
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_apart.py"
STEPS, STEP_MS = 384, 100
PATIENCE_S = 300


def trained(folder, venv, cables, *words, steps=STEPS):
    """Loss and steps a second of one run, by what its first rank tells at its end."""
    folder.mkdir()
    with start_machines(folder, 2, disks={}, cables=cables) as swarm:
        swarm.converge()
        agent = swarm["n1"].agent
        command = [str(venv / "bin" / "python"), str(SCRIPT), "--steps", str(steps), "--step-ms", str(STEP_MS), *words]
        job = agent.submit(*command, ranks=2, gpus_per_rank=1, env={"OMP_NUM_THREADS": "1"})["id"]
        wait_until_sync(lambda: agent.get(f"/v1/jobs/{job}")["state"] == "ended", PATIENCE_S, "it has ended")
        output = agent.output({"id": job})
        found = re.search(r"held-out loss ([0-9.]+), ([0-9.]+) steps/s", output)
        assert found, output
        return float(found[1]), float(found[2])


@pytest.fixture(autouse=True)
def _possible():
    if reason := why_not():
        pytest.skip(reason)


def test_ranks_that_train_apart_keep_their_speed_over_a_bad_cable(tmp_path, train_venv, report):
    apart = trained(tmp_path / "a", train_venv, None)
    synchronous = trained(tmp_path / "s", train_venv, None, "--synchronous")
    shaped = trained(tmp_path / "sa", train_venv, BAD)
    shaped_synchronous = trained(tmp_path / "ss", train_venv, BAD, "--synchronous", steps=128)
    kept, kept_synchronous = shaped[1] / apart[1], shaped_synchronous[1] / synchronous[1]
    report(
        f"of {apart[1]:.1f} steps/s apart {kept:.3f} are kept over {BAD}, of {synchronous[1]:.1f} synchronous ones "
        f"{kept_synchronous:.3f}; loss at equal samples {shaped[0]:.4f} against {synchronous[0]:.4f}, "
        f"{shaped[0] / synchronous[0] - 1:+.1%}"
    )
    assert kept > 0.8
    assert kept_synchronous < 0.4
    assert shaped[0] < 1.3 * synchronous[0]
