"""Makes the specification of a job from options, variables, job file and configuration.

The keys are those of the table of fields, which the agent checks by `swarmsched.api.JobSpec`.  Importing that class
here would cost more than the rest of `swarm run` together: only what has to be understood on this side is checked.
"""

# Importing pathlib costs a tenth of what `swarm ps` may take.
# ruff: noqa: PTH110, PTH111, PTH118, PTH113, PTH123

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from swarm_client import job_key
from swarm_client.config import Config, job_table, read_toml
from swarm_client.failure import UsageError
from swarm_client.options import Arguments, nearest
from swarm_client.quantity import show_bytes, show_count
from swarmsched.specification import BY_GPU, ENVIRONMENT_BYTES_LIMIT, FIELDS, GROUP_KEYS


class JobRequest:
    """What to submit: the specification, and what is to be done with the working directory first."""

    def __init__(
        self, spec: dict[str, Any], folder: str, sync: bool | None, requirements: str, include: Sequence[str] = ()
    ) -> None:
        self.spec = spec
        self.folder = folder  # absolute path of the folder to run in
        self.sync = sync  # None: as the folder suggests
        self.requirements = requirements  # file to be shipped, or empty
        self.has_size = False  # how many GPUs or ranks it takes was said
        self.include = tuple(include)  # patterns of what is shipped although git ignores it


def merged_values(arguments: Arguments, config: Config, cwd: str) -> dict[str, Any]:
    """Every key by precedence: option, SWARM_RUN_* variable, job file, then project, user and system files."""
    from_variables = {k: v for k, v in config.job.items() if config.job_origins.get(k, "").startswith("SWARM_RUN_")}
    from_files = {k: v for k, v in config.job.items() if k not in from_variables}
    from_job_file = read_job_file(os.path.join(cwd, arguments["file"])) if arguments["file"] else {}
    if arguments["script"]:
        from_job_file = arguments["script"].values
        arguments.run([])
    from_options = {name: arguments[name] for name in job_key.NAMES if arguments[name] is not None}
    for key, value in (arguments["gres"] or {}).items():
        if from_options.setdefault(key, value) != value:
            remedy = "leave one of them out"
            raise UsageError(f"{arguments.spellings[key]} and --gres do not say the same", remedy)
    if "env" in from_options:
        from_options["env"] = dict(_variable(text) for text in from_options["env"])
    layers = [from_files, from_job_file, from_variables, from_options]
    values: dict[str, Any] = {}
    for layer in layers:
        values |= _without_other_shape(values, layer)
    values["env"] = {name: text for layer in layers for name, text in layer.get("env", {}).items()}
    last = {**from_variables.get("env", {}), **from_options.get("env", {})}  # wins against a group's own as well
    for group in values.get("groups", ()):
        group["env"] = {**values["env"], **group.get("env", {}), **last}
    values["env"] = {**values["env"], **values.pop("first_env", {}), **last}
    return values


