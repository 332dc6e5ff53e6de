"""The async SDK and the `swarm` command.

`SwarmClient` and its types are loaded when they are first used, so that the command does not pay for aiohttp.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from swarm_client.sdk import Job, LogRecord, NodeInfo, SwarmClient, SwarmEvent

__version__ = "0.2.0"
__all__ = ["Job", "LogRecord", "NodeInfo", "SwarmClient", "SwarmEvent", "__version__"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from swarm_client import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
