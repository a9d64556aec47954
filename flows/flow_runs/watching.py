"""A thread beside a flow: it hears what Prefect wants of the flow run, and says that the flow run is alive.

         every 3 s: state? ──────────────► order: go on, pause, cancel
flow run ◄── "Running" ── called crashed, and is not
         ── every minute: event ─────────► automation: no event for 3 minutes, no end ──► Crashed
                                           (flows.flow_runs.automations)
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.states import Running

from flows.flow_runs.automations import ALIVE, ENDED
from flows.run.host import HostOrder

ASK_EVERY_S = 3.0
ALIVE_EVERY_S = 60.0
_JOIN_S = 5.0
_ORDERS = {
    StateType.PAUSED: HostOrder.PAUSE,
    StateType.CANCELLING: HostOrder.CANCEL,
    # Set by somebody while this process is alive: it ends, so that the state becomes true.
    StateType.CANCELLED: HostOrder.CANCEL,
    StateType.FAILED: HostOrder.CANCEL,
    StateType.COMPLETED: HostOrder.CANCEL,
}


class FlowRunWatch:
    """Watches this process's flow run while the block lasts. A server that is away ends nothing."""

    def __init__(self, flow_run: FlowRun, flow: str) -> None:
        self.flow_run = flow_run
        self._flow = flow
        self._state: State | None = None
        self._shown_as: tuple[str, list[str]] | None = None
        self._alive_at = 0.0  # when to say the next time that it is alive
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._watch,), name="flow run", daemon=True
        )

    def __enter__(self) -> FlowRunWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(_JOIN_S)
        with suppress(Exception):
            self._tell(ENDED)  # behind the last sign of life, in whichever order states become known

    @property
    def order(self) -> HostOrder:
        """The order that follows from the flow run's newest state."""
        state = self._state
        return _ORDERS.get(state.type, HostOrder.GO_ON) if state is not None else HostOrder.GO_ON

    @property
    def suspended(self) -> bool:
        """Whether the flow run was suspended: another process goes on with it, as soon as it is resumed."""
        state = self._state
        return state is not None and state.is_paused() and bool(state.state_details.pause_reschedule)

    @property
    def state(self) -> State | None:
        """The newest state of the flow run; None until the server has answered."""
        return self._state

    def show_as(self, name: str, tags: Iterable[str]) -> None:
        """Have the flow run named and tagged, as soon as the server answers. Its other tags stay."""
        self._shown_as = name, sorted({*self.flow_run.tags, *tags})

    def _watch(self) -> None:
        while True:
            # The server may be busy or away, or answer what can't be read: it is asked again.
            with suppress(Exception), get_client(sync_client=True) as client:
                self._watch_by(client)
            if self._closed.wait(ASK_EVERY_S):
                return

    def _watch_by(self, client: SyncPrefectClient) -> None:
        while True:
            if time.monotonic() >= self._alive_at:
                self._alive_at = time.monotonic() + ALIVE_EVERY_S
                self._tell(ALIVE)
            self._show(client)
            if self._closed.is_set():  # only now: a flow run that fails at once has its name, too
                return
            self._ask(client)
            self._closed.wait(ASK_EVERY_S)

    def _show(self, client: SyncPrefectClient) -> None:
        if self._shown_as is not None:
            name, tags = self._shown_as
            client.update_flow_run(self.flow_run.id, name=name, tags=tags)
            self._shown_as = None

    def _ask(self, client: SyncPrefectClient) -> None:
        if self.suspended:
            return  # from now on the flow run may be that of another process
        state = client.read_flow_run(self.flow_run.id).state
        if state is not None and state.is_crashed() and not self._closed.is_set():
            said = "This flow run was called crashed, but it is alive."
            state = client.set_flow_run_state(self.flow_run.id, Running(message=said)).state
        self._state = state

    def _tell(self, event: str) -> None:
        emit_event(
            event,
            resource=_resource("flow-run", self.flow_run.id, self.flow_run.name),
            related=[
                {**_resource("flow", self.flow_run.flow_id, self._flow), "prefect.resource.role": "flow"}
            ],
        )


def _resource(kind: str, number: UUID, name: str) -> dict[str, str]:
    return {"prefect.resource.id": f"prefect.{kind}.{number}", "prefect.resource.name": name}


@contextmanager
def watched() -> Iterator[FlowRunWatch]:
    """Watch this flow run while the block lasts. As a decorator it would hide annotations from Prefect."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None and context.flow is not None
    with FlowRunWatch(context.flow_run, context.flow.name) as watch:
        yield watch
