"""What an agent keeps on disk: one SQLite file per node, used by one agent at a time."""

from swarm_agent.storage.lock import DataDirectoryLock
from swarm_agent.storage.store import SCHEMA_VERSION, Store

__all__ = ["SCHEMA_VERSION", "DataDirectoryLock", "Store"]
