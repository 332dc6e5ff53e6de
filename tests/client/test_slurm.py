"""What people bring along from Slurm: options, batch scripts, launchers."""

import time

import pytest

from swarm_client.quantity import duration, size
from swarm_client.slurm import minutes

HEAD = "#!/bin/bash\n"


@pytest.fixture
def submitted(swarm, agent):
    """Run a command that submits, and give the specification that arrived, with standard error."""

    def submit(*words):
        code, _, err = swarm(*words)
        assert code == 0, err
        return agent.requests[-1][2]["spec"], err

    return submit


def shape(spec):
    return spec["ranks"], spec["gpus_per_rank"], spec.get("gpu_type", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gres=gpu:2"], (2, 1, "")),
        (["--gres", "gpu:a100:2"], (2, 1, "a100")),
        (["--gres=gpu:a100"], (1, 1, "a100")),
        (["--gres=gpu"], (1, 1, "")),
        (["--gres=gres/gpu:h200=4", "--ranks", "1"], (1, 4, "h200")),
        (["--gres=gpu:a100:2(S:0-1)"], (2, 1, "a100")),
        (["--gres=gpu:a100:2", "--gpu-type", "a100", "-g", "2"], (2, 1, "a100")),
    ],
)
def test_gres_gives_number_and_type(submitted, words, expected):
    assert shape(submitted("submit", "--no-sync", *words, "--", "x")[0]) == expected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gres=gpu:2:3"], "--gres 'gpu:2:3': must be gpu:N or gpu:TYPE:N"),
        (["--gres=gpu:a100:2:3"], "must be gpu:N or gpu:TYPE:N"),
        (["--gres=gpu:2,shard:1"], "must be gpu:N or gpu:TYPE:N"),
        (["--gpus=a100:2"], "must be N or MIN:MAX; a type is given apart, as in -g 2 --gpu-type a100"),
        (["--gres=fpga:2"], "must be gpu:N or gpu:TYPE:N"),
        (["--gres=gpu:2", "-g", "3"], "-g and --gres do not say the same"),
        (["--gres=gpu:a100:2", "--gpu-type", "h200"], "--gpu-type and --gres do not say the same"),
        (["--gres=gpu:2", "--gres=gpu:2"], "--gres was given twice"),
        (["-t", "1-2-3"], "must be a duration"),
        (["--work", "local_batch=1,local_batch=2"], "local_batch is given twice"),
        (["--nodes", "2"], "--nodes is not available in this version\n  --per-node starts one process on each node"),
        (["--ntasks=4"], "--ntasks is not available in this version\n  --ranks N starts N processes"),
        (["--partition", "x"], "--partition is not available in this version"),
    ],
)
def test_no_part_of_a_value_is_dropped_in_silence(swarm, words, problem):
    code, _, err = swarm("submit", "--no-sync", *words, "--", "x")
    assert (code, problem in err) == (2, True), err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:30", 90), ("1:00:00", 3_600), ("1-12", 129_600), ("1-12:30", 131_400), ("1-0:0:5", 86_405), ("90", 90)],
)
def test_times_with_days_begin_with_hours_behind_them(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["16G", "16g", "16Gi", "16GB", "16GiB"])
def test_a_size_may_be_written_as_elsewhere(text):
    assert size(text) == 16 * 2**30


@pytest.mark.parametrize(("text", "seconds"), [("10", 600), ("10:30", 630), ("2-1", 176_400), ("UNLIMITED", 0)])
def test_a_bare_number_is_minutes_where_slurm_reads_it(text, seconds):
    assert minutes(text) == seconds


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["--gres=gpu:a100:2", "-t 90", "-J train"],
            {"gpu_type": "a100", "time_limit_seconds": 5_400.0, "name": "train"},
        ),
        (["--gpus=h200:2"], {"gpus_per_rank": 2, "gpu_type": "h200"}),
        (["--gpus-per-node 4", "--ntasks-per-node=4", "-c 2"], {"gpus_per_rank": 4, "cpus_per_rank": 8}),
        (["-n 2 --gpus-per-task=2 --mem-per-gpu=1G"], {"gpus_per_rank": 4, "memory_bytes_per_rank": 2**32}),
        (["-n4 -c2 --mem-per-cpu=100"], {"gpus_per_rank": 0, "cpus_per_rank": 8, "memory_bytes_per_rank": 800 * 2**20}),
        (["--mem=4000"], {"memory_bytes_per_rank": 4_000 * 2**20}),
        (["-w gpu[1-2,04],x1", "--exclude=y"], {"nodes": ["gpu1", "gpu2", "gpu04", "x1"], "exclude": ["y"]}),
        (["--export=ALL,A=1,B=2"], {"env": {"A": "1", "B": "2"}}),
        (["--requeue"], {"restartable": True, "max_restarts": None}),
        (["--requeue --no-requeue"], {"restartable": False, "max_restarts": 0}),
        (["-D sub"], {"command": ["/bin/bash", "../job.sh", "7"]}),
    ],
)
def test_a_batch_script_says_what_it_asks_for(submitted, tmp_path, lines, expected):
    (tmp_path / "work" / "sub").mkdir()
    (tmp_path / "work" / "job.sh").write_text(
        HEAD + "".join(f"#SBATCH {line}\n" for line in lines) + "echo\n#SBATCH -t 1\n"
    )
    spec, err = submitted("submit", "--no-sync", "job.sh", "7")
    defaults = {"ranks": 1, "name": "job.sh", "slurm_env": True, "command": ["/bin/bash", "job.sh", "7"]}
    assert {key: spec.get(key) for key in defaults | expected} == defaults | expected
    assert "swarm: job.sh: read as swarm submit" in err
    assert "passed over" not in err


