"""`umbel site`: Flower's SuperNode in this process, with an executor that starts no process for a message.

    python -m client_app.resident.site --insecure --superlink HOST:PORT --node-config '...'

takes the arguments of `flower-supernode`. The stock SuperNode looks for messages every 3 s and for its app's reply
every 0.5 s, and its SuperExec starts an interpreter for every message. Here the SuperNode runs with

    wait(idle) = clamp(idle / 50, 0.1 s, 3 s)        idle = seconds since the last message
    wait for a reply 0.02 s, first back-off for an object that is not there yet 0.05 s

and a thread acquires its tasks and hands them to the site's resident worker, which runs the bundle's code. Only
names in this process's copy of one Flower module are replaced; nothing that is installed is touched.

This is the only module that uses Flower's internals. `problem` compares what it needs with the Flower that is
installed; at any difference, or with options it does not serve, there is one warning and the stock SuperNode runs
instead: same results, slower; with a site policy (`umbel.policy`) it does not start then. Node config:
`allowed-bundles`, comma separated starts of bundle hashes; empty: any.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PINNED = "1.42."
EXIT_CONFIG = 78
STOCK = "flower-supernode"
# Module -> name -> the parameters that are used; () for names whose signature does not matter here.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "flwr.supernode.cli.flower_supernode": {"flower_supernode": ()},
    "flwr.supernode.start_client_internal": {
        "time": (),
        "pull_objects": ("initial_backoff",),
        "_pull_and_store_message": ("state", "receive"),
        "_push_messages": ("state", "object_store", "send", "push_object"),
    },
    "flwr.supernode.runtime.run_clientapp": {
        "pull_task_input": ("client",),
        "push_message": ("client", "message", "context"),
        "push_task_output": ("client", "context", "sub_status", "details"),
        "install_from_fab": ("fab_file", "skip_prompt"),
    },
    "flwr.supercore.runtime": {"RuntimeHttpClient": ()},
    "flwr.supercore.interceptors": {
        "RuntimeTokenHttpInterceptor": ("token",),
        "RuntimeVersionHttpInterceptor": ("component_name",),
    },
    "flwr.supercore.retry": {"make_simple_http_retry_invoker": ()},
    "flwr.supercore.constant": {"TaskType": ()},
    "flwr.common.constant": {"SubStatus": (), "ErrorCode": ()},
    "flwr.proto.runtime_pb2": {"AcquireTaskRequest": (), "SendTaskHeartbeatRequest": ()},
}
SLEEPS = ("time.sleep(3)", "time.sleep(0.5)")
# Options whose meaning the executor would have to share: TLS and a secret between SuperNode and executor.
NOT_SERVED = ("--ssl-", "--appio-", "--superexec-", "--isolation", "--allow-runtime-dependency-installation")
POLL_SECONDS = 0.02
HEARTBEAT_SECONDS = 20.0

log = logging.getLogger("flwr.umbel")


def problem(arguments: list[str], *, needed: dict[str, dict[str, tuple[str, ...]]] = NEEDED) -> str:
    """Return why the stock SuperNode must be used, or ''."""
    from importlib.metadata import version

    for argument in arguments:
        if argument.startswith(NOT_SERVED):
            return f"the option {argument.split('=')[0]} is not served"
    if not version("flwr").startswith(PINNED):
        return f"flwr is {version('flwr')}, not {PINNED}x"
    for module_name, names in needed.items():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            return f"{module_name} cannot be imported ({type(error).__name__})"
        for name, wanted in names.items():
            if not hasattr(module, name):
                return f"{module_name} has no {name}"
            if wanted:
                missing = set(wanted) - set(inspect.signature(getattr(module, name)).parameters)
                if missing:
                    return f"{module_name}.{name} has no parameter {sorted(missing)[0]!r}"
    source = inspect.getsource(importlib.import_module("flwr.supernode.start_client_internal"))
    for text in SLEEPS:
        if text not in source:
            return f"the SuperNode's loop no longer has {text}"
    return ""


class Waits:
    """Stands in for the module `time` in the SuperNode's loop; only two of its waits are shorter."""

    def __init__(
        self, *, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ):
        self._now, self._sleep, self._last = now, sleep, now()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Wait as the module's docstring says; a wait for a reply is a sign of work."""
        if seconds == 3:
            self._sleep(min(3.0, max(0.1, (self._now() - self._last) / 50.0)))
        elif seconds == 0.5:
            self._last = self._now()
            self._sleep(POLL_SECONDS)
        else:
            self._sleep(seconds)


