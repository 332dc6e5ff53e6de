"""The sampler child: `python -m swarm_agent.telemetry.sampler`.

It speaks JSON lines.  On stdin, one request a round: `{"round": 7, "skip": [], "last": ["GPU-..."]}` (`skip`: GPUs
to leave alone because a call on them hung; `last`: those to try again, after all others).  On stdout, as they come:
`hello` after each initialisation, one `gpu` per device, `xid` events, and `{"kind": "round", "round": 7}` when the
round is complete; or `absent` / `failed` with a sentence, after which it exits.  End of stdin is the request to stop:
it finishes the call it is in, shuts NVML down and exits 0.  Only pynvml and the standard library are imported, to
stay below 25 MB.
"""

import json
import os
import sys
from typing import Any

from swarm_agent.telemetry.nvml import NvmlSession, Unavailable

NICENESS = 5


def main() -> int:
    """Answer requests until stdin ends."""
    os.nice(NICENESS)
    session = NvmlSession()
    try:
        _emit(session.open())
        for line in sys.stdin.buffer:
            request = json.loads(line)
            for message in session.round(frozenset(request["skip"]), frozenset(request["last"])):
                _emit(message)
            _emit({"kind": "round", "round": request["round"]})
    except Unavailable as error:
        _emit({"kind": "absent" if error.is_absent else "failed", "sentence": str(error)})
    except BrokenPipeError:
        sys.stdout = None  # the agent has gone; nobody is left to read what the interpreter would flush
    finally:
        session.close()
    return 0


def _emit(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
