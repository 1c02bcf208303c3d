"""Engine states: every legal move works, every other one is refused and names both states."""

from __future__ import annotations

import asyncio

import pytest
from vime_rollout import EngineState
from vime_rollout.engine.state import StateMachine
from vime_rollout.errors import EngineDeadError, EngineStateError, EngineTornError

S = EngineState
PATHS = {
    S.NEW: [],
    S.STARTING: [S.STARTING],
    S.READY: [S.STARTING, S.READY],
    S.PAUSED: [S.STARTING, S.READY, S.PAUSED],
    S.UPDATING: [S.STARTING, S.READY, S.UPDATING],
    S.ASLEEP: [S.STARTING, S.READY, S.ASLEEP],
    S.TORN: [S.STARTING, S.READY, S.TORN],
    S.DEAD: [S.STARTING, S.DEAD],
    S.STOPPED: [S.STOPPED],
}
LEGAL = {
    S.NEW: {S.STARTING, S.TORN, S.DEAD, S.STOPPED},
    S.STARTING: {S.READY, S.TORN, S.DEAD, S.STOPPED},
    S.READY: {S.PAUSED, S.UPDATING, S.ASLEEP, S.TORN, S.DEAD, S.STOPPED},
    S.PAUSED: {S.READY, S.UPDATING, S.TORN, S.DEAD, S.STOPPED},
    S.UPDATING: {S.READY, S.ASLEEP, S.TORN, S.DEAD, S.STOPPED},
    S.ASLEEP: {S.READY, S.UPDATING, S.TORN, S.DEAD, S.STOPPED},
    S.TORN: {S.UPDATING, S.TORN, S.DEAD, S.STOPPED},
    S.DEAD: {S.STOPPED},
    S.STOPPED: {S.STOPPED},
}


def machine_in(state):
    machine = StateMachine("e")
    for step in PATHS[state]:
        machine.move(step, "because")
    assert machine.state is state
    return machine


@pytest.mark.parametrize("to", S)
@pytest.mark.parametrize("state", S)
def test_moves(state, to):
    machine = machine_in(state)
    if to in LEGAL[state]:
        machine.move(to)
        assert machine.state is (S.DEAD if state is S.DEAD else to)
        return
    with pytest.raises(EngineDeadError if state is S.DEAD else EngineStateError) as caught:
        machine.move(to)
    assert machine.state is state
    if state is not S.DEAD:
        assert caught.value.seen == f"{state} -> {to}"


async def test_waiting_goes_through_passing_states_and_ends_with_the_reason():
    machine = machine_in(S.PAUSED)
    waiter = asyncio.create_task(machine.until_ready())
    await asyncio.sleep(0)
    machine.move(S.UPDATING)
    await asyncio.sleep(0)
    assert not waiter.done()
    machine.move(S.READY)
    await asyncio.wait_for(waiter, 1)
    machine.move(S.PAUSED)
    waiter = asyncio.create_task(machine.until_ready())
    await asyncio.sleep(0)
    machine.move(S.DEAD, "exit code 3")
    with pytest.raises(EngineDeadError, match="exit code 3"):
        await asyncio.wait_for(waiter, 1)


@pytest.mark.parametrize(
    ("state", "error"), [(S.NEW, EngineStateError), (S.ASLEEP, EngineStateError), (S.TORN, EngineTornError)]
)
async def test_states_that_do_not_pass_refuse_at_once(state, error):
    with pytest.raises(error):
        await machine_in(state).until_ready()


def test_actions_need_their_state():
    with pytest.raises(EngineStateError, match="cannot wake") as caught:
        machine_in(S.READY).require(S.ASLEEP, "wake")
    assert (caught.value.seen, caught.value.expected) == ("ready", "asleep")
    with pytest.raises(EngineDeadError):
        machine_in(S.DEAD).require(S.ASLEEP, "wake")