class Executor:
    """Acquires the SuperNode's tasks, one after the other, and answers each through the site's worker."""

    def __init__(self, address: str, *, through: Callable[..., Any] | None = None) -> None:
        from client_app.resident.processes import process

        self.address, self._through = address, through
        self._owner = process(os.getpid())
        self._installed: dict[str, Path] = {}

    def client(self, *interceptors: Any) -> Any:
        """Return a client of the SuperNode's runtime API."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.retry import make_simple_http_retry_invoker
        from flwr.supercore.runtime import RuntimeHttpClient

        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
            retry_invoker=make_simple_http_retry_invoker(),
        )

    def run(self) -> None:
        """Serve for as long as the process lives."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        client = self.client()
        while True:
            try:
                answer = client.AcquireTask(request)
                if answer.HasField("task") and answer.token:
                    self.do(answer.token)
                else:
                    time.sleep(POLL_SECONDS)
            except Exception as error:
                log.warning("a task was not served: %s", type(error).__name__, exc_info=True)
                time.sleep(1.0)

    def do(self, token: str) -> None:
        """Serve one task: input, worker, reply, end; an error becomes an error reply, as in the stock runner."""
        from flwr.app import Error, Message
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        client = self.client(RuntimeTokenHttpInterceptor(token))
        over = threading.Event()
        threading.Thread(target=self.beat, args=(client, over), daemon=True).start()
        context, status, details = None, SubStatus.FAILED, "the task could not be read"
        try:
            message, context, _, fab = pull_task_input(client)
            try:
                reply = self.reply(message, context, fab)
                status, details = SubStatus.COMPLETED, ""
            except Exception as error:
                log.error("the message was not answered: %s", error, exc_info=True)
                details = f"{type(error).__name__}: {error}"
                code = (
                    ErrorCode.INVALID_FAB
                    if isinstance(error, PermissionError)
                    else ErrorCode.LOAD_CLIENT_APP_EXCEPTION
                    if isinstance(error, LookupError)
                    else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                )
                reply = Message(Error(code=code, reason=details), reply_to=message)
            push_message(client, reply, context)
        finally:
            push_task_output(client=client, context=context, sub_status=status, details=details)
            over.set()
            client.close()

    def reply(self, message: Any, context: Any, fab: Any) -> Any:
        """Return the worker's answer to one message; the worker runs the code of the message's bundle."""
        from client_app.app import answer
        from client_app.gate import gated
        from client_app.resident.client import ask
        from client_app.resident.installed import facts_of
        from umbel.messages import EVALUATE, FOLLOW_UP, JOIN, TRAIN

        kind = message.metadata.message_type
        if kind == FOLLOW_UP:
            return answer(kind, message, context)
        if kind not in (JOIN, TRAIN, EVALUATE):
            raise ValueError(f"no handler for messages of type {kind!r}")
        root = self.bundle(fab, str(context.node_config.get("allowed-bundles", "")))
        through = self._through or partial(ask, root=root, owner=self._owner)
        # This is installed code: the bundle's worker cannot go round the site's policy here.
        return answer(kind, message, context, through=gated(through, bundle=facts_of(fab.hash_str, root)))

    def bundle(self, fab: Any, allowed: str) -> Path:
        """Return the folder of an installed bundle; PermissionError when the site does not allow it."""
        from flwr.supernode.runtime.run_clientapp import install_from_fab

        from client_app.resident.installed import check_installed

        starts = [start.strip() for start in allowed.split(",") if start.strip()]
        if starts and not any(fab.hash_str.startswith(start) for start in starts):
            raise PermissionError(f"bundle {fab.hash_str[:12]} is not among this site's allowed-bundles")
        known = self._installed.get(fab.hash_str)
        if known is None or not known.is_dir():
            known = install_from_fab(fab.content, skip_prompt=True)
            check_installed(known, fab.content, fab.hash_str)
            self._installed[fab.hash_str] = known
        if not (known / "client_app/resident/worker.py").is_file():
            raise LookupError("the bundle is not one of Umbel; this site runs `umbel site`")
        return known

    @staticmethod
    def beat(client: Any, over: threading.Event) -> None:
        """Keep the task's lease; Flower's own sender would interrupt this whole process when refused."""
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        while not over.wait(HEARTBEAT_SECONDS):
            try:
                if not client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                    return
            except Exception as error:
                log.debug("heartbeat: %s", type(error).__name__)


def value_of(arguments: list[str], option: str) -> str:
    """Return the value of an option given as `--x v` or `--x=v`; '' when it is not there."""
    for i, argument in enumerate(arguments):
        if argument == option and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(option + "="):
            return argument.split("=", 1)[1]
    return ""


def names_policy(arguments: list[str]) -> bool:
    """Tell whether the operator named a site policy (`umbel.policy`)."""
    return bool(os.environ.get("UMBEL_SITE_POLICY")) or "policy=" in value_of(arguments, "--node-config")


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stock(arguments: list[str]) -> None:
    """Become the stock SuperNode."""
    beside = Path(sys.executable).parent / STOCK
    path = str(beside) if beside.exists() else shutil.which(STOCK) or STOCK
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    os.execv(path, [path, *arguments])


def main(arguments: list[str] | None = None) -> int:
    """Run the site; returns only when the SuperNode ends."""
    arguments = sys.argv[1:] if arguments is None else arguments
    reason = problem(arguments)
    if reason and names_policy(arguments):
        print(
            f"umbel site: {reason}; the stock {STOCK} would let the run's own code check the site's policy. Mend that, "
            "or start without a policy",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    if reason:
        print(f"umbel site: {reason}; the stock {STOCK} is used instead", file=sys.stderr, flush=True)
        stock(arguments)
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    loop.time = Waits()  # type: ignore[attr-defined]
    loop.pull_objects = partial(loop.pull_objects, initial_backoff=0.05)  # type: ignore[attr-defined]
    port = value_of(arguments, "--port") or str(free_port())
    host = value_of(arguments, "--host") or "127.0.0.1"
    rest = arguments if value_of(arguments, "--port") else [*arguments, "--port", port]
    executor = Executor(f"{host}:{port}")
    threading.Thread(target=serve_when_up, args=(executor, host, int(port)), daemon=True).start()
    sys.argv = [STOCK, *rest, "--isolation", "process"]
    flower_supernode()
    return 0


def serve_when_up(executor: Executor, host: str, port: int) -> None:
    """Start acquiring tasks once the SuperNode's runtime API listens."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.05)
    executor.run()


if __name__ == "__main__":
    sys.exit(main())
