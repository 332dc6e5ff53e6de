"""A process that has imported torch and waits to become a worker: `python -m swarm_elastic.template DESCRIPTOR`.

To import torch takes seconds; what waits here starts its script at once.  The agent keeps such processes beside
workers of elastic jobs.  To the descriptor it writes `r` when all is imported and `s` when the script begins.  From
stdin it reads, once and to the end, strings separated by NUL: the umask, the working directory, the arguments (led by
their number; first a script, `-m` and a module, or `-c` and a text), the environment (the same, `NAME=value`).  If
there is nothing, it ends.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

WANTED = ("torch", "swarm_elastic._elastic", "torch._dynamo", "torch.utils.data")
"""What a worker would import in its first second; optimizers need the third of them."""


def warm_up() -> None:
    """Import; compute nothing and touch no GPU, whose choice the environment makes."""
    for name in WANTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # these objects stay for good, and need not be gone through at the end


def set_environment(env: dict[str, str]) -> None:
    """Make it the whole environment, with what was read of the earlier one at the import of torch."""
    os.environ.clear()
    os.environ.update(env)
    threads = env.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        sys.modules["torch"].set_num_threads(int(threads))


def run(argv: list[str]) -> None:
    """As `python ARGV` in this directory would, in this process."""
    what, is_script = argv[0], not argv[0].startswith("-")
    sys.argv = argv if is_script else [what, *argv[2:]]
    own = str(Path(what).resolve().parent) if is_script else str(Path.cwd()) if what == "-m" else ""
    further = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    sys.path[0:1] = [own, *further]
    if is_script:
        runpy.run_path(what, run_name="__main__")
    elif what == "-m":
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)  # noqa: S102  # the user's own


def _counted(strings: Iterator[str]) -> list[str]:
    return [next(strings) for _ in range(int(next(strings)))]


def main() -> None:
    """See the head of this file."""
    told = int(sys.argv[1])
    os.set_inheritable(told, False)
    warm_up()
    os.write(told, b"r")
    strings = iter(os.fsdecode(sys.stdin.buffer.read()).split("\0"))
    umask, cwd = next(strings), next(strings, "")
    if not umask:
        return
    argv, env = _counted(strings), _counted(strings)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.umask(int(umask))
    os.chdir(cwd)
    set_environment(dict(each.split("=", 1) for each in env))
    if not argv[0].startswith("-"):
        Path(argv[0]).open("rb").close()  # else an ordinary start follows, which tells what is wrong
    os.write(told, b"s")
    os.close(told)
    run(argv)


if __name__ == "__main__":
    main()
