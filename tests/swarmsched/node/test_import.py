"""The core stays light and pure: importing a node brings no heavy library and nothing that acts."""

import subprocess
import sys

import pytest

PROBE = "import sys; import {module}; print([name for name in {unwanted!r} if name in sys.modules])"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("swarmsched.node", ["numpy", "scipy", "aiohttp", "uvloop", "asyncio", "socket", "sqlite3", "subprocess"]),
        ("swarmsched.api", ["msgpack", "cryptography", "numpy", "asyncio"]),
        ("swarmsched.policies.registry", ["numpy", "scipy", "asyncio"]),
        ("swarm_client.cli", ["aiohttp", "msgspec", "yaml", "numpy", "ssl", "asyncio"]),
    ],
)
def test_import_brings_nothing_unwanted(module, unwanted):
    script = PROBE.format(module=module, unwanted=unwanted)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
