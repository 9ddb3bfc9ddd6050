"""The process that makes the load, on Locust: ``python -m jevany_loadtest.generator``, started by `generator_process`.

It reads plans as lines of JSON and writes events as lines of JSON: ``sample`` for each request, ``done`` at the end of
a plan. A process of its own, because Locust runs on gevent, which changes Python's threads and sockets for all that is
in a process. As Locust's master it makes no load itself: its workers, here or on other machines, do, and send it every
sample, so that percentiles are those of all samples whoever took them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

# Before all that opens sockets: importing Locust makes them gevent's.
import gevent
import locust
from gevent.event import Event
from gevent.fileobject import FileObjectPosix
from gevent.lock import RLock
from gevent.pool import Group
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from jevany_loadtest.arrivals import Stage, poisson
from jevany_loadtest.connection import Connection, Outcome
from jevany_loadtest.samples import DROPPED

_BATCH_SECONDS = 0.5
_WATCH_SECONDS = 1.0


class PanelUser(User):
    """A user that carries out the plan: all of it, once."""

    abstract = True
    wait_time = constant(0)
    generator: Generator

    @task
    def run_plan(self) -> None:
        """Send the plan's requests, then leave."""
        plan = self.generator.plan
        try:
            self.send(plan, self.generator)
        except Exception as error:  # Locust would log it and start again.
            self.generator.emit({"event": "failed", "message": f"{type(error).__name__}: {error}"})
        self.generator.finished()
        raise StopUser

    def send(self, plan: dict[str, Any], generator: Generator) -> None:
        """Send the plan's requests."""
        raise NotImplementedError

    def record(self, outcome: Outcome, **columns: Any) -> None:
        """Hand over one sample, to Locust's statistics as well."""
        self.environment.events.request.fire(
            request_type="infer",
            name=self.generator.plan["model"],
            response_time=outcome.milliseconds,
            response_length=0,
            exception=outcome.error and RuntimeError(outcome.error),
            context={},
        )
        self.generator.emit({"event": "sample", **asdict(outcome), **columns})


class SerialUser(PanelUser):
    """One request at a time, each when the last is answered. Between them it asks for the server's own time."""

    def send(self, plan: dict[str, Any], generator: Generator) -> None:
        """Send the warm-up and then the rows in the plan's order."""
        connection = Connection(plan["url"], plan["model"], plan["timeout"])
        requests = [request.encode() for request in plan["requests"]]
        try:
            for row in plan["warm_up"]:
                self.record(connection.ask(requests[row]), row=row, warm_up=True)
            if plan["warm_up"]:
                generator.emit({"event": "warm"})
                generator.wait_for_go()
            served = connection.served()
            start = time.perf_counter()
            for row in plan["order"]:
                at = time.perf_counter() - start
                outcome = connection.ask(requests[row])
                server, served = (None, served) if outcome.error else connection.server_milliseconds(served)
                self.record(outcome, row=row, at=at, server_milliseconds=server)
        finally:
            connection.close()


