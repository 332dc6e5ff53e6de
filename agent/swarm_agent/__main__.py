"""The command `swarm-agent`: read the configuration, run one agent until SIGTERM or SIGINT.

Exit codes: 0 after a signal, 1 when the agent cannot start (port in use, damaged database), 2 for an option, a
configuration, a key or a token that cannot be used.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

try:
    import uvloop

    from swarm_agent.config import AgentConfig, flags, load_config, settings_help
    from swarm_agent.faults import Faults
    from swarm_agent.footprint import give_back_memory
    from swarm_agent.installed import software_version
    from swarm_agent.journal import set_up_logging
    from swarm_agent.notify import feed_watchdog, notify
    from swarm_agent.security import check_job_user, check_secret_files, generate_key, read_key, read_tokens
    from swarmsched.api import nearest
    from swarmsched.errors import ConfigError, StorageError, SwarmError
except ModuleNotFoundError as missing:
    if str(missing.name).startswith("swarm"):
        raise
    sys.exit(f"swarm-agent needs the package {missing.name}, which is not installed: pip install 'swarmsched[agent]'")

EXIT_CANNOT_START = 1
EXIT_USAGE = 2
SWITCH_INTERVAL_S = 0.0005
"""After each call of SQLite the writer's thread waits for so long until a busy loop lets it go on.  Five milliseconds,
the default, several times over, made commits four times as slow as their disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    if options.generate_key:
        print(generate_key())  # noqa: T201  # the requested output
        return 0
    try:
        if options.check_config or options.check_key or options.check_token:
            _check(options)
            print("ok")  # noqa: T201  # the requested output
            return 0
        given = {key: value for key, _ in settings_help() if (value := getattr(options, key)) is not None}
        config, file = load_config(given, os.environ, Path(options.config) if options.config else None)
        check_secret_files(config)
        check_job_user(config)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    set_up_logging(config.log_format, config.log_level, config.name)
    logging.getLogger("swarm.agent").info("configuration file=%s", file or "(none, defaults)")
    os.umask(0o077)
    _allow_many_files()
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config))
    except (ConfigError, StorageError) as error:
        return _fail(error, EXIT_CANNOT_START)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Hold the named files to all rules; raises `ConfigError`.

    The environment is left out on purpose: a configuration is judged as the service will read it.
    """
    if options.check_config:
        config, _ = load_config({}, {}, Path(options.check_config))
        check_secret_files(config)
        check_job_user(config)
    if options.check_key:
        read_key(Path(options.check_key), "cluster_key_file")
    if options.check_token:
        read_tokens(Path(options.check_token))


async def _serve(config: AgentConfig) -> None:
    from swarm_agent.startup import running_agent  # noqa: PLC0415  # keeps --check-config and --help quick

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    feeding: asyncio.Task[None] | None = None
    faults = Faults()
    while not stopped.is_set():
        async with running_agent(config, faults) as agent:
            give_back_memory()
            notify("READY=1")
            feeding = feeding or asyncio.create_task(feed_watchdog())
            await _any_of(stopped, agent.driver.failed)
            if stopped.is_set():
                notify("STOPPING=1")
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), faults.pause_s)
    if feeding is not None:
        feeding.cancel()


async def _any_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()


def _allow_many_files() -> None:
    """As many open files as root allows: idle connections of strangers must not use up what a shell gives."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    parser.add_argument("--check-key", metavar="FILE", help="check a file that holds a key and exit: 0 ok, 2 not")
    parser.add_argument("--check-token", metavar="FILE", help="check a file that holds a token and exit: 0 ok, 2 not")
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
