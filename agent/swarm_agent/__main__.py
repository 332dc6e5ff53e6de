"""The command `swarm-agent`: read the configuration, run one agent until SIGTERM or SIGINT.

Exit codes: 0 after a signal, 1 when the agent cannot start (port in use, damaged database), 2 for a configuration or
option that cannot be used.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from swarm_agent.config import AgentConfig, flags, load_config, settings_help
from swarm_agent.footprint import give_back_memory, without_trusted_certificates
from swarm_agent.journal import set_up_logging
from swarm_agent.notify import notify
from swarm_agent.security import check_job_user, generate_key, read_key, read_token
from swarm_agent.version import software_version
from swarmsched.api import nearest
from swarmsched.errors import ConfigError, StorageError, SwarmError

EXIT_CANNOT_START = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    if options.generate_key:
        print(generate_key())  # noqa: T201  # the requested output
        return 0
    try:
        if options.check_config:
            check_config(Path(options.check_config))
            print("ok")  # noqa: T201  # the requested output
            return 0
        given = {key: value for key, _ in settings_help() if (value := getattr(options, key)) is not None}
        config, file = load_config(given, os.environ, Path(options.config) if options.config else None)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    set_up_logging(config.log_format, config.log_level, config.name)
    logging.getLogger("swarm.agent").info("configuration file=%s", file or "(none, defaults)")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config))
    except (ConfigError, StorageError) as error:
        return _fail(error, EXIT_CANNOT_START)
    return 0


def check_config(file: Path) -> None:
    """Hold a file, its key files and its account to all rules; raises `ConfigError`.

    The environment is left out on purpose: the file is judged as the service will read it.
    """
    config, _ = load_config({}, {}, file)
    if config.cluster_key_file is not None:
        read_key(config.cluster_key_file, "cluster_key_file")
    for extra in config.keyring_files:
        read_key(extra, "keyring_files")
    if config.token_file is not None:
        read_token(config.token_file)
    check_job_user(config)


async def _serve(config: AgentConfig) -> None:
    with without_trusted_certificates():
        from swarm_agent.startup import running_agent  # noqa: PLC0415  # keeps --check-config and --help quick

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with running_agent(config):
        give_back_memory()
        notify("READY=1")
        await stopped.wait()
        notify("STOPPING=1")


def _fail(error: SwarmError, code: int) -> int:
    remedy = f"\nswarm-agent: {error.remedy}" if error.remedy else ""
    print(f"swarm-agent: {error}{remedy}", file=sys.stderr)  # noqa: T201  # before any log is set up
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """As argparse, but an unknown option is answered with the nearest known one."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [f"--{key.replace('_', '-')}" for key in vars(options)]
        parser.error(f"unknown option {unknown[0]}{nearest(unknown[0].partition('=')[0], known)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swarm-agent",
        description="One agent of a swarm.",
        epilog="Every setting is also a key of the file and an environment variable SWARM_AGENT_NAME_OF_KEY. "
        "Options win over the environment, the environment over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file (default: /etc/swarm/agent.toml)")
    parser.add_argument("--check-config", metavar="FILE", help="check a configuration file and exit: 0 ok, 2 not")
    parser.add_argument("--generate-key", action="store_true", help="print a new key or token and exit")
    parser.add_argument("--version", action="version", version=f"swarm-agent {software_version()}")
    for key, sentence in settings_help():
        option, text = f"--{key.replace('_', '-')}", sentence.replace("%", "%%")
        if key in flags():
            parser.add_argument(option, metavar="true|false", nargs="?", const="true", help=text)
        else:
            parser.add_argument(option, metavar="VALUE", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