class OpenUser(PanelUser):
    """Requests at their scheduled instants, however slow the server is; each is timed from its instant."""

    def send(self, plan: dict[str, Any], generator: Generator) -> None:
        """Send what is due in all stages, and wait for the answers."""
        worker, workers = generator.place
        # Rounded up: the cap is for the sum, and no worker may have none.
        cap = -(-plan["in_flight"] // workers)
        connection = Connection(plan["url"], plan["model"], plan["timeout"], cap)
        requests = [request.encode() for request in plan["requests"]]
        stages = [Stage(**stage) for stage in plan["stages"]]
        pending = Group()
        start = time.perf_counter()

        def one(due: float, row: int, stage: int) -> None:
            begun = time.perf_counter() - start
            outcome = connection.ask(requests[row])
            since_due = (time.perf_counter() - start - due) * 1e3
            self.record(outcome, row=row, stage=stage, at=due, late=(begun - due) * 1e3, since_due=since_due)

        try:
            for arrival in poisson(stages, len(requests), plan["seed"], worker, workers):
                ahead = arrival.seconds - (time.perf_counter() - start)
                # Where it is late already the others still need their turn.
                gevent.sleep(max(ahead, 0))
                if len(pending) >= cap:
                    self.record(Outcome(0.0, DROPPED), row=arrival.row, stage=arrival.stage, at=arrival.seconds)
                else:
                    pending.spawn(one, arrival.seconds, arrival.row, arrival.stage)
            rest = sum(stage.seconds for stage in stages) - (time.perf_counter() - start)
            gevent.sleep(max(rest, 0))
            pending.join()
        finally:
            pending.kill()
            connection.close()


class Generator:
    """What one process makes of plans.

    Args:
        environment: Locust's.
        out: Whether events go to standard output; a worker sends them to its master.
    """

    def __init__(self, environment: Environment, *, out: bool) -> None:
        self.environment = environment
        self.runner: Any = environment.runner
        self.plan: dict[str, Any] = {}
        self.place = (0, 1)
        self._out = out
        self._batch: list[dict[str, Any]] = []
        self._written = 0.0
        self._writing = RLock()
        self._done = Event()
        self._go = Event()
        self._missing = 0

    def emit(self, event: dict[str, Any]) -> None:
        """Hand over an event; samples wait for a moment, as whoever takes them would run beside the next request."""
        self._batch.append(event)
        if self._out and (event["event"] != "sample" or time.monotonic() - self._written > _BATCH_SECONDS):
            with self._writing:
                events, self._batch = self._batch, []
                self._written = time.monotonic()
                print("\n".join(map(json.dumps, events)), flush=True)

    def finished(self) -> None:
        """Say that the plan's user has sent all."""
        if self._out:
            self._done.set()
        else:
            self._send_batch(finished=True)

    def wait_for_go(self) -> None:
        """Wait until standard input says to go on: after the warm-up, when the counters have been read."""
        self._go.wait()

    def run(self, plan: dict[str, Any]) -> None:
        """Carry out one plan with one user on each worker, or here."""
        self.plan = plan
        self._done.clear()
        self._go.clear()
        users = 1
        if isinstance(self.runner, MasterRunner):
            workers = sorted(client.id for client in self.runner.clients.ready)
            users = self._missing = len(workers)
            for number, client in enumerate(workers):
                self.runner.send_message("plan", {"plan": plan, "place": [number, users]}, client_id=client)
        self.runner.start(users, spawn_rate=users)
        while not self._done.wait(_WATCH_SECONDS):
            if isinstance(self.runner, MasterRunner) and self.runner.worker_count < users:
                self.emit({"event": "failed", "message": "a worker has gone"})
        self.runner.stop()
        self.emit({"event": "done"})

    def read_plans(self) -> None:
        """Carry out the plans of standard input, until it ends."""
        lines = FileObjectPosix(sys.stdin.fileno(), "rb", closefd=False)
        running: gevent.Greenlet | None = None
        for line in lines:
            message = json.loads(line)
            if message.get("go"):
                self._go.set()
            else:
                running = gevent.spawn(self.run, message)
        if running is not None:
            running.kill()

    def on_plan(self, environment: Environment, msg: Any, **_: Any) -> None:
        """A worker: take the master's plan."""
        self.plan, self.place = msg.data["plan"], tuple(msg.data["place"])
        self._done.clear()

    def on_samples(self, environment: Environment, msg: Any, **_: Any) -> None:
        """The master: pass on a worker's samples."""
        for event in msg.data["events"]:
            self.emit(event)
        if msg.data["finished"]:
            self._missing -= 1
            if self._missing == 0:
                self._done.set()

    def send_batches(self) -> None:
        """A worker: send its samples to the master now and then."""
        while True:
            gevent.sleep(_BATCH_SECONDS)
            if self._batch:
                self._send_batch(finished=False)

    def _send_batch(self, *, finished: bool) -> None:
        events, self._batch = self._batch, []
        self.runner.send_message("samples", {"events": events, "finished": finished})


def main() -> int:
    """Run a generator; it ends with its standard input, or as a worker with its master."""
    options = _parser().parse_args()
    if options.users == "open":
        # Calls of many greenlets at a time. One user alone waits in gRPC itself, which is a little faster.
        from grpc.experimental.gevent import init_gevent

        init_gevent()
    kind = {"serial": SerialUser, "open": OpenUser}[options.users]
    user = type("Caller", (kind,), {"abstract": False})
    environment = Environment(user_classes=[user], events=locust.events)
    runner: Any
    if options.master_host:
        runner = environment.create_worker_runner(options.master_host, options.master_port)
    elif options.workers:
        runner = environment.create_master_runner("*", options.master_port)
    else:
        runner = environment.create_local_runner()
    generator = Generator(environment, out=not options.master_host)
    PanelUser.generator = generator
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        if isinstance(runner, WorkerRunner):
            runner.register_message("plan", generator.on_plan)
            gevent.spawn(generator.send_batches)
            runner.greenlet.join()
        else:
            if isinstance(runner, MasterRunner):
                runner.register_message("samples", generator.on_samples)
                while len(runner.clients.ready) < options.workers:
                    gevent.sleep(0.05)
            generator.emit({"event": "ready"})
            generator.read_plans()
    finally:
        runner.quit()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jevany_loadtest.generator", description=__doc__.splitlines()[0])
    parser.add_argument("users", choices=("serial", "open"), help="one user in a closed loop, or scheduled arrivals")
    parser.add_argument("--workers", type=int, default=0, help="be Locust's master, of so many workers")
    parser.add_argument("--master-host", help="be a worker of the master there")
    parser.add_argument("--master-port", type=int, default=5557, help="the master's port (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
