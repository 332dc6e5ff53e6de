"""The program behind a command: what the kind of a job without a name rests on."""

import random

import pytest

from swarmsched.program import PROGRAM_LENGTH, levels, program_of


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py", "train.py"),
        ("python3.11 -u -O ./train.py --lr 0.1", "train.py"),
        ("python -m pkg.train", "pkg.train"),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "train.py"),
        ("python -m torch.distributed.run -m pkg.train", "pkg.train"),
        ("torchrun --nproc_per_node 4 --rdzv_backend c10d train.py", "train.py"),
        ("torchrun --nnodes=2 -m pkg.train", "pkg.train"),
        ("accelerate launch --config_file cfg.yaml train.py", "train.py"),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "train.py"),
        ("env A=1 B=2 python train.py", "train.py"),
        ("CUDA_VISIBLE_DEVICES=0 OMP=1 python train.py", "train.py"),
        ("nice -n 10 stdbuf -oL timeout 5m python train.py", "train.py"),
        ("srun -c 4 -m cyclic python train.py", "train.py"),
        ("taskset -c 0-3 python train.py", "train.py"),
        ("conda run -n env python train.py", "train.py"),
        ("uv run train.py", "train.py"),
        ("bash -e x.sh 3 4", "x.sh"),
        ("./a/../x.sh", "x.sh"),
        ("my-train --fast", "my-train"),
    ],
)
def test_interpreters_and_launchers_are_looked_through(command: str, script: str) -> None:
    assert levels(program_of(tuple(command.split())))[-1] == script


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("cd /x && python train.py --lr 1 > log.txt 2>&1", "train.py"),
        ("export A=1; set -e\nexec torchrun train.py | tee log", "train.py"),
        ("for i in 1 2; do python train.py $i; done", "train.py"),
        ("bash -c 'bash -lc \"python train.py\"'", "train.py"),
    ],
)
def test_a_line_for_a_shell_is_read(line: str, script: str) -> None:
    assert levels(program_of(("bash", "-lc", line)))[-1] == script


def test_numbers_make_no_other_program_and_words_do() -> None:
    def of(*words: str) -> str:
        return program_of(("python", "train.py", *words), "f" * 64)

    assert of("--lr", "1e-3", "--seed=5", "7") == of("--lr", "3e-4", "--seed=12", "-8.5")
    assert of("--model", "bert") != of("--model", "gpt")
    assert levels(of("--model", "bert"))[-1] == levels(of("--model", "gpt"))[-1] == "train.py"
    assert levels(of())[-1] == "train.py"
    assert (
        program_of(("python", "-c", "f(1)"))
        == program_of(("python", "-c", "f(22)"))
        != program_of(("python", "-c", "g(1)"))
    )


def test_an_edit_of_the_shipped_folder_is_another_program_with_the_same_path() -> None:
    before, after = (program_of(("python", "train.py", "--model", "bert"), tree * 64) for tree in "ab")
    assert before != after
    assert before.rpartition("@")[0] == after.rpartition("@")[0]
    assert levels(before)[1:] == levels(after)[1:]


def test_what_is_not_shipped_is_known_by_where_it_lies() -> None:
    at = [program_of(("python", "train.py"), "", workdir) for workdir in ("/data/a", "/data/b", "/data/a/")]
    assert at[0] == at[2] != at[1]
    assert program_of(("python", "/opt/train.py"), "", "/data/a") == program_of(
        ("python", "/opt/train.py"), "", "/data/b"
    )


def test_long_and_odd_paths_are_cut_and_stay_apart() -> None:
    long = [program_of(("python", f"/home/ada/project-{each}/src/train.py"), "c" * 64) for each in ("one", "two")]
    assert long[0] != long[1]
    assert all("train.py~" in each for each in long)
    odd = program_of(("python", "a@b#c~\x00é\ud800.py"), "c" * 64)
    assert odd.isascii()
    assert odd.count("@") == 1
    assert "#" not in levels(odd)[-1]


def test_whatever_is_typed_has_a_name_within_its_bounds() -> None:
    """Drawn from a seed, of what nobody would type."""
    rng = random.Random(3)
    parts = ["@", "#", "~", "/", "-", "--", "..", "'", "(", ")", ";", "&&", "x.py", "A=1", "-m", "-c", "-lc", "python"]
    parts += ["bash", "env", "torchrun", "run"]
    parts += ["", " ", '"', "$(", "\x00", "\ud800", "é" * 50, "9" * 400, "a" * 5_000]
    for _ in range(3_000):
        words = tuple("".join(rng.choices(parts, k=rng.randrange(4))) for _ in range(rng.randrange(7)))
        name = program_of(words, rng.choice(("", "ab" * 32)), rng.choice(("", "/x", "\x00")))
        assert len(name) <= PROGRAM_LENGTH
        assert len(set(levels(name))) == len(levels(name)) <= 3
        name.encode()
