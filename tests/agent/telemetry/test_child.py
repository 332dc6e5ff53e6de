"""The life of a sampler child, with one that answers at once."""

import asyncio
import sys

from swarm_agent.telemetry.child import Message, SamplerChild

ANSWERS_AT_ONCE = """
import json, sys
print(json.dumps({"kind": "hello"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"kind": "round", "round": json.loads(line)["round"]}), flush=True)
"""
ROUNDS = 3


async def test_a_child_is_ended_although_it_is_cancelled_just_as_it_answers() -> None:
    loop = asyncio.get_running_loop()
    rounds: list[object] = []

    def on_message(message: Message) -> None:
        if message["kind"] == "round":
            rounds.append(message["round"])
            if len(rounds) == ROUNDS:
                loop.call_soon(life.cancel)

    child = SamplerChild(
        on_message,
        period_s=0.01,
        deadline_s=60.0,
        ask=dict,
        on_hung=lambda: None,
        argv=(sys.executable, "-c", ANSWERS_AT_ONCE),
    )
    life = asyncio.create_task(child.run())
    while len(rounds) <= ROUNDS and not life.done():
        await asyncio.wait({life}, timeout=0.01)
    assert rounds == [1, 2, 3]
    assert life.cancelled()
