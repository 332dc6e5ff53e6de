"""Real training with real PyTorch: plain scripts that know nothing of the scheduler."""

import re
import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.torch, pytest.mark.xdist_group("cluster-torch")]

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_digits.py"


@pytest.fixture
def project(shell):
    shutil.copy(SCRIPT, shell.folder)
    (shell.folder / "swarm.toml").write_text("")
    return shell.folder


def accuracy_of(out, world_size):
    found = re.search(rf"world size {world_size}, test accuracy ([0-9.]+)", out)
    assert found, out
    return float(found.group(1))


def nodes_of(agents, name):
    document = next(each for each in agents[1].get("/v1/jobs?all=true")["items"] if each["name"] == name)
    return {node["node"] for node in agents[1].get(f"/v1/jobs/{document['id']}")["nodes"]}


def test_data_parallel_training_spans_nodes_and_learns(swarm, shell, project, train_venv):
    words = ("run", "-n", "digits", "-g", "4", "--venv", train_venv, "--", "python", "train_digits.py")
    code, out, err = shell(swarm, *words, timeout_s=300)
    assert code == 0, err
    assert accuracy_of(out, 4) >= 0.95
    assert len(nodes_of(swarm, "digits")) >= 2


@pytest.fixture
def one_gpu_each(swarm):
    """One GPU of n2 and one of n3 are taken, so that two are found only on two nodes."""
    holders = [swarm[0].submit("sleep", "600", ranks=1, gpus_per_rank=1, nodes=[name]) for name in ("n2", "n3")]
    yield
    for job in holders:
        swarm[0].call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_seconds": 0.5})
        swarm[0].ended(job)


def test_torchrun_on_each_node_trains_the_same_script(swarm, shell, project, train_venv, one_gpu_each):
    shape = ("--per-node", "--ranks", "2", "--gpus-per-rank", "1", "--exclude", "n1")
    words = ("run", "-n", "elastic", *shape, "--venv", train_venv, "--", "torchrun", "train_digits.py")
    code, out, err = shell(swarm, *words, timeout_s=300)
    assert code == 0, err
    assert accuracy_of(out, 2) >= 0.95
    assert nodes_of(swarm, "elastic") == {"n2", "n3"}


APART = """
import time, torch, swarm_elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with swarm_elastic.Outer(model, optimizer, every=7) as outer:
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
    rounds = outer.status["shards"][0]["rounds"]
merged = f"merged {rounds > 0} each {outer.every}"
print(f"learner {outer.learner} of {outer.learners}: {merged}, weight {model.weight[0, 0].item():.6f}")
"""


def test_ranks_on_two_nodes_train_apart_and_end_with_the_same_weights(swarm, shell, train_venv, one_gpu_each):
    (shell.folder / "train.py").write_text(APART)
    (shell.folder / "swarm.toml").write_text("")
    shape = ("--ranks", "2", "--gpus-per-rank", "1", "--exclude", "n1")
    code, out, err = shell(
        swarm,
        "run",
        "-n",
        "apart",
        *shape,
        "--outer",
        "every=4",
        "--venv",
        train_venv,
        "--",
        "python",
        "train.py",
        timeout_s=300,
    )
    assert code == 0, err
    assert nodes_of(swarm, "apart") == {"n2", "n3"}
    told = re.findall(r"learner (\d) of 2: merged True each 4, weight (\S+)", out)
    assert {learner for learner, _ in told} == {"0", "1"}, out
    assert len({weight for _, weight in told}) == 1
    assert "--outer did nothing" not in err


@pytest.mark.acceptance  # it imports torch six times
def test_processes_that_torchrun_starts_on_each_node_are_learners_of_their_own(swarm, shell, train_venv, one_gpu_each):
    (shell.folder / "train.py").write_text(APART)
    (shell.folder / "swarm.toml").write_text("")
    shape = ("--per-node", "--ranks", "2", "--gpus-per-rank", "1", "--exclude", "n1", "--outer", "every=4")
    command = ("torchrun", "--nproc-per-node", "2", "train.py")
    code, out, err = shell(
        swarm, "run", "-n", "torchrun-apart", *shape, "--venv", train_venv, "--", *command, timeout_s=300
    )
    assert code == 0, err
    told = re.findall(r"learner (\d) of 4: merged True each 4, weight (\S+)", out)
    assert {learner for learner, _ in told} == {"0", "1", "2", "3"}, out
    assert len({weight for _, weight in told}) == 1


def test_missing_module_is_hinted_at_with_the_options_that_bring_it(swarm, shell):
    (shell.folder / "train.py").write_text("import no_such_framework\n")
    code, out, err = shell(swarm, "run", "--", "python3", "train.py")
    assert (code, out) == (1, "")
    assert "no_such_framework" in err
    assert "--venv" in err
    assert "--requirements" in err


def test_virtual_environment_that_is_not_on_the_node_is_named(swarm, shell):
    code, _, err = shell(swarm, "run", "--no-sync", "--venv", "/nowhere/env", "--", "python", "-c", "pass")
    assert code == 125
    assert "/nowhere/env" in err