@pytest.mark.parametrize(("text", "seconds"), [("now+2hours", 7_200), ("now+30", 30), ("1-00:00:00", None)])
def test_a_deadline_of_a_batch_script_is_read_as_slurm_does(submitted, swarm, tmp_path, text, seconds):
    (tmp_path / "work" / "job.sh").write_text(f"{HEAD}#SBATCH --deadline={text}\n")
    if seconds is None:
        assert swarm("submit", "--no-sync", "job.sh")[0] == 2
        return
    spec, err = submitted("submit", "--no-sync", "job.sh")
    assert spec["deadline_utc_seconds"] == pytest.approx(time.time() + seconds, abs=20)
    assert " --deadline 20" in err


def test_what_a_batch_script_says_in_vain_is_named_and_options_win(submitted, tmp_path):
    lines = "#SBATCH -p gpu\n#SBATCH --output out.%j # here\n#SBATCH --mail-type=END\n#SBATCH -t 10 -G 2\n"
    (tmp_path / "work" / "job.sh").write_text(HEAD + lines)
    spec, err = submitted("submit", "--no-sync", "-t", "1h", "-g", "4", "job.sh")
    assert (spec["time_limit_seconds"], shape(spec)) == (3_600.0, (4, 1, ""))
    passed = "--partition=gpu, --output=out.%j, --mail-type=END (`swarm logs` has what it writes)"
    assert err.endswith(f"passed over: {passed}\n")
    spec, err = submitted("submit", "--no-sync", "--", "./job.sh")
    assert (spec["command"], err) == (["./job.sh"], "")


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (
            "#SBATCH -n 4 -G 4 -t 10 -J a\ncd x\nsrun python t.py\n",
            "job.sh:4: srun is not here: each rank of a job runs the whole script",
            "swarm submit -g 4 -t 10m -n a --slurm-env -- /bin/bash job.sh",
        ),
        (
            "#SBATCH -N 2 --gres=gpu:2\ntorchrun t.py\n",
            "job.sh asks for 2 nodes",
            "swarm submit -g 4 --per-node -n job.sh --slurm-env -- /bin/bash job.sh",
        ),
        ("#SBATCH --array=0-9\n", "job.sh:2: --array is not available in this version", "for i in 0 1 2"),
        ("#SBATCH -t soon\n", "job.sh: line 2: --time=soon must be", "correct its #SBATCH line"),
        ("#SBATCH --gpus=two\n", "job.sh: line 2: --gpus=two must be N or TYPE:N", "correct its #SBATCH line"),
    ],
)
def test_a_batch_script_that_would_run_otherwise_is_refused_with_the_way_here(swarm, tmp_path, text, problem, remedy):
    (tmp_path / "work" / "job.sh").write_text(HEAD + text)
    code, _, err = swarm("run", "--no-sync", "job.sh")
    assert (code, problem in err, remedy in err) == (2, True, True), err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "4", "--", "mpirun", "-np", "4", "x"], "each of 4 ranks runs mpirun of its own"),
        (["-g", "1:4", "--", "/opt/bin/mpiexec", "x"], "each of 4 ranks runs mpiexec of its own"),
        (["-g", "2", "--", "torchrun", "x.py"], "runs torchrun of its own; --per-node starts one on each node"),
        (["-g", "2", "--", "python3", "-m", "torch.distributed.run", "x.py"], "runs torch.distributed.run of its own"),
        (["--ranks", "2", "--", "python", "mpi.py"], "mpi.py imports mpi4py, and no MPI starts ranks here"),
        (["--", "srun", "python", "x.py"], "srun is Slurm's, and is on no node as a rule"),
        (["--", "bash", "-c", "cd x && srun python x.py"], "srun is Slurm's"),
        (["--", "bash", "calls.sh"], "srun is Slurm's"),
        (["--", "python", "srun.py"], ""),
        (["--", "echo", "no srun here"], ""),
        (["--ranks", "1", "--", "mpirun", "-np", "4", "x"], ""),
        (["-g", "2", "--per-node", "--", "torchrun", "x.py"], ""),
        (["--ranks", "2", "--", "python", "other.py"], ""),
        (["-q", "--ranks", "2", "--", "mpirun", "x"], ""),
    ],
)
def test_a_launcher_that_each_rank_would_start_is_told_of(submitted, tmp_path, words, told):
    (tmp_path / "work" / "mpi.py").write_text("import os\nfrom mpi4py import MPI\n")
    (tmp_path / "work" / "calls.sh").write_text("set -e\n  exec srun --mpi=none python x.py\n")
    (tmp_path / "work" / "other.py").write_text("# import mpi4py\n")
    err = submitted("submit", "--no-sync", *words)[1]
    assert told in err if told else err == ""


def test_slurms_variables_are_asked_for_by_an_option_or_a_job_file(submitted, swarm, tmp_path):
    assert submitted("submit", "--no-sync", "--slurm-env", "--", "x")[0]["slurm_env"] is True
    (tmp_path / "work" / "job.toml").write_text('command = "x"\nslurm_env = true\nsync = false\n')
    assert submitted("submit", "job.toml")[0]["slurm_env"] is True
    assert "slurm_env" not in submitted("submit", "--no-sync", "--", "x")[0]
    assert swarm("submit", "--no-sync", "--slurm-env", "--elastic", "--", "x")[0] == 2