def _without_other_shape(values: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A stronger source that says how many GPUs or ranks replaces the weaker one's whole shape."""
    shape = ("gpus", "ranks", "gpus_per_rank")
    if any(key in layer for key in shape):
        for key in shape:
            values.pop(key, None)
    return dict(layer)


def build(arguments: Arguments, config: Config, cwd: str) -> JobRequest:
    """Check and combine; raises `UsageError` before anything is sent."""
    values = merged_values(arguments, config, cwd)
    command = arguments.command or values.get("command")
    if not command:
        raise UsageError("no command was given", "write it after `--`: swarm run -g 2 -- python train.py")
    least, _, most = str(values.get("gpus", "")).partition(":")
    ranks, gpus_per_rank = _shape(values | {"gpus": int(least)} if most else values)
    _refuse_contradictions(values)
    folder = os.path.normpath(os.path.join(cwd, os.path.expanduser(values.get("workdir", "."))))
    if arguments["script"] and folder != cwd:
        script = arguments.positionals[0]
        there = os.path.relpath(os.path.join(cwd, script), folder)
        command = [there if word == script else word for word in command]
    spec: dict[str, Any] = {
        "command": list(command),
        "name": values.get("name", ""),
        "user": caller(config.environment),
        "ranks": ranks,
        "gpus_per_rank": gpus_per_rank,
        "env": _environment(values, config.environment, cwd),
        "umask": _umask(),
    }
    if most:
        spec["ranks_most"] = _shape(values | {"gpus": int(most)})[0]
        if values.get("outer") and not values.get("per_node"):
            spec["elastic"] = True  # learners come and go while they train
    spec |= _batches(values)
    for row in FIELDS:
        is_file_here = row.kind in ("path", "digest")  # who ships it says where it is there
        if row.option and row.by in values and row.key not in spec and not is_file_here:
            spec[row.key] = _names(values[row.by]) if row.kind in ("nodes", "labels") else values[row.by]
    if values.get("group"):
        spec |= {"group": values["group"], "groups": [_group(each, values, config, cwd) for each in values["groups"]]}
    if values.get("venv"):
        spec["venv"] = os.path.normpath(os.path.join(cwd, os.path.expanduser(values["venv"])))
    requirements = values.get("requirements", "")
    if requirements:
        requirements = os.path.join(cwd, requirements)
        if not os.path.isfile(requirements):
            raise UsageError(f"requirements file {requirements} does not exist", "give the path of an existing file")
    refuse_unreadable(spec)
    request = JobRequest(spec, folder, values.get("sync"), requirements, values.get("include", ()))
    request.has_size = not {"gpus", "ranks", "gpus_per_rank"}.isdisjoint(values)
    return request


def _group(group: Mapping[str, Any], values: Mapping[str, Any], config: Config, cwd: str) -> dict[str, Any]:
    """A group beside the first, as an agent takes it; what it does not set is not taken from the first one."""
    ranks, gpus_per_rank = _shape(group)
    found = {"name": group["name"], "command": list(group["command"]), "ranks": ranks, "gpus_per_rank": gpus_per_rank}
    found["env"] = _environment({**group, "env_file": values.get("env_file")}, config.environment, cwd)
    for row in FIELDS:
        if row.key in GROUP_KEYS and row.option and row.by in group and row.key not in found:
            found[row.key] = _names(group[row.by]) if row.kind == "labels" else group[row.by]
    return found


def _batches(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of global and local batches; of the latter a single number is the most."""
    ranges = {key: str(values.get(key, "")) for key in ("batch", "local_batch")}
    ranges["local_batch"], by_gpu = job_key.local_limits(ranges["local_batch"])
    found: dict[str, Any] = {BY_GPU: by_gpu} if by_gpu else {}
    for key, text in ranges.items():
        names = [row.key for row in FIELDS if row.by == key and row.kind == "whole"]  # the least or first, the most
        parts = [int(part) for part in text.split(":") if part]
        found |= dict(zip(names[-1:] if len(parts) == 1 and key == "local_batch" else names, parts, strict=False))
    return found


def _names(texts: Sequence[str]) -> list[str]:
    """Names out of texts with commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    if values.get("elastic") and values.get("per_node"):
        remedy = "leave one of them out: of an elastic job each rank is a worker of its own"
        raise UsageError("--elastic and --per-node exclude one another", remedy)
    if values.get("elastic") and values.get("slurm_env"):
        raise UsageError("--elastic and --slurm-env exclude one another", "leave one of them out: ranks change there")
    if values.get("include") and values.get("sync") is False:
        remedy = "leave one of them out: without shipping the job runs in the same folder of the nodes"
        raise UsageError("--include and --no-sync exclude one another", remedy)
    if values.get("requirements") and values.get("venv"):
        raise UsageError("--venv and --requirements exclude one another", "add what is missing to one of the two")


def refuse_unreadable(spec: Mapping[str, Any]) -> None:
    """Python takes bytes of arguments and paths that are not UTF-8 for lone surrogates, which no agent can store."""
    for key, value in spec.items():
        texts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for text in texts:
            try:
                str(text).encode()
            except UnicodeEncodeError:
                remedy = "rename it, or write it in UTF-8"
                raise UsageError(f"{key}: {text!r} is not UTF-8", remedy) from None


def _shape(values: Mapping[str, Any]) -> tuple[int, int]:
    """(ranks, GPUs of each) of `--gpus`, `--ranks` and `--gpus-per-rank`, any two of which may be given."""
    gpus, ranks, per_rank = values.get("gpus"), values.get("ranks"), values.get("gpus_per_rank")
    if gpus is None:
        return ranks or 1, per_rank or 0
    if gpus == 0:
        if per_rank:
            raise UsageError(f"--gpus 0 and --gpus-per-rank {per_rank} contradict each other", "leave one of them out")
        return ranks or 1, 0
    if ranks is not None:
        if gpus % ranks or (per_rank is not None and ranks * per_rank != gpus):
            raise UsageError(
                f"{show_count(gpus, 'GPU')} cannot be shared by {show_count(ranks, 'rank')}"
                + (f" of {per_rank}" if per_rank is not None else ""),
                "--gpus is the number in all; use --ranks with --gpus-per-rank instead",
            )
        return ranks, gpus // ranks
    if per_rank is not None and (per_rank == 0 or gpus % per_rank):
        remedy = "--gpus, and both ends of its range, must be multiples of --gpus-per-rank"
        raise UsageError(f"{show_count(gpus, 'GPU')} cannot be split into ranks of {per_rank}", remedy)
    return gpus // (per_rank or 1), per_rank or 1


def caller(environment: Mapping[str, str]) -> str:
    """Name of the user who runs the command."""
    name = environment.get("LOGNAME") or environment.get("USER")
    if name:
        return name[:63]
    import pwd  # only where the login left no name

    try:
        return pwd.getpwuid(os.getuid()).pw_name[:63]
    except KeyError:
        return str(os.getuid())


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _environment(values: Mapping[str, Any], mine: Mapping[str, str], cwd: str) -> dict[str, str]:
    result: dict[str, str | None] = {}
    if values.get("env_file"):
        result |= read_env_file(os.path.join(cwd, values["env_file"]))
    result |= values["env"]
    missing = [name for name, text in result.items() if text is None and name not in mine]
    if missing:
        raise UsageError(f"-e {missing[0]}: there is no such variable to copy", f"write -e {missing[0]}=VALUE")
    found = {name: mine[name] if text is None else text for name, text in result.items()}
    count = sum(
        len(name.encode(errors="replace")) + len(text.encode(errors="replace")) + 2 for name, text in found.items()
    )
    if count > ENVIRONMENT_BYTES_LIMIT:
        largest = max(found, key=lambda name: len(found[name]))
        problem = f"--env and --env-file have {show_bytes(count)}, more than {show_bytes(ENVIRONMENT_BYTES_LIMIT)}"
        remedy = "ship a file of them (.env is never shipped), and read it: bash -c '. ./vars.sh; exec python t.py'"
        raise UsageError(f"{problem} in all; the largest is {largest}", remedy)
    return found


def _variable(text: str) -> tuple[str, str | None]:
    """`K=V`, or `K` alone with None: the caller's own value."""
    name, equals, value = text.partition("=")
    if not name or any(character.isspace() for character in name):
        raise UsageError(f"-e {text!r} is not K=V", "for example -e SEED=1")
    return name, value if equals else None


def read_env_file(file: str) -> dict[str, str]:
    """Lines of K=V; blank lines, comments and a leading `export` are skipped, quotes around a value removed."""
    try:
        with open(file, encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--env-file {file} cannot be read: {error}", "give the path of a text file") from error
    result = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or " " in name.strip():
            raise UsageError(f"{file}:{number}: {text[:40]!r} is not K=V", "write one K=V a line")
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        result[name.strip()] = value
    return result


def read_job_file(file: str) -> dict[str, Any]:
    """The keys of a job file; unknown ones are an error with their line."""
    if not os.path.exists(file):
        raise UsageError(f"job file {file} does not exist", "give the path of a TOML or YAML file")
    if file.endswith((".yaml", ".yml")):
        document, text = _read_yaml(file)
    elif file.endswith(".toml"):
        document, text = read_toml(file)
    else:
        raise UsageError(f"job file {file} is neither TOML nor YAML", "name it job.toml or job.yaml")
    if not isinstance(document, dict) or "group" not in document:
        return job_table(file, text, document, section="")
    return _with_groups(file, text, document)


def _with_groups(file: str, text: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file with `[[group]]` tables: those of the first one are the job's, the others are `groups`."""
    tables = document["group"]
    values = job_table(file, text, {key: value for key, value in document.items() if key != "group"}, section="")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise UsageError(
            f"{file}: group must be a list of tables", "write [[group]] and its keys below it, once for each"
        )
    groups = []
    for number, table in enumerate(tables, 1):
        name = str(table.get("name", ""))
        place = f"{file}: group {number}{f' ({name})' if name else ''}"
        known = job_key.GROUP_NAMES if number > 1 else (*job_key.GROUP_NAMES, *job_key.FIRST_GROUP_NAMES)
        for key in [key for key in table if key not in known]:
            if number > 1 and key in job_key.FIRST_GROUP_NAMES:
                raise UsageError(f"{place}: {key} goes with the first group only", "the others have a fixed size")
            near = nearest(key, known)
            raise UsageError(f"{place}: {key} is no key of a group{near}", f"keys of a group: {', '.join(known)}")
        if not name or not table.get("command"):
            missing = "command" if name else "name"
            raise UsageError(f"{place}: {missing} is missing", "each group has a name and a command of its own")
        groups.append(job_table(file, _of_group(text, number), table, section="group"))
    first, *others = groups
    if twice := [key for key in first if key in values and key not in ("name", "env")]:
        raise UsageError(
            f"{file}: {twice[0]} is set beside the groups and in the first of them", "leave one of them out"
        )
    flat = {key: value for key, value in first.items() if key not in ("name", "env")}
    return values | flat | {"group": first["name"], "first_env": first.get("env", {}), "groups": others}


def _of_group(text: str, number: int) -> str:
    """The text from the head of one `[[group]]` on, with as many lines before it as there are."""
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if line.strip().replace(" ", "") == "[[group]]"]
    begin = heads[number - 1] if len(heads) >= number else 0
    return "\n" * begin + "\n".join(lines[begin:])


def _loader() -> Any:
    """YAML 1.1 without its numbers to the base of 60: there 2:4 is 124."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    for kind in ("int", "float"):
        usual = getattr(yaml.SafeLoader, f"construct_yaml_{kind}")
        construct = partial(_without_base_60, usual)
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", construct)
    return Loader


def _without_base_60(usual: Callable[[Any, Any], object], loader: Any, node: Any) -> object:
    return node.value if ":" in node.value else usual(loader, node)


def _read_yaml(file: str) -> tuple[object, str]:
    import yaml  # only for YAML files: the import costs more than a whole `swarm ps`

    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
        return yaml.load(text, _loader()) or {}, text  # noqa: S506  # a safe one
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", "check its permissions and encoding (UTF-8)") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}", "correct it") from error


def word_list(words: Sequence[str]) -> str:
    """A command as one would type it, for messages."""
    import shlex  # only for messages

    return shlex.join(words)
